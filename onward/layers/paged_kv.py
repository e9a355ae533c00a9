"""The memory that holds keys and values, and what attention needs to find its way in it."""

from dataclasses import dataclass

import numpy as np

from onward.kernels.cpu.attention import scratch_size
from onward.proto.model import ModelConfig


@dataclass(slots=True)
class PagedKV:
    """Flat float32 arrays, laid out as `kernels.cpu.attention` says, layer after layer."""

    keys: np.ndarray
    values: np.ndarray
    layer_stride: int
    block_size: int


@dataclass(slots=True)
class AttentionScratch:
    """Each thread's working memory, and the counter from which threads draw work."""

    buffer: np.ndarray
    stride: int
    work: np.ndarray
    num_threads: int

    @classmethod
    def allocate(cls, config: ModelConfig, max_model_len: int, num_threads: int) -> "AttentionScratch":
        stride = scratch_size(config.num_heads // config.num_kv_heads, config.head_dim, max_model_len)
        buffer = np.empty(stride * num_threads, np.float32)
        return cls(buffer, stride, np.zeros(8, np.int64), num_threads)
