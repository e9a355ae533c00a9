"""The worker's KV memory, and the slots' block tables. The memory is one mapping without a name, touched only where
tokens are written.

It is private, unless it outlives the worker or peers write into it. Then it is mapped from a file descriptor that the
supervisor keeps, or that peers get. The pages of such memory are usually small; large ones need a system that is
configured for them.
"""

import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from onward.kernels.cpu.kv_layout import POSITIONS_PER_RECORD, record_size
from onward.models.layers.paged_kv import PagedKV
from onward.pd.transfer.page_geometry import PageGeometry
from onward.proto.model import ModelConfig


def block_bytes(config: ModelConfig, dtype: np.dtype, block_size: int) -> int:
    """Returns the bytes of keys and values of one block, in all layers."""
    return config.num_layers * _page_items(config, dtype, block_size) * dtype.itemsize


def _page_items(config: ModelConfig, dtype: np.dtype, block_size: int) -> int:
    records = config.num_kv_heads * block_size // POSITIONS_PER_RECORD
    return records * record_size(config.head_dim, dtype.itemsize)


@dataclass(frozen=True, slots=True)
class KvPool:
    kv: PagedKV
    geometry: PageGeometry
    fd: int | None
    """The file descriptor that the memory is mapped from, if it can be shared. Open as long as the mapping is in
    use."""

    @property
    def data(self) -> np.ndarray:
        """The whole memory, as bytes."""
        return self.kv.data.view(np.uint8)


@dataclass(frozen=True, slots=True)
class PoolRegion:
    """The place of a pool in memory that the ranks of a float model share: each rank has a pool for its own heads."""

    offset: int
    """In bytes."""
    num_total_bytes: int
    """Size of the pools of all ranks."""

    @classmethod
    def of_rank(
        cls, config: ModelConfig, num_heads_before: int, dtype: np.dtype, num_blocks: int, block_size: int
    ) -> "PoolRegion":
        """`config` is that of the whole model; `num_heads_before` are the KV heads of the ranks before this one."""
        before = msgspec.structs.replace(config, num_kv_heads=num_heads_before)
        return cls(*(num_blocks * block_bytes(one, dtype, block_size) for one in (before, config)))


def num_blocks_in(fd: int, config: ModelConfig, dtype: np.dtype, block_size: int) -> int:
    """Returns the number of blocks in memory that an earlier worker has sized; 0 if none has."""
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
    region: PoolRegion | None = None,
) -> KvPool:
    """Maps the memory of a pool. `is_shared`: peers can map it too. `memory_fd` is the file descriptor of memory that
    outlives the worker; its content is kept. `region` is the pool's place in this memory; None: all of it."""
    assert num_blocks > 0, "a pool has at least one block"
    assert block_size % POSITIONS_PER_RECORD == 0, "a block consists of whole records"
    page_items = _page_items(config, dtype, block_size)
    geometry = PageGeometry(config.num_layers, num_blocks, page_items * dtype.itemsize)
    if memory_fd is None and is_shared:
        memory_fd = os.memfd_create("onward-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    region = region or PoolRegion(0, geometry.num_bytes)
    memory = _map_private(geometry.num_bytes) if memory_fd is None else _map_shared(memory_fd, region.num_total_bytes)
    data = np.frombuffer(memory, dtype, geometry.num_bytes // dtype.itemsize, region.offset)
    return KvPool(PagedKV(data, num_blocks * page_items, block_size), geometry, memory_fd)


def _map_private(num_bytes: int) -> mmap.mmap:
    """Maps private memory, with large pages where the system grants them: attention jumps between blocks and would miss
    the TLB each time."""
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _map_shared(fd: int, num_bytes: int) -> mmap.mmap:
    """Maps memory of a file descriptor, and seals its size so that other processes that map it can rely on it. The file
    descriptor is closed with the mapping."""
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
    """The block ids of each slot's tokens, as an array that the kernels read."""

    def __init__(self, num_slots: int, max_blocks: int, ids: np.ndarray | None = None) -> None:
        """`ids` is the array for the block ids, if other ranks read it too; None: the table allocates its own."""
        self.ids = np.zeros((num_slots, max_blocks), np.int32) if ids is None else ids
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
