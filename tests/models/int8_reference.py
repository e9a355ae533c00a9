"""A whole model in the int8 scheme, written with `kernels.numpy_reference` only, one token list at a time."""

from collections.abc import Mapping

import numpy as np

from onward.kernels import numpy_reference
from onward.kernels.quantize import segments_of
from onward.models.layers.rotary_table import build_rotary
from onward.proto.model import Experts, ModelConfig


def reference_logits(config: ModelConfig, arrays: Mapping[str, np.ndarray], token_ids: list[int]) -> np.ndarray:
    count = len(token_ids)
    rotary = build_rotary(config, count)
    cos, sin = (table.reshape(count, -1) for table in (rotary.cos, rotary.sin))
    hidden = numpy_reference.weights(arrays["embed"])[token_ids]
    for layer in range(config.num_layers):
        part = {name.split(".", 2)[2]: a for name, a in arrays.items() if name.startswith(f"layers.{layer}.")}
        hidden = hidden + _attention(config, part, hidden, cos, sin)
        hidden = hidden + _mlp(config, part, hidden, config.layer_experts(layer))
    final = numpy_reference.rms_norm(hidden, arrays["norm"], config.rms_norm_eps)
    head = arrays["embed"] if config.tie_word_embeddings else arrays["head"]
    return _linear(head, final)[:, : config.vocab_size]


def _linear(packed: np.ndarray, x: np.ndarray) -> np.ndarray:
    return numpy_reference.int8_linear(packed, numpy_reference.quantize_rows(x))


def _attention(
    config: ModelConfig, part: Mapping[str, np.ndarray], hidden: np.ndarray, cos: np.ndarray, sin: np.ndarray
) -> np.ndarray:
    heads, kv_heads, eps = config.num_heads, config.num_kv_heads, config.rms_norm_eps
    normed = numpy_reference.rms_norm(hidden, part["input_norm"], eps)
    qkv = np.concatenate([_linear(segment, normed) for segment in segments_of(part, "qkv")], axis=1)
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


def _mlp(
    config: ModelConfig, part: Mapping[str, np.ndarray], hidden: np.ndarray, experts: Experts | None
) -> np.ndarray:
    normed = numpy_reference.rms_norm(hidden, part["post_norm"], config.rms_norm_eps)
    if experts is None:
        return _one_mlp(config, part, "", normed)
    scores = normed @ part["router"].T + part.get("router_bias", 0)
    total = np.zeros_like(hidden)
    for row, row_scores in enumerate(scores):
        for expert, share in zip(
            *numpy_reference.choose_experts(row_scores, experts, part.get("selection_bias")), strict=True
        ):
            total[row] += share * _one_mlp(config, part, f"experts.{expert}.", normed[row : row + 1])[0]
    if experts.shared_intermediate_size is not None:
        output = _one_mlp(config, part, "", normed)
        gate = part.get("shared_gate")
        total += output if gate is None else output / (1 + np.exp(-normed @ gate))[:, None]
    return total


def _one_mlp(config: ModelConfig, part: Mapping[str, np.ndarray], name: str, normed: np.ndarray) -> np.ndarray:
    both = _linear(part[f"{name}gate_up"], normed) + part.get(f"{name}gate_up_bias", np.float32(0))
    tiles = both.reshape(len(normed), -1, 2, 16)
    gate, up = (tiles[:, :, i].reshape(len(normed), -1) for i in range(2))
    if (clamped := config.clamped_swiglu) is not None:
        inner = numpy_reference.clamped_swiglu(gate, up, clamped.alpha, clamped.limit)
    else:
        inner = numpy_reference.silu_and_mul(gate, up)
    return _linear(part[f"{name}down"], inner) + part.get(f"{name}down_bias", np.float32(0))
