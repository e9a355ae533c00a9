"""Slow, obvious numpy for every kernel: what the fast ones are tested against.

Integer products, and the float sums around them, follow the kernels' order and are meant to give the same bits. The
others are written as the textbook has them, in float64, and agree up to rounding.
"""

import math
from typing import NamedTuple

import numpy as np

from onward.kernels.weight_packing import GROUP, NIBBLES_RECORD, unpack


class QuantizedRows(NamedTuple):
    """[rows, inputs] int8 and [rows, groups] each."""

    values: np.ndarray
    scales: np.ndarray
    totals: np.ndarray
    corrections: np.ndarray


def quantize_rows(x: np.ndarray) -> QuantizedRows:
    """A scale per row and group of 32, which makes the group's largest value 127."""
    groups = x.astype(np.float32).reshape(len(x), -1, GROUP)
    largest = np.abs(groups).max(-1)
    safe = np.where(largest > 0, largest, np.float32(1))
    inverse = np.where(largest > 0, np.float32(127) / safe, np.float32(0)).astype(np.float32)
    values = np.rint(groups * inverse[..., None]).astype(np.int8)
    totals = values.astype(np.int32).sum(-1, dtype=np.int32)
    scales = largest / np.float32(127)
    return QuantizedRows(values.reshape(x.shape), scales, scales * totals.astype(np.float32), np.int32(-128) * totals)


def dequantize_rows(x: QuantizedRows) -> np.ndarray:
    return x.values.astype(np.float32) * np.repeat(x.scales, GROUP, axis=1)


def int8_linear(packed: np.ndarray, x: QuantizedRows) -> np.ndarray:
    """x . weights, bit by bit as the kernel computes it."""
    levels, scale, offset = unpack(packed)
    out = np.zeros((len(x.values), len(levels)), np.float32)
    for group in range(scale.shape[1]):
        inputs = slice(group * GROUP, (group + 1) * GROUP)
        exact = x.values[:, inputs].astype(np.int32) @ levels[:, inputs].T
        out = out + exact.astype(np.float32) * x.scales[:, group, None] * scale[None, :, group]
        if packed.shape[-1] == NIBBLES_RECORD:
            out = out + offset[None, :, group] * x.totals[:, group, None]
    return out


def weights(packed: np.ndarray) -> np.ndarray:
    """The float32 matrix that a packed one stands for."""
    levels, scale, offset = unpack(packed)
    grouped = levels.reshape(len(levels), -1, GROUP).astype(np.float32)
    return (grouped * scale[..., None] + offset[..., None]).reshape(levels.shape)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    wide = x.astype(np.float64)
    return (wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * weight).astype(np.float32)


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """[rows, heads, head_dim] by the angles [rows, head_dim / 2]; dimension i turns with i + head_dim / 2."""
    low, high = np.split(x, 2, axis=-1)
    c, s = cos[:, None, :], sin[:, None, :]
    return np.concatenate([low * c - high * s, high * c + low * s], axis=-1)


class ScoreRules(NamedTuple):
    """How scores become weights, where that differs from a Llama's attention."""

    scale: float | None = None
    """None: 1 / sqrt(head_dim)."""
    window: int | None = None
    softcap: float | None = None
    sinks: np.ndarray | None = None
    """[heads]."""

    def weights(self, q: np.ndarray, keys: np.ndarray, head: int) -> np.ndarray:
        """Of one row and all keys up to its own; they add up to one, or to less where there is a sink."""
        scores = keys @ q * (len(q) ** -0.5 if self.scale is None else self.scale)
        if self.softcap is not None:
            scores = self.softcap * np.tanh(scores / self.softcap)
        if self.window is not None:
            scores[: max(0, len(scores) - self.window)] = -np.inf
        sink = [] if self.sinks is None else [float(self.sinks[head])]
        top = max(scores.max(), *sink) if sink else scores.max()
        weights = np.exp(scores - top)
        return weights / (weights.sum() + sum(np.exp(score - top) for score in sink))


PLAIN_SCORES = ScoreRules()


def attention(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, first_position: int, rules: ScoreRules = PLAIN_SCORES
) -> np.ndarray:
    """q [rows, heads, head_dim] at consecutive positions; keys and values [positions, kv heads, head_dim]."""
    rows, num_heads, _ = q.shape
    group = num_heads // keys.shape[1]
    out = np.empty(q.shape, np.float64)
    for row in range(rows):
        seen = first_position + row + 1
        for head in range(num_heads):
            k, v = keys[:seen, head // group].astype(np.float64), values[:seen, head // group].astype(np.float64)
            out[row, head] = rules.weights(q[row, head].astype(np.float64), k, head) @ v
    return out.astype(np.float32)


def int8_attention(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, first_position: int, rules: ScoreRules = PLAIN_SCORES
) -> np.ndarray:
    """The same with int8 KV, int8 queries, and weights that are bytes with a scale per 64 positions."""
    rows, num_heads, _ = q.shape
    group = num_heads // keys.shape[1]
    q, keys = _round_vectors(q), _round_vectors(keys)
    value_scales = np.abs(values).max(-1) / 127
    levels = np.rint(values / np.where(value_scales > 0, value_scales, 1)[..., None])
    out = np.empty(q.shape, np.float64)
    for row in range(rows):
        seen = first_position + row + 1
        for head in range(num_heads):
            kv_head = head // group
            weight = rules.weights(q[row, head], keys[:seen, kv_head], head)
            scaled = _round_weights(weight * value_scales[:seen, kv_head])
            out[row, head] = scaled @ levels[:seen, kv_head]
    return out.astype(np.float32)


def _round_vectors(x: np.ndarray) -> np.ndarray:
    """To a 127th of the largest of the last axis."""
    step = np.abs(x.astype(np.float64)).max(-1, keepdims=True) / 127
    return np.rint(x / np.where(step > 0, step, 1)) * step


def _round_weights(weights: np.ndarray) -> np.ndarray:
    """To a 255th of the largest of each 64."""
    rounded = weights.copy()
    for start in range(0, len(weights), 64):
        part = weights[start : start + 64]
        step = part.max() / 255
        rounded[start : start + 64] = np.rint(part / step) * step if step > 0 else 0
    return rounded


def activate(kind: str, x: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    match kind:
        case "silu":
            result = wide / (1 + np.exp(-wide))
        case "gelu_tanh":
            result = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
        case "gelu":
            result = np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in wide.ravel()]).reshape(wide.shape)
        case _:
            assert kind == "relu", kind
            result = np.maximum(wide, 0)
    return result.astype(np.float32)


def silu_and_mul(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    wide = gate.astype(np.float64)
    return (up * (wide / (1 + np.exp(-wide)))).astype(np.float32)


def filtered_probabilities(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """The probabilities of one row's tokens after all cuts, in float64."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    if 0 < top_k < len(p):
        p[p < np.sort(p)[-top_k]] = 0
    if top_p < 1:
        ordered = np.sort(p)[::-1]
        last = int(np.searchsorted(np.cumsum(ordered), top_p * p.sum()))
        p[p < ordered[min(last, len(p) - 1)]] = 0
    p[p < min_p] = 0
    return p / p.sum()
