"""The worker's KV memory: one anonymous mapping, touched only where tokens are written, and the slots' block tables."""

import mmap

import numpy as np

from onward.layers.paged_kv import PagedKV
from onward.proto.model import ModelConfig


def block_bytes(config: ModelConfig, block_size: int) -> int:
    """Keys and values of one block, in all layers."""
    return 2 * config.num_layers * _block_floats(config, block_size) * 4


def _block_floats(config: ModelConfig, block_size: int) -> int:
    return config.num_kv_heads * config.head_dim * block_size


def allocate(config: ModelConfig, num_blocks: int, block_size: int) -> PagedKV:
    layer_stride = num_blocks * _block_floats(config, block_size)
    keys, values = (_map_floats(config.num_layers * layer_stride) for _ in range(2))
    return PagedKV(keys, values, layer_stride, block_size)


def _map_floats(count: int) -> np.ndarray:
    """Large pages where the system grants them: attention jumps between blocks and would miss the TLB each time."""
    memory = mmap.mmap(-1, count * 4)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.float32)


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
