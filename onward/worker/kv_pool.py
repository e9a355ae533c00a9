"""The worker's KV memory: one mapping without a name, touched only where tokens are written; and the slots' block tables.

It is private, unless it shall outlive the worker or peers shall write into it: then it is mapped from a file descriptor
that the supervisor keeps, or that is handed to peers. Such pages are as small as the system makes them (large ones would
need it to be set up for that).
"""

import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onward.kernels.cpu.kv_layout import POSITIONS_PER_RECORD, record_size
from onward.models.layers.paged_kv import PagedKV
from onward.pd.transfer.page_geometry import PageGeometry
from onward.proto.model import ModelConfig


def block_bytes(config: ModelConfig, dtype: np.dtype, block_size: int) -> int:
    """Keys and values of one block, in all layers."""
    return config.num_layers * _page_items(config, dtype, block_size) * dtype.itemsize


def _page_items(config: ModelConfig, dtype: np.dtype, block_size: int) -> int:
    records = config.num_kv_heads * block_size // POSITIONS_PER_RECORD
    return records * record_size(config.head_dim, dtype.itemsize)


@dataclass(frozen=True, slots=True)
class KvPool:
    kv: PagedKV
    geometry: PageGeometry
    fd: int | None
    """What it is mapped from, if it can be shared. Open for as long as the mapping is in use."""

    @property
    def data(self) -> np.ndarray:
        """All of it, as bytes."""
        return self.kv.data.view(np.uint8)


def num_blocks_in(fd: int, config: ModelConfig, dtype: np.dtype, block_size: int) -> int:
    """Blocks in memory that a worker has sized before; 0: none has."""
    num_blocks, rest = divmod(os.fstat(fd).st_size, block_bytes(config, dtype, block_size))
    assert rest == 0, "the memory is of a worker of the same model"
    return num_blocks


def allocate_kv_pool(
    config: ModelConfig,
    dtype: np.dtype,
    num_blocks: int,
    block_size: int,
    *,
    is_shared: bool = False,
    memory_fd: int | None = None,
) -> KvPool:
    """`is_shared`: it can be handed to peers. `memory_fd`: of memory that outlives the worker; what is in it stays."""
    assert num_blocks > 0, "a pool has at least one block"
    assert block_size % POSITIONS_PER_RECORD == 0, "a block consists of whole records"
    page_items = _page_items(config, dtype, block_size)
    geometry = PageGeometry(config.num_layers, num_blocks, page_items * dtype.itemsize)
    if memory_fd is None and is_shared:
        memory_fd = os.memfd_create("onward-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    memory = _map_private(geometry.num_bytes) if memory_fd is None else _map_shared(memory_fd, geometry.num_bytes)
    return KvPool(PagedKV(np.frombuffer(memory, dtype), num_blocks * page_items, block_size), geometry, memory_fd)


def _map_private(num_bytes: int) -> mmap.mmap:
    """Large pages where the system grants them: attention jumps between blocks and would miss the TLB each time."""
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _map_shared(fd: int, num_bytes: int) -> mmap.mmap:
    """Sealed in its size: who maps it can rely on it. The file descriptor is closed with the mapping."""
    if not os.fstat(fd).st_size:
        os.ftruncate(fd, num_bytes)
    assert os.fstat(fd).st_size == num_bytes, "the memory has the size of this pool"
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    memory = mmap.mmap(fd, num_bytes)
    weakref.finalize(memory, os.close, fd)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class BlockTables:
    """Which blocks hold each slot's history, as the kernels read it."""

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        self.ids = np.zeros((num_slots, max_blocks), np.int32)
        self.lengths = [0] * num_slots

    def replace(self, slot: int, block_ids: Sequence[int]) -> None:
        self.lengths[slot] = 0
        self.extend(slot, block_ids)

    def extend(self, slot: int, block_ids: Sequence[int]) -> None:
        start = self.lengths[slot]
        end = start + len(block_ids)
        if end > self.ids.shape[1]:
            raise ValueError(f"{end} blocks are more than the {self.ids.shape[1]} that the longest request needs")
        self.ids[slot, start:end] = block_ids
        self.lengths[slot] = end
