"""A decode step of the first rows of a batch, over our kernels and torch's matrix products; made to be captured."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from benchmarks.gpu.model import EPS, Layer, Model, Streams, rows_of
from benchmarks.gpu.paged_case import DEVICE
from onward.kernels.triton import reference
from onward.kernels.triton.activation import silu_gate
from onward.kernels.triton.decode_attention import DecodePlan, DecodeScratch
from onward.kernels.triton.fused_decode import fused_decode
from onward.kernels.triton.linear import linear
from onward.kernels.triton.linear_plan import LinearPlan
from onward.kernels.triton.norm import add_rms_norm, rms_norm
from onward.kernels.triton.one_row_linear import OneRowPlan, one_row_linear
from onward.kernels.triton.sampling import SampleInputs, SampleScratch, sample


@triton.jit
def _advance(lengths, positions, size, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    length = tl.load(lengths + rows, mask=rows < size, other=0)
    tl.store(lengths + rows, length + 1, mask=length > 0)
    tl.store(positions + rows, tl.load(positions + rows, mask=length > 0) + 1, mask=length > 0)


class DecodeStep:
    """Buffers of one batch size. Tokens drawn are the next step's input, and lengths grow, on the device."""

    def __init__(self, model: Model, streams: Streams, rows: int, *, overlap: bool = True) -> None:
        shape, heads = model.shape, model.shape.heads
        self.model, self.rows, self.overlap = model, rows, overlap
        self.tables, self.lengths = streams.tables[:rows], streams.lengths[:rows]
        self.token_ids, self.is_valid = streams.token_ids[:rows], streams.is_valid[:rows]
        given = streams.inputs
        self.inputs = SampleInputs(
            given.temperatures[:rows], given.seeds[:rows], given.choices[:rows], given.positions[:rows]
        )
        self.plan = DecodePlan.choose(rows, heads.num_kv_heads, model.max_length, fused=True)
        self.scratch = DecodeScratch.allocate(
            rows, heads.num_heads, heads.num_kv_heads, heads.dim, self.plan.num_splits, DEVICE
        )
        self.sample_scratch = SampleScratch.allocate(rows, shape.vocab, DEVICE)
        self.residual, self.normed, self.product = (rows_of(rows, shape.hidden) for _ in range(3))
        self.qkv, self.attended = rows_of(rows, heads.qkv_width), rows_of(rows, heads.num_heads * heads.dim)
        self.gate_up, self.act, self.logits = (rows_of(rows, n) for n in (2 * shape.mlp, shape.mlp, shape.vocab))

    def run(self) -> None:
        """For any batch: torch's products."""
        torch.index_select(self.model.embedding, 0, self.token_ids, out=self.residual)
        rms_norm(self.residual, self.model.layers[0].input_norm, EPS, self.normed)
        for layer, next_norm in zip(self.model.layers, self.model.following_norms, strict=True):
            torch.mm(self.normed, layer.qkv.T, out=self.qkv)
            self._attend(layer)
            torch.mm(self.attended, layer.o.T, out=self.product)
            add_rms_norm(self.product, self.residual, layer.post_norm, EPS, self.normed, overlap=self.overlap)
            torch.mm(self.normed, layer.gate_up.T, out=self.gate_up)
            silu_gate(self.gate_up, self.act, overlap=self.overlap)
            torch.mm(self.act, layer.down.T, out=self.product)
            add_rms_norm(self.product, self.residual, next_norm, EPS, self.normed, overlap=self.overlap)
        torch.mm(self.normed, self.model.embedding.T, out=self.logits)
        self._draw()

    def run_ours(self) -> None:
        """For any batch: our products, whose bits do not depend on the batch. All launches overlap; the head's does not."""
        torch.index_select(self.model.embedding, 0, self.token_ids, out=self.residual)
        rms_norm(self.residual, self.model.layers[0].input_norm, EPS, self.normed)
        for layer, next_norm in zip(self.model.layers, self.model.following_norms, strict=True):
            self._linear(self.normed, layer.qkv, self.qkv)
            self._attend(layer)
            self._linear(self.attended, layer.o, self.product)
            add_rms_norm(self.product, self.residual, layer.post_norm, EPS, self.normed, overlap=self.overlap)
            self._linear(self.normed, layer.gate_up, self.act, gates=True)
            self._linear(self.act, layer.down, self.product)
            add_rms_norm(self.product, self.residual, next_norm, EPS, self.normed, overlap=self.overlap)
        torch.mm(self.normed, self.model.embedding.T, out=self.logits)
        self._draw()

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, gates: bool = False) -> None:
        plan = LinearPlan.choose(self.rows, out.shape[1], gates=gates)
        linear(x, weight, out, plan, gates=gates, overlap=self.overlap)

    def run_one_row(self) -> None:
        """For one stream: five launches a layer."""
        torch.index_select(self.model.embedding, 0, self.token_ids, out=self.residual)
        for layer in self.model.layers:
            self._one_row(self.residual, layer.qkv, self.qkv, norm=(layer.input_norm, EPS))
            self._attend(layer)
            self._one_row(self.attended, layer.o, self.residual, adds=True)
            self._one_row(self.residual, layer.gate_up, self.act, norm=(layer.post_norm, EPS), gates=True)
            self._one_row(self.act, layer.down, self.residual, adds=True)
        self._one_row(self.residual, self.model.embedding, self.logits, norm=(self.model.norm, EPS))
        self._draw()

    def _one_row(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, **options) -> None:
        one_row_linear(x, weight, out, OneRowPlan.choose(*weight.shape), overlap=self.overlap, **options)

    def _attend(self, layer: Layer) -> None:
        heads = self.model.shape.heads
        out = self.attended.view(self.rows, heads.num_heads, heads.dim)
        fused_decode(
            self.qkv, layer.kv, self.tables, self.lengths, out, layer.head_norms, EPS, self.model.rotary, self.plan,
            self.scratch, overlap=self.overlap,
        )  # fmt: skip

    def _draw(self) -> None:
        sample(self.logits, self.inputs, self.token_ids, self.is_valid, self.sample_scratch)
        _advance[(1,)](self.lengths, self.inputs.positions, self.rows, BLOCK=triton.next_power_of_2(self.rows))


