"""Compiled kernels keep the rules that make their bits independent of plans: read from the compiler's output, no device.

The rules are those of `split_softmax`. A kernel that breaks one may still give equal bits in most runs: a difference needs
two plans whose layouts differ, and sums that round differently. `test_triton_exactness.py` compares the bits on a device.
"""

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import triton

from onward.bench.model_shapes import SHAPES
from onward.kernels.batch_sizes import padded_batch_size
from onward.kernels.ops import NormWeights, Scoring
from onward.kernels.triton.activation import activate, silu_and_mul
from onward.kernels.triton.chunk_attention import ChunkPlan, chunk_attention
from onward.kernels.triton.decode_attention import DecodePlan, DecodeScratch, decode_attention
from onward.kernels.triton.elementwise import add_scaled, finish_logits
from onward.kernels.triton.kernel_launch import is_launching, record_variants
from onward.kernels.triton.logsumexp import logsumexp
from onward.kernels.triton.rms_norm import add_rms_norm, rms_norm
from onward.kernels.triton.rotate_and_store import rotate_and_store
from onward.kernels.triton.row_norm import row_norm
from onward.kernels.triton.sampling import FilterParams, SampleInputs, SampleScratch, sample
from onward.kernels.triton.triton_ops import TritonOps
from onward.models.loader.config_parser import from_hf
from tests.kernels.compiling import CompiledKernel, compiled_kernels, num_warps_of
from tests.worker.cuda.small_model import DeviceDriver
from tests.worker.cuda.test_families_on_device import MAX_MODEL_LEN, config_of
from tests.worker.cuda.test_kernels_are_rehearsed import EIGHT_KV_HEADS, SETTINGS

HEAD_DIMS, GROUPS, BLOCK_SIZES = (64, 96, 128, 256), (1, 2, 3, 4, 5, 6, 7, 8, 24, 32), (16, 64)
ROW_COUNTS = (1, 2, 15, 16, 17, 33, 64, 65, 128, 129, 256, 511, 512, 513, 2048)
CONTEXTS = (4096, 40_960)
KV_HEADS = (1, 2, 4, 8)
MAX_BATCH = 512
MAY_CONTRACT = {
    "_add_rows": "one variant; adds in the order of rows",
    "_load_rows": "integers",
    "_append_sampled": "integers",
    "_forbid": "no arithmetic",
}
"""Kernels of a step that may be compiled with contraction, and why."""


@dataclass(frozen=True, slots=True)
class Heads:
    dim: int
    group: int
    """Query heads of a KV head."""
    block_size: int = 16
    normed: bool = True
    window: int | None = None
    """Such a model also has a soft-cap, sinks, and rotates a part of its heads."""

    def __str__(self) -> str:
        name = f"{self.dim}-{self.group}-{self.block_size}{'' if self.normed else '-plain'}"
        return name if self.window is None else f"{name}-window-{self.window}"

    def scoring(self, num_heads: int) -> Scoring | None:
        return None if self.window is None else Scoring(0.1, self.window, 30.0, torch.empty(num_heads))


WINDOWED = (Heads(64, 4, window=40), Heads(128, 2, window=4096, normed=False), Heads(256, 2, 64, window=512))
REPRESENTATIVE = (Heads(128, 2), Heads(96, 3, 64), Heads(256, 8), Heads(64, 32, normed=False), *WINDOWED)
ALL_HEADS = tuple(itertools.starmap(Heads, itertools.product(HEAD_DIMS, GROUPS, BLOCK_SIZES)))
HEADS = [
    *REPRESENTATIVE,
    *(pytest.param(heads, marks=pytest.mark.full) for heads in ALL_HEADS if heads not in REPRESENTATIVE),
]


def decode_plans(head_dim: int) -> list[DecodePlan]:
    """One for each kind of code: how many programs share a row is a number in it, and only "one" is another kind."""
    batches = sorted({padded_batch_size(count) for count in range(1, MAX_BATCH + 1)})
    plans = [
        DecodePlan.choose(batch, num_kv_heads, head_dim, context, fixed_order=True)
        for batch, num_kv_heads, context in itertools.product(batches, KV_HEADS, CONTEXTS)
    ]
    return list({(plan.parts > 1, plan.num_warps, plan.num_stages, plan.splits): plan for plan in plans}.values())


