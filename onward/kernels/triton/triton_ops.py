"""The fast operations of a device's step: our Triton kernels, torch's matrix products, and the plan for each batch.

`overlap` lets a launch begin while the kernel before it ends (programmatic dependent launch).
"""

from typing import Literal

import torch

from onward.kernels.batch_sizes import padded_batch_size
from onward.kernels.ops import (
    Activation,
    AttentionLayer,
    HeadShape,
    NormWeights,
    RowTensors,
    Scoring,
    SlotTensors,
)
from onward.kernels.triton import row_state as row_kernels
from onward.kernels.triton.accumulate_rows import accumulate_rows
from onward.kernels.triton.activation import activate, silu_and_mul
from onward.kernels.triton.chunk_attention import TILE_ROWS, ChunkPlan, chunk_attention
from onward.kernels.triton.decode_attention import DecodePlan, DecodeScratch, decode_attention
from onward.kernels.triton.elementwise import add_scaled, finish_logits
from onward.kernels.triton.invariant_linear import invariant_linear, with_padding_rows
from onward.kernels.triton.invariant_linear_plan import LinearPlan, library_rows
from onward.kernels.triton.kernel_launch import is_launching
from onward.kernels.triton.library_matmul import LibraryMatmuls, fastest_matmul
from onward.kernels.triton.logsumexp import logsumexp
from onward.kernels.triton.quantize_rows import quantize_rows
from onward.kernels.triton.rms_norm import add_rms_norm, rms_norm
from onward.kernels.triton.rotate_and_store import rotate_and_store
from onward.kernels.triton.row_norm import row_norm
from onward.kernels.triton.sampling import FilterParams, SampleInputs, SampleScratch, sample
from onward.kernels.triton.single_row_linear import SingleRowPlan, single_row_linear
from onward.kernels.triton.token_bitmask import apply_token_bitmask

_FP8 = torch.float8_e4m3fn


