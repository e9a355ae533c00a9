"""A whole model in the int8 scheme, written with `kernels.numpy_reference` only, one token list at a time."""

from collections.abc import Mapping

import numpy as np

from onward.kernels import numpy_reference
from onward.models.layers.rotary_table import build_rotary
from onward.proto.model import ModelConfig


def reference_logits(config: ModelConfig, arrays: Mapping[str, np.ndarray], token_ids: list[int]) -> np.ndarray:
    count = len(token_ids)
    rotary = build_rotary(config, count)
    cos, sin = (table.reshape(count, -1) for table in (rotary.cos, rotary.sin))
    hidden = numpy_reference.weights(arrays["embed"])[token_ids]
    for layer in range(config.num_layers):
        part = {name.split(".", 2)[2]: a for name, a in arrays.items() if name.startswith(f"layers.{layer}.")}
        hidden = hidden + _attention(config, part, hidden, cos, sin)
        hidden = hidden + _mlp(config, part, hidden)
    final = numpy_reference.rms_norm(hidden, arrays["norm"], config.rms_norm_eps)
    head = arrays["embed"] if config.tie_word_embeddings else arrays["head"]
    return _linear(head, final)[:, : config.vocab_size]


def _linear(packed: np.ndarray, x: np.ndarray) -> np.ndarray:
    return numpy_reference.int8_linear(packed, numpy_reference.quantize_rows(x))


def _attention(
    config: ModelConfig, part: Mapping[str, np.ndarray], hidden: np.ndarray, cos: np.ndarray, sin: np.ndarray
) -> np.ndarray:
    heads, kv_heads, eps = config.num_heads, config.num_kv_heads, config.rms_norm_eps
    qkv = _linear(part["qkv"], numpy_reference.rms_norm(hidden, part["input_norm"], eps))
    qkv = qkv[:, : (heads + 2 * kv_heads) * config.head_dim]
    if config.qkv_bias:
        qkv = qkv + part["qkv_bias"]
    q, k, v = np.split(qkv.reshape(len(hidden), -1, config.head_dim), [heads, heads + kv_heads], axis=1)
    if config.qk_norm:
        q, k = numpy_reference.rms_norm(q, part["q_norm"], eps), numpy_reference.rms_norm(k, part["k_norm"], eps)
    q, k = numpy_reference.rotate(q, cos, sin), numpy_reference.rotate(k, cos, sin)
    attend = (
        numpy_reference.attention if config.qkv_bias else numpy_reference.int8_attention
    )  # biased keys are kept as floats
    return _linear(part["o"], attend(q, k, v, 0).reshape(len(hidden), -1))


def _mlp(config: ModelConfig, part: Mapping[str, np.ndarray], hidden: np.ndarray) -> np.ndarray:
    both = _linear(part["gate_up"], numpy_reference.rms_norm(hidden, part["post_norm"], config.rms_norm_eps))
    tiles = both.reshape(len(hidden), -1, 2, 16)
    gate, up = (tiles[:, :, i].reshape(len(hidden), -1) for i in range(2))
    return _linear(part["down"], numpy_reference.silu_and_mul(gate, up))