@contextmanager
def _compiling() -> Iterator[list[CompiledKernel]]:
    with tempfile.TemporaryDirectory() as folder, compiled_kernels(Path(folder)) as kernels:
        yield kernels


@functools.cache
def attention_kernels(heads: Heads) -> tuple[CompiledKernel, ...]:
    """Everything between the QKV product and the output product, by every plan."""
    num_kv_heads, batch = 2, 4
    num_heads = heads.group * num_kv_heads
    kv = torch.empty(8, 2, num_kv_heads, heads.block_size, heads.dim, dtype=torch.bfloat16)
    qkv = torch.empty(batch, (num_heads + 2 * num_kv_heads) * heads.dim, dtype=torch.bfloat16)
    out = torch.empty(batch, num_heads, heads.dim, dtype=torch.bfloat16)
    tables, lengths = torch.empty(batch, 64, dtype=torch.int32), torch.empty(batch, dtype=torch.int32)
    tiles = torch.empty(3, 4, dtype=torch.int32)
    weights = torch.empty(heads.dim, dtype=torch.bfloat16)
    rotated = heads.dim if heads.window is None else heads.dim // 2
    norms, angles = (weights, weights) if heads.normed else None, torch.empty(1024, rotated // 2)
    scoring = heads.scoring(num_heads)
    scratch = DecodeScratch.allocate(batch, num_heads, num_kv_heads, heads.dim, 20, "cpu")
    with _compiling() as kernels:
        for plan in decode_plans(heads.dim):
            decode_attention(
                qkv, kv, tables, lengths, out, norms, 1e-6, (angles, angles), plan, scratch, scoring=scoring, overlap=True
            )  # fmt: skip
        rotate_and_store(qkv, kv, lengths, lengths, norms, 1e-6, (angles, angles))
        queries = qkv[:, : num_heads * heads.dim].unflatten(1, (num_heads, heads.dim))
        chunk_attention(queries, kv, tables, tiles, out, ChunkPlan.choose(heads.dim, fixed_order=True), scoring)
    return tuple(kernels)


@functools.cache
def linear_kernels() -> tuple[CompiledKernel, ...]:
    """Our products of the known models' matrices, for any number of rows, and the gate that follows the library's."""
    ops = TritonOps(max_model_len=4096, fixed_order=True)
    with _compiling() as kernels:
        for shape, num_rows in itertools.product(SHAPES.values(), ROW_COUNTS):
            config = from_hf(shape)
            hidden, middle = config.hidden_size, config.intermediate_size
            attended = config.num_heads * config.head_dim
            qkv = attended + 2 * config.num_kv_heads * config.head_dim
            for num_inputs, num_outputs in (
                (hidden, qkv), (attended, hidden), (middle, hidden), (hidden, config.vocab_size),
            ):  # fmt: skip
                ops.invariant_linear(*_matrices(num_rows, num_inputs, num_outputs))
            x, weight, gate_up = _matrices(num_rows, hidden, 2 * middle)
            out = torch.empty(num_rows, middle, dtype=torch.bfloat16)
            ops.invariant_gated_linear(x, weight, gate_up, out)
            ops.silu_and_mul(gate_up, out)
    return tuple(kernels)


def _matrices(num_rows: int, num_inputs: int, num_outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and out. The weight is never written, so that it takes no memory."""
    shapes = (num_rows, num_inputs), (num_outputs, num_inputs), (num_rows, num_outputs)
    x, weight, out = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
    return x, weight, out


@functools.cache
def sampling_kernels() -> tuple[CompiledKernel, ...]:
    rows = 4

    def column(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, dtype=dtype)

    inputs = SampleInputs(column(torch.float32), *(column(torch.int64) for _ in range(3)))
    cuts = FilterParams(column(torch.int32), column(torch.float32), column(torch.float32))
    vocab_size = 151_936
    scratch = SampleScratch.allocate(rows, vocab_size, "cpu")
    with _compiling() as kernels:
        for dtype in (torch.bfloat16, torch.float32):
            logits = torch.empty(rows, vocab_size, dtype=dtype)
            sample(logits, inputs, column(torch.int32), column(torch.int32), scratch, cuts)
    return tuple(kernels)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_sums_in_attention_have_two_operands_in_every_plan(heads: Heads) -> None:
    for kernel in attention_kernels(heads):
        reductions = kernel.reductions()
        assert [one for one in reductions if one.depends_on_order] == [], str(kernel)
        if kernel.name != "_rotate_and_store" or heads.normed:
            assert any("arith.addf" in one.operations for one in reductions), f"no sum was recognised in {kernel}"
        assert "tt.atomic_rmw fadd" not in kernel.ttgir, str(kernel)


def test_products_have_no_sums_beside_their_matrix_instructions() -> None:
    for kernel in linear_kernels():
        assert kernel.reductions() == [], str(kernel)


def test_sampling_adds_up_integers_only() -> None:
    for kernel in sampling_kernels():
        reductions = kernel.reductions()
        assert [one for one in reductions if one.depends_on_order] == [], str(kernel)
        assert not any("arith.addf" in one.operations for one in reductions), str(kernel)
        assert any("arith.addi" in one.operations for one in reductions), f"no sum was recognised in {kernel}"


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_products_of_attention_add_up_their_inputs_in_one_order(heads: Heads) -> None:
    kernels = [kernel for kernel in attention_kernels(heads) if kernel.name != "_rotate_and_store"]
    assert {kernel.name for kernel in kernels} == {"_decode_attention", "_chunk_attention"}
    for kernel in kernels:
        _assert_one_order_of_inputs(kernel)


def test_our_products_add_up_their_inputs_in_one_order() -> None:
    kernels = [kernel for kernel in linear_kernels() if kernel.name == "_linear"]
    assert len({kernel.options["ROWS"] for kernel in kernels}) > 2
    for kernel in kernels:
        _assert_one_order_of_inputs(kernel)


def _assert_one_order_of_inputs(kernel: CompiledKernel) -> None:
    """Warps share the rows and columns of the result, all of them; none has inputs of its own to add up. Each instruction
    takes the next 16 inputs."""
    products = kernel.products()
    assert products, f"no product was recognised in {kernel}"
    for product in products:
        assert product.version in (2, 3), (str(kernel), product)
        assert len(product.warps) == 2, (str(kernel), product)
        assert num_warps_of(product) == kernel.metadata.num_warps, (str(kernel), product)
        assert product.inner == 16, (str(kernel), product)
        assert set(product.operand_widths) <= {2}, (str(kernel), product)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_is_compiled_without_contraction(heads: Heads) -> None:
    assert [str(kernel) for kernel in attention_kernels(heads) if kernel.metadata.enable_fp_fusion] == []


def test_products_and_sampling_are_compiled_without_contraction() -> None:
    kernels = (*linear_kernels(), *sampling_kernels())
    assert {kernel.name for kernel in kernels} >= {"_linear", "_silu_gate", "_survey", "_cut", "_draw"}
    assert [str(kernel) for kernel in kernels if kernel.metadata.enable_fp_fusion] == []


def test_every_kernel_of_a_fixed_order_step_is_compiled_without_contraction_or_says_why_it_may() -> None:
    ops = TritonOps(max_model_len=SETTINGS["max_model_len"], fixed_order=True)
    with record_variants() as variants:
        DeviceDriver(
            EIGHT_KV_HEADS, ops=ops, deterministic=True, max_num_batched_tokens=512, **SETTINGS
        ).rehearse()  # fmt: skip
    fused = {name for name, _, options in variants if dict(options).get("enable_fp_fusion", True)}
    assert {name for name, _, _ in variants} >= {"_linear", "_decode_attention", "_chunk_attention", "_add_norm"}
    assert fused <= set(MAY_CONTRACT)


@pytest.mark.parametrize("family", ["gemma2", "gptneox"])
def test_every_kernel_of_a_fixed_order_step_of_other_families_is_compiled_without_contraction(family: str) -> None:
    ops = TritonOps(max_model_len=MAX_MODEL_LEN, fixed_order=True)
    with record_variants() as variants:
        DeviceDriver(config_of(family), ops=ops, dtype="bfloat16", deterministic=True, max_num_seqs=8).rehearse()
    fused = {name for name, _, options in variants if dict(options).get("enable_fp_fusion", True)}
    assert {name for name, _, _ in variants} >= {
        "_linear",
        "_decode_attention",
        "_chunk_attention",
        "_row_norm",
        "_activate",
    }
    assert fused <= set(MAY_CONTRACT)


def _norm(rows: int) -> None:
    x, out = torch.empty(2048, 1024, dtype=torch.bfloat16), torch.empty(2048, 1024, dtype=torch.bfloat16)
    rms_norm(x[:rows], torch.empty(1024, dtype=torch.bfloat16), 1e-6, out[:rows])


def _residual_norm(rows: int) -> None:
    x, out, residual = (torch.empty(2048, 4096, dtype=torch.bfloat16) for _ in range(3))
    weight = torch.empty(4096, dtype=torch.bfloat16)
    add_rms_norm(x[:rows], residual[:rows], weight, 1e-6, out[:rows], overlap=True)


def _gate(rows: int) -> None:
    gate_up, out = torch.empty(2048, 6144, dtype=torch.bfloat16), torch.empty(2048, 3072, dtype=torch.bfloat16)
    silu_and_mul(gate_up[:rows], out[:rows], overlap=True)


def _layer_norm(rows: int) -> None:
    x, weight = torch.empty(2048, 768, dtype=torch.bfloat16), torch.empty(768, dtype=torch.bfloat16)
    row_norm(x[:rows], NormWeights(weight, weight, centers=True), 1e-6, x[:rows])


def _norm_of_all_heads(rows: int) -> None:
    qkv = torch.empty(2048, 3072, dtype=torch.bfloat16)[:, :2048]
    row_norm(qkv[:rows], NormWeights(torch.empty(2048, dtype=torch.bfloat16)), 1e-6, qkv[:rows])


def _activation(rows: int) -> None:
    x, out = torch.empty(2048, 6144, dtype=torch.bfloat16), torch.empty(2048, 3072, dtype=torch.bfloat16)
    activate(x[:rows], "gelu_tanh", out[:rows])


def _scaled_sum(rows: int) -> None:
    x, residual = (torch.empty(2048, 768, dtype=torch.bfloat16) for _ in range(2))
    add_scaled(x[:rows], 0.3, residual[:rows])


def _capped_logits(rows: int) -> None:
    finish_logits(torch.empty(2048, 1000, dtype=torch.bfloat16)[:rows], 0.2, 30.0)


def _log_totals(rows: int) -> None:
    logsumexp(torch.empty(rows, 151_936))


def _log_totals_of_an_odd_vocabulary(rows: int) -> None:
    logsumexp(torch.empty(rows, 50_257))


@pytest.mark.parametrize(
    "run",
    [
        _norm, _residual_norm, _gate, _layer_norm, _norm_of_all_heads, _activation, _scaled_sum, _capped_logits,
        _log_totals, _log_totals_of_an_odd_vocabulary,
    ],
)  # fmt: skip
def test_one_kernel_serves_every_number_of_rows(run: Callable[[int], None]) -> None:
    with record_variants() as variants:
        for rows in ROW_COUNTS:
            run(rows)
    assert len(variants) == 1, variants


def test_triton_and_launches_are_as_before_once_kernels_are_compiled() -> None:
    def state() -> tuple[object, ...]:
        hook = triton.knobs.runtime.add_stages_inspection_hook
        return triton.runtime.driver._active, triton.knobs.cache.dir, hook, is_launching()

    before = state()
    with _compiling():
        assert all(inside != outside for inside, outside in zip(state(), before, strict=True))
    assert state() == before
