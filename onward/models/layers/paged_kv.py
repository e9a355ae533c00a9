"""The memory of keys and values as CPU layers use it, and the working memory of attention."""

from dataclasses import dataclass

import numpy as np

from onward.kernels.cpu.attention_tiles import scratch_size
from onward.proto.model import ModelConfig


@dataclass(slots=True)
class PagedKV:
    """A flat array, float32 or int8, in the layout of `kernels.cpu.kv_layout`, layer after layer."""

    data: np.ndarray
    layer_stride: int
    block_size: int


def kv_dtype(config: ModelConfig, quantization: str) -> np.dtype:
    """Returns the data type of KV. int8 models have int8 KV, a quarter of the bytes, unless keys have biases (Qwen2).
    Biases make a few channels so large that with one scale per key nothing would be left of the others."""
    return np.dtype(np.int8 if quantization == "int8" and not config.qkv_bias else np.float32)


@dataclass(slots=True)
class AttentionScratch:
    """The working memory of each thread: that of attention, with `extra` floats after it."""

    buffer: np.ndarray
    stride: int

    @classmethod
    def allocate(cls, config: ModelConfig, max_model_len: int, num_threads: int, extra: int = 0) -> "AttentionScratch":
        stride = scratch_size(config.num_heads // config.num_kv_heads, config.head_dim, max_model_len) + extra
        return cls(np.zeros(stride * num_threads, np.float32), stride)