class TritonOps:
    device_kind: Literal["torch", "cuda"] = "cuda"
    tile_rows = TILE_ROWS

    def __init__(self, *, max_model_len: int, fixed_order: bool = False, overlap: bool = True) -> None:
        """With `fixed_order` a row's bits do not depend on its batch or on how its tokens are cut into chunks."""
        self._max_model_len, self._fixed_order, self._overlap = max_model_len, fixed_order, overlap
        self._library = LibraryMatmuls(self._own_linear)
        self._decode_scratch: DecodeScratch | None = None
        self._sample_scratch: SampleScratch | None = None

    def reserve(self, heads: HeadShape, max_num_seqs: int, max_sampled: int, vocab_size: int, device: str) -> None:
        self._decode_scratch = DecodeScratch.for_batches(
            heads, padded_batch_size(max_num_seqs), self._max_model_len, device, fixed_order=self._fixed_order
        )
        self._sample_scratch = SampleScratch.allocate(max_sampled, vocab_size, device)

    def load_rows(self, slots: SlotTensors, rows: RowTensors, block_size: int) -> None:
        row_kernels.load_rows(slots, rows, block_size)

    def append_sampled_tokens(self, slots: SlotTensors, rows: RowTensors) -> None:
        row_kernels.append_sampled_tokens(slots, rows)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        rms_norm(x, weight, eps, out)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        add_rms_norm(x, residual, weight, eps, out, overlap=self._overlap)

    def norm(self, x: torch.Tensor, norm: NormWeights, eps: float, out: torch.Tensor) -> None:
        row_norm(x, norm, eps, out)

    def add_scaled(self, x: torch.Tensor, factor: float, residual: torch.Tensor) -> None:
        add_scaled(x, factor, residual)

    def silu_and_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        silu_and_mul(gate_up, out, overlap=self._overlap)

    def activate(self, x: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        activate(x, activation, out)

    def finish_logits(self, logits: torch.Tensor, multiplier: float, softcap: float | None) -> None:
        finish_logits(logits, multiplier, softcap)

    def decode_attention(
        self, qkv: torch.Tensor, kv: torch.Tensor, rows: RowTensors, layer: AttentionLayer, out: torch.Tensor
    ) -> None:
        heads = out.view(len(out), -1, kv.shape[4])
        num_kv_heads, dim = kv.shape[2], kv.shape[4]
        # The plan of the padded batch size, whose kernel is compiled. Another one would be compiled while requests
        # wait.
        plan = DecodePlan.choose(
            padded_batch_size(len(out)), num_kv_heads, dim, self._max_model_len, fixed_order=self._fixed_order
        )  # fmt: skip
        assert self._decode_scratch is not None, "memory was reserved"
        decode_attention(
            qkv,
            kv,
            rows.tables,
            rows.lengths,
            heads,
            layer.norms,
            layer.eps,
            layer.rotary,
            plan,
            self._decode_scratch,
            scoring=layer.scoring,
            overlap=self._overlap,
        )

    def rotate_and_store(
        self, qkv: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, pages: torch.Tensor, layer: AttentionLayer
    ) -> None:
        rotate_and_store(qkv, kv, positions, pages, layer.norms, layer.eps, layer.rotary)

    def chunk_attention(
        self, qkv: torch.Tensor, kv: torch.Tensor, tables: torch.Tensor, tiles: torch.Tensor, num_heads: int,
        scoring: Scoring, out: torch.Tensor,
    ) -> None:  # fmt: skip
        dim = kv.shape[4]
        queries = qkv[:, : num_heads * dim].unflatten(1, (num_heads, dim))
        plan = ChunkPlan.choose(dim, fixed_order=self._fixed_order)
        chunk_attention(queries, kv, tables, tiles, out.view(len(out), num_heads, dim), plan, scoring)

    def matmul(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None,
        scales: torch.Tensor | None,
    ) -> None:  # fmt: skip
        if scales is not None:
            narrow = torch.empty(x.shape, dtype=_FP8, device=x.device)
            row_scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
            quantize_rows(x, narrow, row_scales)
            torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
                narrow,
                weight.T,
                row_scales,
                scales[None, :],
                bias=bias,
                out_dtype=out.dtype,
                use_fast_accum=True,
                out=out,
            )
        elif bias is not None:
            torch.addmm(bias, x, weight.T, out=out)
        else:
            fastest_matmul(x, weight, out)

    def invariant_linear(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        if not self._library_product(x, weight, out):
            self._own_linear(x, weight, out)

    def invariant_gated_linear(
        self, x: torch.Tensor, weight: torch.Tensor, gate_up: torch.Tensor, out: torch.Tensor
    ) -> None:
        is_library = self._library_product(x, weight, gate_up)
        if is_library or not is_launching():  # a compile share takes both ways, so that none is compiled later
            self.silu_and_mul(gate_up, out)
        if not is_library:
            plan = LinearPlan.choose(len(x), out.shape[1], gates=True)
            invariant_linear(x, weight, out, plan, gates=True, overlap=self._overlap)

    def _own_linear(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        invariant_linear(x, weight, out, LinearPlan.choose(len(x), out.shape[1]), overlap=self._overlap)

    def _library_product(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> bool:
        """Computes a product by the library, if that has the bits of `_own_linear`. Returns whether it did. The rows
        after a large batch are computed too, so that there are few sizes."""
        rows = library_rows(len(x), *weight.shape)
        if rows is None or x.dtype not in (torch.bfloat16, torch.float16):
            return False
        x, out = with_padding_rows(x, rows), with_padding_rows(out, rows)
        rows = min(len(x), len(out))
        x, out = x[:rows], out[:rows]
        if not is_launching():
            self._library.run_reference(x, weight, out)
            return False
        product = self._library.find_bit_equal(x, weight, out)
        if product is not None:
            product(x, weight, out)
        return product is not None

    def single_row_linear(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scales: torch.Tensor | None, *,
        norm: tuple[torch.Tensor, float] | None = None, adds: bool = False, gates: bool = False,
    ) -> None:  # fmt: skip
        plan = SingleRowPlan.choose(*weight.shape)
        single_row_linear(x, weight, out, plan, norm=norm, scales=scales, adds=adds, gates=gates, overlap=self._overlap)

    def sample(self, logits: torch.Tensor, rows: RowTensors, *, with_cuts: bool) -> None:
        inputs = SampleInputs(rows.temperatures, rows.seeds, rows.choices, rows.positions)
        cuts = FilterParams(rows.top_ks, rows.top_ps, rows.min_ps) if with_cuts else None
        assert self._sample_scratch is not None, "memory was reserved"
        sample(logits, inputs, rows.sampled[0], rows.sampled[1], self._sample_scratch, cuts)

    def apply_token_bitmask(self, logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
        apply_token_bitmask(logits, rows, bits)

    def logsumexp(self, logits: torch.Tensor) -> torch.Tensor:
        return logsumexp(logits)

    def accumulate_rows(self, x: torch.Tensor, total: torch.Tensor) -> None:
        accumulate_rows(x, total)
