"""Slow, obvious torch for every kernel of `triton`, in float64, on any device: what the fast ones are tested against.

Inputs are widened first, so that what differs is the kernels' rounding alone.
"""

import torch

_STEP = 0x9E3779B97F4A7C15
_U64 = (1 << 64) - 1


def history(kv: torch.Tensor, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [length, kv heads, head_dim] of one request, gathered from its pages."""
    blocks = -(-length // kv.shape[3])
    pages = kv[table[:blocks].long()]  # [blocks, 2, heads, positions, dim]
    flat = pages.permute(1, 0, 3, 2, 4).reshape(2, -1, kv.shape[2], kv.shape[4])[:, :length]
    return flat[0], flat[1]


def attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first_position: int) -> torch.Tensor:
    """q [rows, heads, head_dim] at consecutive positions; keys and values [positions, kv heads, head_dim]."""
    rows, num_heads, dim = q.shape
    group = num_heads // keys.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("rhd,phd->hrp", q.double(), k) / dim**0.5
    rows_at = first_position + torch.arange(rows, device=q.device)
    hidden = torch.arange(len(keys), device=q.device)[None, :] > rows_at[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hrp,phd->rhd", weights, v)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """[rows, heads, head_dim] by the angles [rows, head_dim / 2]; dimension i turns with i + head_dim / 2."""
    low, high = x.double().chunk(2, dim=-1)
    c, s = cos.double()[:, None, :], sin.double()[:, None, :]
    return torch.cat([low * c - high * s, high * c + low * s], dim=-1)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return up * gate * torch.sigmoid(gate)


def uniform(seed: int, choice: int, position: int) -> float:
    """The number in [0, 1) that a row draws: the rule of `kernels.cpu.sampling`."""
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
    """One row's weights after all cuts, relative to the likeliest token's."""
    weights = ((logits.double() - logits.double().max()) / temperature).exp()
    if 0 < top_k < len(weights):
        weights = weights.where(weights >= weights.sort().values[-top_k], 0.0)
    if top_p < 1:
        ordered = weights.sort(descending=True).values
        last = int(torch.searchsorted(ordered.cumsum(0), top_p * weights.sum()))
        weights = weights.where(weights >= ordered[min(last, len(ordered) - 1)], 0.0)
    return weights.where(weights >= min_p, 0.0)
