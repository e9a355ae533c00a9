"""Slow, obvious numpy for every kernel. Tests compare the fast kernels with it.

Integer products, and the float sums around them, follow the kernels' order and give the same bits. The other functions
are textbook formulas in float64, and agree up to rounding.
"""

import math
from typing import NamedTuple

import numpy as np

from onward.kernels.weight_formats import GROUP, format_of_record
from onward.kernels.weight_packing import unpack
from onward.proto.model import Experts


class QuantizedRows(NamedTuple):
    """[rows, inputs] int8 and [rows, groups] each."""

    values: np.ndarray
    scales: np.ndarray
    totals: np.ndarray
    corrections: np.ndarray
    low_corrections: np.ndarray


def quantize_rows(x: np.ndarray) -> QuantizedRows:
    """Quantizes rows with a scale per row and group of 32, which makes the group's largest value 127."""
    groups = x.astype(np.float32).reshape(len(x), -1, GROUP)
    largest = np.abs(groups).max(-1)
    safe = np.where(largest > 0, largest, np.float32(1))
    inverse = np.where(largest > 0, np.float32(127) / safe, np.float32(0)).astype(np.float32)
    values = np.rint(groups * inverse[..., None]).astype(np.int8)
    totals = values.astype(np.int32).sum(-1, dtype=np.int32)
    low = values[..., : GROUP // 2].astype(np.int32).sum(-1, dtype=np.int32)
    scales = largest / np.float32(127)
    return QuantizedRows(
        values.reshape(x.shape),
        scales,
        scales * totals.astype(np.float32),
        np.int32(-128) * totals,
        np.int32(-128) * low,
    )


def dequantize_rows(x: QuantizedRows) -> np.ndarray:
    return x.values.astype(np.float32) * np.repeat(x.scales, GROUP, axis=1)


def int8_linear(packed: np.ndarray, x: QuantizedRows) -> np.ndarray:
    """Returns x . weights, bit by bit as the kernel computes it."""
    kind, weights = format_of_record(packed.shape[-1]), unpack(packed)
    out = np.zeros((len(x.values), len(weights.levels)), np.float32)
    for group in range(weights.levels.shape[1]):
        inputs = x.values[:, group * GROUP : (group + 1) * GROUP].astype(np.int32)
        levels, scale, offset = weights.levels[:, group], weights.scale[:, group], weights.offset[:, group]
        if kind.has_half_groups:
            out = _add_halves(out, packed, group, x, inputs, levels)
            continue
        exact = inputs @ levels.T
        out = out + exact.astype(np.float32) * x.scales[:, group, None] * scale[None, :, 0]
        if kind.has_offset:
            out = out + offset[None, :, 0] * x.totals[:, group, None]
    return out


def _add_halves(
    out: np.ndarray, packed: np.ndarray, group: int, x: QuantizedRows, inputs: np.ndarray, levels: np.ndarray
) -> np.ndarray:
    """Adds a group whose halves have scales of their own. Each half's integer sum times its small scale is exact in
    float32, and so is the sum of its inputs times its offset."""
    parts = half_scales(packed, group)
    half = GROUP // 2
    sums = [inputs[:, part] @ levels[:, part].T for part in (slice(0, half), slice(half, GROUP))]
    both = sum_of_products([s.astype(np.float32) for s in sums], parts.scales)
    out = out + both * x.scales[:, group, None] * parts.d[None]
    if parts.offsets is not None:
        low = x.low_corrections[:, group]
        totals = [c.astype(np.float32)[:, None] for c in (low, x.corrections[:, group] - low)]
        both = sum_of_products(totals, parts.offsets)
        out = out + both * x.scales[:, group, None] * (parts.m / np.float32(128))[None]
    return out


class HalfScales(NamedTuple):
    """The factors of the scales of one group's halves, float32 [outputs]."""

    d: np.ndarray
    m: np.ndarray
    scales: list[np.ndarray]
    offsets: list[np.ndarray] | None


def half_scales(packed: np.ndarray, group: int) -> HalfScales:
    kind = format_of_record(packed.shape[-1])
    record = packed[:, group // kind.groups]
    headers = [record[:, at : at + 32].copy().view(np.float16).ravel().astype(np.float32) for at in (0, 32)]
    at = kind.header_bytes + group % kind.groups * kind.group_bytes + kind.level_bytes
    raw = [record[:, at + start : at + start + 16].copy() for start in (0, 16)]
    if kind.scales == "halves":
        scales = [part.view(np.int8).ravel().astype(np.float32) for part in raw]
        return HalfScales(headers[0], headers[1], scales, None)
    scales = [(part & 15).ravel().astype(np.float32) for part in raw]
    return HalfScales(headers[0], headers[1], scales, [(part >> 4).ravel().astype(np.float32) for part in raw])


def sum_of_products(totals: list[np.ndarray], scales: list[np.ndarray]) -> np.ndarray:
    return totals[0] * scales[0][None] + totals[1] * scales[1][None]


def weights(packed: np.ndarray) -> np.ndarray:
    """Returns the float32 matrix of a packed one."""
    levels, scale, offset = unpack(packed)
    halves = levels.reshape(*levels.shape[:2], 2, GROUP // 2).astype(np.float32)
    return (halves * scale[..., None] + offset[..., None]).reshape(len(levels), -1)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    wide = x.astype(np.float64)
    return (wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * weight).astype(np.float32)


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotates [rows, heads, head_dim] by the angles [rows, head_dim / 2]; dimension i is paired with i + head_dim /
    2."""
    low, high = np.split(x, 2, axis=-1)
    c, s = cos[:, None, :], sin[:, None, :]
    return np.concatenate([low * c - high * s, high * c + low * s], axis=-1)


class ScoreRules(NamedTuple):
    """How attention turns scores into weights. The defaults are those of a Llama."""

    scale: float | None = None
    """None: 1 / sqrt(head_dim)."""
    window: int | None = None
    softcap: float | None = None
    sinks: np.ndarray | None = None
    """[heads]."""

    def weights(self, q: np.ndarray, keys: np.ndarray, head: int) -> np.ndarray:
        """Returns the weights of one row for all keys up to its own. They add up to one, or to less if there is a
        sink."""
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
    """Computes causal attention. q [rows, heads, head_dim] at consecutive positions; keys and values [positions, kv
    heads, head_dim]."""
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
    """Computes `attention` with int8 KV, int8 queries, and weights that are bytes with a scale per 64 positions."""
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
    """Rounds to a 127th of the largest magnitude of the last axis."""
    step = np.abs(x.astype(np.float64)).max(-1, keepdims=True) / 127
    return np.rint(x / np.where(step > 0, step, 1)) * step


def _round_weights(weights: np.ndarray) -> np.ndarray:
    """Rounds to a 255th of the largest of each 64."""
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


def clamped_swiglu(gate: np.ndarray, up: np.ndarray, alpha: float, limit: float) -> np.ndarray:
    wide, other = np.minimum(gate.astype(np.float64), limit), np.clip(up.astype(np.float64), -limit, limit)
    return ((other + 1) * wide / (1 + np.exp(-alpha * wide))).astype(np.float32)


def choose_experts(
    scores: np.ndarray, experts: Experts, selection_bias: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the experts of one row and their weights. Of equal ranks, the one with the lowest index counts as
    larger."""
    if experts.scores == "softmax":
        chosen = np.array(_largest(scores, experts.top_k))
        weights = np.exp(scores.astype(np.float64) - scores.max())
        weights = weights[chosen] / (weights[chosen] if experts.renormalize else weights).sum()
    else:
        sigmoids = 1 / (1 + np.exp(-scores.astype(np.float64)))
        ranks = sigmoids + (0 if selection_bias is None else selection_bias)
        by_group = ranks.reshape(experts.num_groups, -1)
        best = _largest(np.sort(by_group, axis=1)[:, -2:].sum(1), experts.top_groups)
        inside = [expert for expert in range(len(ranks)) if expert // by_group.shape[1] in best]
        chosen = np.array([inside[i] for i in _largest(ranks[inside], experts.top_k)])
        weights = sigmoids[chosen] / (sigmoids[chosen].sum() if experts.renormalize else 1)
    return chosen, weights * experts.weight_multiplier


def _largest(values: np.ndarray, count: int) -> list[int]:
    return sorted(range(len(values)), key=lambda index: (-values[index], index))[:count]


def filtered_probabilities(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """Returns the probabilities of one row's tokens after all cuts, in float64."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    if 0 < top_k < len(p):
        p[p < np.sort(p)[-top_k]] = 0
    if top_p < 1:
        ordered = np.sort(p)[::-1]
        last = int(np.searchsorted(np.cumsum(ordered), top_p * p.sum()))
        p[p < ordered[min(last, len(p) - 1)]] = 0
    p[p < min_p] = 0
    return p / p.sum()
