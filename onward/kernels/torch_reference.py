"""Slow, obvious torch for every kernel of `triton`, in float64, on any device. Tests compare the fast kernels with it.

Inputs are widened first, so that only the kernels' rounding makes a difference.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from onward.kernels.ops import NormWeights, Scoring

_STEP = 0x9E3779B97F4A7C15
_U64 = (1 << 64) - 1


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh"), "relu": F.relu,
}  # fmt: skip


def history(kv: torch.Tensor, table: torch.Tensor, length: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys and values [length - first, kv heads, head_dim] of one request from position `first` on, gathered
    from its pages. The table's entries before that are not read."""
    skipped, blocks = first // kv.shape[3], -(-length // kv.shape[3])
    pages = kv[table[skipped:blocks].long()]  # [blocks, 2, heads, positions, dim]
    flat = pages.permute(1, 0, 3, 2, 4).reshape(2, -1, kv.shape[2], kv.shape[4])
    begin = skipped * kv.shape[3]
    keys, values = flat[:, first - begin : length - begin]
    return keys, values


def attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first_position: int, scoring: Scoring | None = None
) -> torch.Tensor:
    """Computes causal attention. q [rows, heads, head_dim] at consecutive positions; keys and values [positions, kv
    heads, head_dim]. Without `scoring` scores are divided by the root of the head's size."""
    rows, num_heads, dim = q.shape
    scoring = scoring or Scoring(dim**-0.5)
    group = num_heads // keys.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("rhd,phd->hrp", q.double(), k) * scoring.scale
    if scoring.softcap is not None:
        scores = softcapped(scores, scoring.softcap)
    rows_at = first_position + torch.arange(rows, device=q.device)[:, None]
    at = torch.arange(len(keys), device=q.device)[None, :]
    hidden = at > rows_at
    if scoring.window is not None:
        hidden |= at <= rows_at - scoring.window
    scores = scores.masked_fill(hidden, -torch.inf)
    if scoring.sinks is not None:
        scores = torch.cat([scores, scoring.sinks.double()[:, None, None].expand(-1, rows, 1)], -1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return torch.einsum("hrp,phd->rhd", weights, v)


def softcapped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(scores / cap)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return norm(x, NormWeights(weight), eps)


def norm(x: torch.Tensor, norm: NormWeights, eps: float) -> torch.Tensor:
    wide, count = x.double(), norm.count or x.shape[-1]
    if norm.centers:
        assert norm.count is None, "padding would no longer be zero"
        wide = wide - wide.mean(-1, keepdim=True)
    scaled = wide / (wide.pow(2).sum(-1, keepdim=True) / count + eps).sqrt() * norm.weight.double()
    return scaled if norm.bias is None else scaled + norm.bias.double()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates [rows, heads, head_dim] by the angles [rows, rotated / 2]. Of the first `rotated` dimensions, i is paired
    with i + rotated / 2."""
    half = cos.shape[-1]
    low, high, rest = x.double().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    c, s = cos.double()[:, None, :], sin.double()[:, None, :]
    return torch.cat([low * c - high * s, high * c + low * s, rest], dim=-1)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return up * gate * torch.sigmoid(gate)


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Returns `proto.model.ClampedSwiglu` of gate and up, in the type of its inputs."""
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def uniform(seed: int, choice: int, position: int) -> float:
    """Returns the random number in [0, 1) of a row, as in `kernels.cpu.sampling`."""
    state = _mix(seed + _STEP)
    state = _mix((state ^ choice) + _STEP)
    state = _mix((state ^ position) + _STEP)
    return (state >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x &= _U64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _U64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _U64
    return x ^ (x >> 31)


def filtered_weights(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Returns one row's weights after all cuts, relative to the likeliest token's."""
    weights = ((logits.double() - logits.double().max()) / temperature).exp()
    if 0 < top_k < len(weights):
        weights = weights.where(weights >= weights.sort().values[-top_k], 0.0)
    if top_p < 1:
        ordered = weights.sort(descending=True).values
        last = int(torch.searchsorted(ordered.cumsum(0), top_p * weights.sum()))
        weights = weights.where(weights >= ordered[min(last, len(ordered) - 1)], 0.0)
    return weights.where(weights >= min_p, 0.0)
