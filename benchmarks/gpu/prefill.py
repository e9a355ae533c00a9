"""A prefill step: whole prompts of several streams, packed; the first token of each is drawn at the end."""

from collections.abc import Sequence

import torch

from benchmarks.gpu.model import EPS, Model, Streams, rows_of
from benchmarks.gpu.paged_case import DEVICE, on_device
from onward.kernels.triton.activation import silu_gate
from onward.kernels.triton.norm import add_rms_norm, rms_norm
from onward.kernels.triton.prefill_attention import PrefillPlan, prefill_attention
from onward.kernels.triton.prefill_tiles import prefill_tiles
from onward.kernels.triton.rotary import rotate_and_store
from onward.kernels.triton.sampling import SampleInputs, SampleScratch, sample


class PrefillStep:
    def __init__(self, model: Model, max_rows: int) -> None:
        shape, heads = model.shape, model.shape.heads
        self.model, self.max_rows, self.plan = model, max_rows, PrefillPlan()
        self.residual, self.normed, self.product = (rows_of(max_rows, shape.hidden) for _ in range(3))
        self.qkv, self.attended = rows_of(max_rows, heads.qkv_width), rows_of(max_rows, heads.num_heads * heads.dim)
        self.gate_up, self.act = rows_of(max_rows, 2 * shape.mlp), rows_of(max_rows, shape.mlp)

    def run(self, prompts: Sequence[torch.Tensor], first_stream: int, streams: Streams) -> None:
        """Prompts are int64 on the device, of streams that follow each other."""
        counts = [len(prompt) for prompt in prompts]
        chunks = [(first_stream + i, 0, count) for i, count in enumerate(counts)]
        tiles = on_device(prefill_tiles(chunks, self.model.shape.heads.group, self.plan.rows))
        ends = torch.tensor(counts).cumsum(0).to(DEVICE)
        positions = torch.cat([torch.arange(count, device=DEVICE) for count in counts])
        owners = torch.repeat_interleave(torch.arange(len(counts), device=DEVICE), torch.tensor(counts, device=DEVICE))
        pages = streams.tables[first_stream + owners, positions // self.model.block_size]
        hidden = self._layers(torch.cat(list(prompts)), positions.int(), pages, tiles, streams.tables)
        self._draw(hidden[ends - 1], slice(first_stream, first_stream + len(counts)), streams)

    def _layers(
        self, token_ids: torch.Tensor, positions: torch.Tensor, pages: torch.Tensor, tiles: torch.Tensor, tables
    ) -> torch.Tensor:
        model, heads, n = self.model, self.model.shape.heads, len(token_ids)
        residual, normed, product = self.residual[:n], self.normed[:n], self.product[:n]
        qkv, attended, gate_up, act = self.qkv[:n], self.attended[:n], self.gate_up[:n], self.act[:n]
        q = qkv[:, : heads.num_heads * heads.dim].unflatten(1, (heads.num_heads, heads.dim))
        torch.index_select(model.embedding, 0, token_ids, out=residual)
        rms_norm(residual, model.layers[0].input_norm, EPS, normed)
        for layer, next_norm in zip(model.layers, model.following_norms, strict=True):
            torch.mm(normed, layer.qkv.T, out=qkv)
            rotate_and_store(qkv, layer.kv, positions, pages, layer.head_norms, EPS, model.rotary)
            prefill_attention(q, layer.kv, tables, tiles, attended.view(n, heads.num_heads, heads.dim), self.plan)
            torch.mm(attended, layer.o.T, out=product)
            add_rms_norm(product, residual, layer.post_norm, EPS, normed)
            torch.mm(normed, layer.gate_up.T, out=gate_up)
            silu_gate(gate_up, act)
            torch.mm(act, layer.down.T, out=product)
            add_rms_norm(product, residual, next_norm, EPS, normed)
        return normed

    def _draw(self, hidden: torch.Tensor, rows: slice, streams: Streams) -> None:
        given = streams.inputs
        inputs = SampleInputs(given.temperatures[rows], given.seeds[rows], given.choices[rows], given.positions[rows])
        logits = hidden @ self.model.embedding.T
        scratch = SampleScratch.allocate(len(hidden), logits.shape[1], DEVICE)
        sample(logits, inputs, streams.token_ids[rows], streams.is_valid[rows], scratch)
        streams.lengths[rows] += 1
        given.positions[rows] += 1
