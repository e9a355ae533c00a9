"""The worker's KV memory: one mapping without a name, touched only where tokens are written; and the slots' block tables.

It is private, unless peers shall write into it: then it is mapped from a file descriptor that can be handed to them. Such
pages are as small as the system makes them (large ones would need it to be set up for that).
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


def allocate_kv_pool(
    config: ModelConfig, dtype: np.dtype, num_blocks: int, block_size: int, *, is_shared: bool = False
) -> KvPool:
    assert num_blocks > 0, "a pool has at least one block"
    assert block_size % POSITIONS_PER_RECORD == 0, "a block consists of whole records"
    page_items = _page_items(config, dtype, block_size)
    geometry = PageGeometry(config.num_layers, num_blocks, page_items * dtype.itemsize)
    memory, fd = _map_shared(geometry.num_bytes) if is_shared else (_map_private(geometry.num_bytes), None)
    return KvPool(PagedKV(np.frombuffer(memory, dtype), num_blocks * page_items, block_size), geometry, fd)


def _map_private(num_bytes: int) -> mmap.mmap:
    """Large pages where the system grants them: attention jumps between blocks and would miss the TLB each time."""
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _map_shared(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Sealed in its size: who maps it can rely on it."""
    fd = os.memfd_create("onward-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    memory = mmap.mmap(fd, num_bytes)
    weakref.finalize(memory, os.close, fd)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, fd


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