def plain_logits(step: DecodeStep) -> torch.Tensor:
    """The logits of the same step in plain float64, from the state as it is: the oracle of the whole."""
    model, heads = step.model, step.model.shape.heads
    hidden = model.embedding[step.token_ids].double()
    positions = step.lengths.long() - 1
    for layer in model.layers:
        x = reference.rms_norm(hidden, layer.input_norm, EPS)
        qkv = F.linear(x, layer.qkv.double()).view(step.rows, -1, heads.dim)
        q, k, v = qkv.split([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], dim=1)
        cos, sin = model.rotary[0][positions], model.rotary[1][positions]
        q = reference.rotate(reference.rms_norm(q, layer.head_norms[0], EPS), cos, sin)
        k = reference.rotate(reference.rms_norm(k, layer.head_norms[1], EPS), cos, sin)
        rows = []
        for row, length in enumerate(step.lengths.tolist()):
            keys, values = (x[:-1].double() for x in reference.history(layer.kv, step.tables[row], length))
            keys, values = torch.cat([keys, k[row : row + 1]]), torch.cat([values, v[row : row + 1]])
            rows.append(reference.attention(q[row : row + 1], keys, values, length - 1))
        hidden = hidden + F.linear(torch.cat(rows).flatten(1), layer.o.double())
        x = reference.rms_norm(hidden, layer.post_norm, EPS)
        hidden = hidden + F.linear(reference.silu_gate(F.linear(x, layer.gate_up.double())), layer.down.double())
    return F.linear(reference.rms_norm(hidden, model.norm, EPS), model.embedding.double())
