"""The operations of a device's step in plain torch: slow, obvious, on any device. Tests compare `triton.triton_ops`
with them.
"""

from typing import Literal

import torch
import torch.nn.functional as F

from onward.kernels import torch_reference
from onward.kernels.ops import (
    FP8_MAX,
    Activation,
    AttentionLayer,
    HeadShape,
    NormWeights,
    RowTensors,
    Scoring,
    SlotTensors,
)


class TorchOps:
    device_kind: Literal["torch", "cuda"] = "torch"
    tile_rows = 16

    def reserve(self, heads: HeadShape, max_num_seqs: int, max_sampled: int, vocab_size: int, device: str) -> None:
        pass

    def load_rows(self, slots: SlotTensors, rows: RowTensors, block_size: int) -> None:
        row_slots, lengths = rows.slots.long(), rows.lengths.long()
        newest = (lengths - 1).clamp(min=0)
        grows = rows.new_blocks >= 0
        slots.tables[row_slots[grows], newest[grows] // block_size] = rows.new_blocks[grows]
        rows.token_ids.copy_(slots.tokens[row_slots, newest])
        rows.tables.copy_(slots.tables[row_slots])
        for target, source in zip(
            (rows.temperatures, rows.top_ps, rows.min_ps, rows.top_ks), slots.float_params[:, row_slots], strict=True
        ):
            target.copy_(source)
        seeds, choices, num_prompts = slots.int_params[:, row_slots]
        rows.seeds.copy_(seeds)
        rows.choices.copy_(choices)
        rows.positions.copy_(lengths - num_prompts)

    def append_sampled_tokens(self, slots: SlotTensors, rows: RowTensors) -> None:
        slots.tokens[rows.slots.long(), rows.lengths.long()] = rows.sampled[0]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        out.copy_(torch_reference.rms_norm(x, weight, eps))

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        residual += x
        out.copy_(torch_reference.rms_norm(residual, weight, eps))

    def norm(self, x: torch.Tensor, norm: NormWeights, eps: float, out: torch.Tensor) -> None:
        out.copy_(torch_reference.norm(x, norm, eps))

    def add_scaled(self, x: torch.Tensor, factor: float, residual: torch.Tensor) -> None:
        residual.copy_(residual.double() + factor * x.double())

    def silu_and_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch_reference.silu_and_mul(gate_up))

    def activate(self, x: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        gate, *up = x.double().split(out.shape[1], dim=1)
        active = torch_reference.ACTIVATIONS[activation](gate)
        out.copy_(active * up[0] if up else active)

    def finish_logits(self, logits: torch.Tensor, multiplier: float, softcap: float | None) -> None:
        scaled = logits.double() * multiplier
        logits.copy_(scaled if softcap is None else torch_reference.softcapped(scaled, softcap))

    def decode_attention(
        self, qkv: torch.Tensor, kv: torch.Tensor, rows: RowTensors, layer: AttentionLayer, out: torch.Tensor
    ) -> None:
        lengths = rows.lengths.tolist()
        live = [row for row, length in enumerate(lengths) if length]
        positions = (rows.lengths - 1).clamp(min=0)
        pages = rows.tables.gather(1, (positions.long() // kv.shape[3])[:, None])[:, 0]
        self.rotate_and_store(qkv[live], kv, positions[live], pages[live], layer)
        queries = _rotated(_heads(qkv, kv)[0], positions, 0, layer)
        for row in live:
            query = queries[row : row + 1].to(qkv.dtype)
            attended = _attended(query, kv, rows.tables[row], lengths[row] - 1, layer.scoring)
            out[row].copy_(attended.flatten())

    def rotate_and_store(
        self, qkv: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, pages: torch.Tensor, layer: AttentionLayer
    ) -> None:
        q, k, v = _heads(qkv, kv)
        q.copy_(_rotated(q, positions, 0, layer))
        lanes = positions.long() % kv.shape[3]
        k = _rotated(k, positions, 1, layer)
        kv[pages.long(), 0, :, lanes], kv[pages.long(), 1, :, lanes] = k.to(kv.dtype), v.to(kv.dtype)

    def chunk_attention(
        self, qkv: torch.Tensor, kv: torch.Tensor, tables: torch.Tensor, tiles: torch.Tensor, num_heads: int,
        scoring: Scoring, out: torch.Tensor,
    ) -> None:  # fmt: skip
        dim = kv.shape[4]
        queries = qkv[:, : num_heads * dim].unflatten(1, (num_heads, dim))
        for first, count, slot, position in tiles.tolist():
            if count:
                attended = _attended(queries[first : first + count], kv, tables[slot], position, scoring)
                out[first : first + count].copy_(attended.flatten(1))

    def matmul(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None,
        scales: torch.Tensor | None,
    ) -> None:  # fmt: skip
        if scales is None:
            out.copy_(F.linear(x, weight, bias))
            return
        row_scales = x.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / FP8_MAX
        narrow = (x.float() / row_scales).to(torch.float8_e4m3fn).float()
        product = F.linear(narrow, weight.float()) * row_scales * scales
        out.copy_(product if bias is None else product + bias)

    def invariant_linear(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(torch.cat([F.linear(row[None], weight) for row in x]))  # one by one, so that each has its own bits

    def invariant_gated_linear(
        self, x: torch.Tensor, weight: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor
    ) -> None:
        self.invariant_linear(x, weight, gate_up)
        self.silu_and_mul(gate_up, out)

    def single_row_linear(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scales: torch.Tensor | None, *,
        norm: tuple[torch.Tensor, float] | None = None, adds: bool = False, gates: bool = False,
    ) -> None:  # fmt: skip
        wide = weight.double() if scales is None else weight.double() * scales[:, None]
        product = F.linear(x.double() if norm is None else torch_reference.rms_norm(x, *norm), wide)
        product = torch_reference.silu_and_mul(product) if gates else product
        out.copy_(out + product if adds else product)

    def sample(self, logits: torch.Tensor, rows: RowTensors, *, with_cuts: bool) -> None:
        for row in range(len(logits)):
            token, is_valid = self._sample_row(logits[row].float(), rows, row, with_cuts)
            rows.sampled[0, row], rows.sampled[1, row] = token, int(is_valid)

    def apply_token_bitmask(self, logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
        powers = torch.arange(8, dtype=torch.uint8, device=bits.device)
        allowed = (bits[:, :, None] >> powers & 1).bool().flatten(1)[:, : logits.shape[1]]
        logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)

    def logsumexp(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.stack([row.double().logsumexp(0) for row in logits])

    def accumulate_rows(self, x: torch.Tensor, total: torch.Tensor) -> None:
        for row in x:
            total += row

    def _sample_row(self, logits: torch.Tensor, rows: RowTensors, row: int, with_cuts: bool) -> tuple[int, bool]:
        if not bool((logits < torch.inf).all()) or not bool((logits > -torch.inf).any()):
            return 0, False
        temperature = float(rows.temperatures[row])
        if temperature <= 0:
            return int(logits.argmax()), True
        cuts = (int(rows.top_ks[row]), float(rows.top_ps[row]), float(rows.min_ps[row])) if with_cuts else (0, 1.0, 0.0)
        ends = torch_reference.filtered_weights(logits, temperature, *cuts).cumsum(0)
        number = torch_reference.uniform(int(rows.seeds[row]), int(rows.choices[row]), int(rows.positions[row]))
        return min(int(torch.searchsorted(ends, number * ends[-1], right=True)), len(logits) - 1), True


def _heads(qkv: torch.Tensor, kv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    num_kv_heads, dim = kv.shape[2], kv.shape[4]
    heads = qkv.unflatten(1, (-1, dim))
    return heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)


def _rotated(heads: torch.Tensor, positions: torch.Tensor, kind: int, layer: AttentionLayer) -> torch.Tensor:
    """Returns queries (kind 0) or keys (kind 1) after their norm and their rotation."""
    if layer.norms is not None:
        true_dim = len(layer.norms[kind])
        heads = F.pad(
            torch_reference.rms_norm(heads[..., :true_dim], layer.norms[kind], layer.eps),
            (0, heads.shape[-1] - true_dim),
        )  # fmt: skip
    if layer.rotary is None:
        return heads
    cos, sin = (table[positions.long()] for table in layer.rotary)
    return torch_reference.rotate(heads, cos, sin)


def _attended(
    queries: torch.Tensor, kv: torch.Tensor, table: torch.Tensor, position: int, scoring: Scoring
) -> torch.Tensor:
    """Returns attention of queries [rows, heads, head_dim] at consecutive positions from `position` on."""
    first = 0 if scoring.window is None else max(0, position - scoring.window + 1)
    keys, values = torch_reference.history(kv, table, position + len(queries), first)
    return torch_reference.attention(queries, keys, values, position - first, scoring)
