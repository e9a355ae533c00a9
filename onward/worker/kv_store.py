"""The worker's KV memory: one anonymous mapping, touched only where tokens are written, and the slots' block tables."""

import mmap

import numpy as np

from onward.kernels.cpu.kv_layout import POSITIONS, record_size
from onward.layers.paged_kv import PagedKV
from onward.proto.model import ModelConfig


def block_bytes(config: ModelConfig, dtype: np.dtype, block_size: int) -> int:
    """Keys and values of one block, in all layers."""
    return config.num_layers * _page_items(config, dtype, block_size) * dtype.itemsize


def _page_items(config: ModelConfig, dtype: np.dtype, block_size: int) -> int:
    records = config.num_kv_heads * block_size // POSITIONS
    return records * record_size(config.head_dim, dtype.itemsize)


def allocate(config: ModelConfig, dtype: np.dtype, num_blocks: int, block_size: int) -> PagedKV:
    layer_stride = num_blocks * _page_items(config, dtype, block_size)
    return PagedKV(_map(config.num_layers * layer_stride, dtype), layer_stride, block_size)


def _map(count: int, dtype: np.dtype) -> np.ndarray:
    """Large pages where the system grants them: attention jumps between blocks and would miss the TLB each time."""
    memory = mmap.mmap(-1, count * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype)


class BlockTables:
    """Which blocks hold each slot's history, as the kernels read it."""

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        self.ids = np.zeros((num_slots, max_blocks), np.int32)
        self.lengths = [0] * num_slots

    def replace(self, slot: int, block_ids: list[int]) -> None:
        self.lengths[slot] = 0
        self.extend(slot, block_ids)

    def extend(self, slot: int, block_ids: list[int]) -> None:
        start = self.lengths[slot]
        end = start + len(block_ids)
        if end > self.ids.shape[1]:
            raise ValueError(f"{end} blocks are more than the {self.ids.shape[1]} that the longest request needs")
        self.ids[slot, start:end] = block_ids
        self.lengths[slot] = end
