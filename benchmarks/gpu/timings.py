"""How fast the kernels are, beside the least time that their bytes or operations take on this device."""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.paged_case import (
    DEVICE,
    QWEN3_0_6B,
    QWEN3_8B,
    Heads,
    on_device,
    plain_pages,
    random,
    rotary_tables,
)
from benchmarks.gpu.timing import time_ms
from onward.kernels.triton.activation import silu_and_mul
from onward.kernels.triton.chunk_attention import ChunkPlan, chunk_attention
from onward.kernels.triton.chunk_tiles import chunk_tiles
from onward.kernels.triton.decode_attention import DecodePlan, DecodeScratch, decode_attention
from onward.kernels.triton.invariant_linear import invariant_linear
from onward.kernels.triton.invariant_linear_plan import LinearPlan
from onward.kernels.triton.rms_norm import add_rms_norm
from onward.kernels.triton.rotate_and_store import rotate_and_store
from onward.kernels.triton.sampling import FilterParams, SampleInputs, SampleScratch, sample
from onward.kernels.triton.single_row_linear import SingleRowPlan, single_row_linear
from onward.kernels.triton.split_softmax import FIXED_SPLITS, WHOLE

CACHE_BYTES = 60e6
DECODE_CASES = [
    (QWEN3_8B, 256, 1024), (QWEN3_8B, 64, 1024), (QWEN3_8B, 8, 4096), (QWEN3_8B, 1, 4096), (QWEN3_8B, 1, 1024),
    (QWEN3_8B, 1, 32768), (QWEN3_0_6B, 256, 560), (QWEN3_0_6B, 256, 1024), (QWEN3_0_6B, 64, 1024), (QWEN3_0_6B, 8, 4096),
    (QWEN3_0_6B, 1, 1024),
]  # fmt: skip
CHUNK_CASES = [(QWEN3_0_6B, 16, 1024), (QWEN3_0_6B, 1, 8192), (QWEN3_8B, 8, 1024), (QWEN3_8B, 1, 8192)]


def _line(name: str, ms: float, rate: str) -> None:
    print(f"{name:58s} {ms * 1000:9.1f} us   {rate}", flush=True)


def _kv_bytes(heads: Heads, batch: int, length: int) -> int:
    return 2 * 2 * batch * length * heads.num_kv_heads * heads.dim


def _decode_calls(
    heads: Heads, lengths: torch.Tensor, longest: int, block_size: int, plan: DecodePlan, copies: int
) -> list[Callable[[], None]]:
    """One call per copy of the history."""
    batch = len(lengths)
    qkv, norms = random(batch, heads.qkv_width), (random(heads.dim), random(heads.dim))
    rotary, out = rotary_tables(longest, heads.dim), random(batch, heads.num_heads, heads.dim)
    num_splits = plan.splits.count(longest)
    scratch = DecodeScratch.allocate(batch, heads.num_heads, heads.num_kv_heads, heads.dim, num_splits, DEVICE)
    sets = [plain_pages(batch, longest, heads, block_size) for _ in range(copies)]
    return [
        partial(decode_attention, qkv, kv, tables, lengths, out, norms, 1e-6, rotary, plan, scratch)
        for kv, tables in sets
    ]


def _cut(plan: DecodePlan | ChunkPlan) -> str:
    shared = f"parts {plan.parts}" if isinstance(plan, DecodePlan) else f"rows {plan.rows}"
    return f"{'whole' if plan.splits.is_whole else 'fixed'} {shared} w{plan.num_warps} s{plan.num_stages}"


def _time_decode(heads: Heads, batch: int, length: int, block_size: int, plan: DecodePlan) -> None:
    """The copies are three times the cache."""
    copies = max(1, min(64, int(3 * CACHE_BYTES / _kv_bytes(heads, batch, length)) + 1))
    lengths = torch.full((batch,), length, dtype=torch.int32, device=DEVICE)
    ms = time_ms(_decode_calls(heads, lengths, length, block_size, plan, copies), rounds=max(1, 16 // copies))
    name = f"decode {heads.num_heads}/{heads.num_kv_heads} {batch} x {length} page {block_size}"
    _line(name, ms, f"{_kv_bytes(heads, batch, length) / ms / 1e9:6.2f} TB/s  {_cut(plan)}")


def time_decode() -> None:
    for heads, batch, length in DECODE_CASES:
        plans = [
            DecodePlan.choose(batch, heads.num_kv_heads, heads.dim, length, fixed_order=fixed_order)
            for fixed_order in (False, True)
        ]
        for plan in dict.fromkeys(plans):
            _time_decode(heads, batch, length, 16, plan)
    for block_size in (32, 64, 128):
        plan = DecodePlan.choose(256, QWEN3_8B.num_kv_heads, QWEN3_8B.dim, 1024, fixed_order=False)
        _time_decode(QWEN3_8B, 256, 1024, block_size, plan)


TUNED_PLANS = [
    DecodePlan(splits, parts, num_warps, num_stages)
    for splits, parts in ((WHOLE, 1), (FIXED_SPLITS, 1), (FIXED_SPLITS, 2), (FIXED_SPLITS, 8), (FIXED_SPLITS, 32))
    for num_warps, num_stages in ((1, 3), (1, 4), (2, 4), (4, 3), (4, 4))
]


def tune_decode() -> None:
    for heads, batch, length in DECODE_CASES:
        for plan in TUNED_PLANS:
            _time_decode(heads, batch, length, 16, plan)


def tune_ragged() -> None:
    """Streams of the workload "256" while fewer and fewer are left: lengths that differ, longest first."""
    heads = QWEN3_0_6B
    for batch in (16, 32, 64, 96, 128, 192, 256):
        done = 1024 - 4 * batch
        longest = sorted((100 + 924 * (37 * row % batch) // batch + done for row in range(batch)), reverse=True)
        lengths = torch.tensor(longest, dtype=torch.int32, device=DEVICE)
        for plan in TUNED_PLANS:
            ms = time_ms(_decode_calls(heads, lengths, 2048, 16, plan, 4 if batch < 64 else 2), rounds=4)
            rate = f"{_kv_bytes(heads, 1, sum(longest)) / ms / 1e9:6.2f} TB/s"
            _line(f"ragged {batch} streams of {longest[-1]} to {longest[0]}", ms, f"{rate}  {_cut(plan)}")


def _time_chunk(heads: Heads, batch: int, length: int, block_size: int, plan: ChunkPlan) -> None:
    kv, tables = plain_pages(batch, length, heads, block_size)
    q, out = random(batch * length, heads.num_heads, heads.dim), random(batch * length, heads.num_heads, heads.dim)
    tiles = on_device(chunk_tiles([(row, 0, length) for row in range(batch)], heads.group, plan.rows))
    try:
        ms = time_ms([lambda: chunk_attention(q, kv, tables, tiles, out, plan)], rounds=4)
    except Exception as problem:
        print(f"chunk {plan}: {type(problem).__name__} {str(problem)[:100]}")
        return
    name = f"chunk {heads.num_heads}/{heads.num_kv_heads} {batch} x {length} page {block_size}"
    rate = f"{_chunk_flops(heads, batch, length) / ms / 1e9:6.0f} TFLOP/s"
    _line(name, ms, f"{rate}  {_cut(plan)} r{plan.max_registers}")


def _chunk_flops(heads: Heads, batch: int, length: int) -> float:
    """Two products over the half below the diagonal."""
    return 2.0 * batch * heads.num_heads * heads.dim * length * length


def _time_dense_chunk(heads: Heads, batch: int, length: int) -> None:
    """torch's own attention over contiguous keys and values: the same sums without pages."""
    q = random(batch, heads.num_heads, length, heads.dim)
    k, v = (random(batch, heads.num_heads, length, heads.dim) for _ in range(2))
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def attend(backend=backend) -> None:
            with sdpa_kernel(backend):
                torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        ms = time_ms([attend], rounds=4)
        rate = f"{_chunk_flops(heads, batch, length) / ms / 1e9:6.0f} TFLOP/s"
        _line(f"torch {backend.name} {heads.num_heads} heads {batch} x {length}", ms, rate)


def time_chunk() -> None:
    for heads, batch, length in CHUNK_CASES:
        for fixed_order in (False, True):
            for block_size in (16, 64):
                plan = ChunkPlan.choose(heads.dim, fixed_order=fixed_order)
                _time_chunk(heads, batch, length, block_size, plan)
        _time_dense_chunk(heads, batch, length)


def tune_chunk() -> None:
    for heads, batch, length in CHUNK_CASES[:2]:
        for splits in (WHOLE, FIXED_SPLITS):
            for rows, warps, stages in ((128, 8, 2), (128, 8, 3), (128, 8, 4), (128, 4, 3), (64, 4, 3), (256, 8, 3)):
                for max_registers in (128, None):
                    _time_chunk(heads, batch, length, 16, ChunkPlan(splits, rows, warps, stages, max_registers))


def time_small() -> None:
    for heads, hidden, mlp in ((QWEN3_0_6B, 1024, 3072), (QWEN3_8B, 4096, 12288)):
        for rows in (1, 256, 8192):
            _time_small_at(heads, hidden, mlp, rows)
    for inputs, outputs, options in _one_row_cases():
        _time_one_row(
            inputs, outputs, SingleRowPlan.choose(outputs * (2 if options.get("gates") else 1), inputs), **options
        )


def _time_small_at(heads: Heads, hidden: int, mlp: int, rows: int) -> None:
    sets = 1 if rows > 1000 else 8
    x, residual, out = ([random(rows, hidden) for _ in range(sets)] for _ in range(3))
    weight = random(hidden)

    def rate(ms: float, num_bytes: float) -> str:
        return f"{num_bytes / ms / 1e9:6.2f} TB/s"

    calls = [partial(add_rms_norm, x[i], residual[i], weight, 1e-6, out[i]) for i in range(sets)]
    ms = time_ms(calls, rounds=4)
    _line(f"add and norm {rows} x {hidden}", ms, rate(ms, 8 * rows * hidden))
    gate_up, act = [random(rows, 2 * mlp) for _ in range(sets)], random(rows, mlp)
    ms = time_ms([partial(silu_and_mul, gate_up[i], act) for i in range(sets)], rounds=4)
    _line(f"silu gate {rows} x {mlp}", ms, rate(ms, 6 * rows * mlp))
    kv = random(rows // 16 + 1, 2, heads.num_kv_heads, 16, heads.dim)
    positions = torch.arange(rows, device=DEVICE, dtype=torch.int32)
    pages, norms = positions // 16, (random(heads.dim), random(heads.dim))
    rotary, qkv = rotary_tables(rows, heads.dim), [random(rows, heads.qkv_width) for _ in range(sets)]
    calls = [partial(rotate_and_store, qkv[i], kv, positions, pages, norms, 1e-6, rotary) for i in range(sets)]
    ms = time_ms(calls, rounds=4)
    _line(f"rotate and store {rows} rows, {heads.num_heads} heads", ms, rate(ms, 4 * rows * heads.qkv_width))


def _one_row_cases() -> list[tuple[int, int, dict[str, bool]]]:
    cases = []
    for hidden, heads, mlp in ((1024, QWEN3_0_6B, 3072), (4096, QWEN3_8B, 12288)):
        cases += [
            (hidden, heads.qkv_width, {"normed": True}),
            (heads.num_heads * heads.dim, hidden, {"adds": True}),
            (hidden, mlp, {"normed": True, "gates": True}),
            (mlp, hidden, {"adds": True}),
            (hidden, 151936, {"normed": True}),
        ]
    return cases


def _time_one_row(
    inputs: int, outputs: int, plan: SingleRowPlan, *, normed: bool = False, adds: bool = False, gates: bool = False
) -> None:
    """Beside torch's product of the same matrix, without what ours does on the way."""
    rows = outputs * (2 if gates else 1)
    copies = max(2, min(40, int(4 * CACHE_BYTES / (2 * rows * inputs)) + 1))
    weights = [random(rows, inputs) for _ in range(copies)]
    x, out, norm = random(1, inputs), random(1, outputs), (random(inputs), 1e-6) if normed else None
    for overlap in (False, True):
        ms = time_ms(
            [
                partial(single_row_linear, x, w, out, plan, norm=norm, adds=adds, gates=gates, overlap=overlap)
                for w in weights
            ]
        )
        name = f"one row {inputs} -> {rows}{' overlapped' if overlap else ''}"
        _line(name, ms, f"{2 * rows * inputs / ms / 1e9:6.2f} TB/s  {plan.outputs}x{plan.inputs} w{plan.num_warps}")
    ms = time_ms([partial(torch.nn.functional.linear, x, w) for w in weights])
    _line(f"torch   {inputs} -> {rows}", ms, f"{2 * rows * inputs / ms / 1e9:6.2f} TB/s")


def tune_one_row() -> None:
    for inputs, outputs, options in _one_row_cases():
        for rows, columns, warps in ((4, 1024, 4), (8, 1024, 4), (16, 512, 4), (8, 512, 2), (4, 2048, 4), (32, 256, 4)):
            if inputs % columns == 0:
                _time_one_row(inputs, outputs, SingleRowPlan(rows, columns, warps), **options)


LINEAR_CASES = [
    (1024, 4096, False), (2048, 1024, False), (1024, 3072, True), (3072, 1024, False),
    (4096, 6144, False), (4096, 4096, False), (4096, 12288, True), (12288, 4096, False),
]  # fmt: skip
LINEAR_PLANS = [
    LinearPlan(128, 64, 64, 4, 4), LinearPlan(64, 32, 128, 4, 4), LinearPlan(64, 64, 64, 4, 5),
    LinearPlan(128, 128, 64, 8, 3), LinearPlan(64, 128, 64, 4, 4), LinearPlan(128, 64, 128, 4, 3),
    LinearPlan(128, 128, 64, 8, 4), LinearPlan(128, 32, 128, 4, 4), LinearPlan(64, 64, 128, 4, 4),
    LinearPlan(128, 256, 64, 8, 3), LinearPlan(256, 64, 64, 8, 4), LinearPlan(256, 128, 64, 8, 3),
]  # fmt: skip


def _time_linear(rows: int, inputs: int, outputs: int, gates: bool, plans: list[LinearPlan]) -> None:
    """Chained in a graph, gaps included; torch's product and then silu_gate beside it."""
    width = outputs * (2 if gates else 1)
    copies = max(2, min(30, int(3 * CACHE_BYTES / (2 * width * inputs)) + 1))
    weights = [random(width, inputs) for _ in range(copies)]
    x, out, product = random(rows, inputs), random(rows, outputs), random(rows, width)
    flops = 2.0 * rows * inputs * width

    def by_torch(w: torch.Tensor) -> None:
        torch.mm(x, w.T, out=product)
        if gates:
            silu_and_mul(product, out, overlap=True)

    name = f"{rows} rows {inputs} -> {width}{' gated' if gates else ''}"
    ms = time_ms([partial(by_torch, w) for w in weights])
    _line(f"torch  {name}", ms, f"{flops / ms / 1e9:6.0f} TFLOP/s {2 * width * inputs / ms / 1e9:6.2f} TB/s")
    for plan in plans:
        try:
            ms = time_ms([partial(invariant_linear, x, w, out, plan, gates=gates, overlap=True) for w in weights])
        except Exception as problem:
            print(f"linear {plan}: {type(problem).__name__}")
            continue
        shape = f"{plan.rows}x{plan.outputs}x{plan.inputs} w{plan.num_warps} s{plan.num_stages}"
        rate = f"{flops / ms / 1e9:6.0f} TFLOP/s {2 * width * inputs / ms / 1e9:6.2f} TB/s"
        _line(f"linear {name}", ms, f"{rate}  {shape}")


def time_linear() -> None:
    for rows in (64, 256):
        for inputs, outputs, gates in LINEAR_CASES:
            _time_linear(rows, inputs, outputs, gates, [LinearPlan.choose(rows, outputs, gates=gates)])


def tune_linear() -> None:
    for rows in (64, 256):
        for inputs, outputs, gates in LINEAR_CASES:
            _time_linear(rows, inputs, outputs, gates, LINEAR_PLANS)


def time_fp8() -> None:
    """Weights of one byte with a scale per output: torch's scaled product beside bfloat16's, and the single stream's."""
    for inputs, width in ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096)):
        wide = [random(width, inputs) for _ in range(4)]
        weights = [w.to(torch.float8_e4m3fn) for w in wide]
        scales = torch.rand(width, device=DEVICE) + 0.5
        for rows in (64, 256):
            x = random(rows, inputs)
            x8, x_scales = x.to(torch.float8_e4m3fn), torch.rand((rows, 1), device=DEVICE) + 0.5

            def scaled(w: torch.Tensor, x8=x8, x_scales=x_scales, scales=scales) -> None:
                product = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
                product(x8, w.T, x_scales, scales.view(1, -1), out_dtype=torch.bfloat16, use_fast_accum=True)

            bf16_ms = time_ms([partial(torch.mm, x, w.T) for w in wide])
            fp8_ms = time_ms([partial(scaled, w) for w in weights])
            _line(
                f"fp8 {rows} rows {inputs} -> {width}",
                fp8_ms,
                f"bf16 {bf16_ms * 1000:.1f} us, {bf16_ms / fp8_ms:.2f} x",
            )
        x, out = random(1, inputs), random(1, width)
        for name, given, by in (("bf16", wide, None), ("fp8", weights, scales)):
            plan = SingleRowPlan.choose(width, inputs)
            calls = [partial(single_row_linear, x, w, out, plan, scales=by, overlap=True) for w in given]
            ms = time_ms(calls, rounds=4)
            _line(f"{name} one row {inputs} -> {width}", ms, f"{given[0].nbytes / ms / 1e9:6.2f} TB/s")


def time_sampling() -> None:
    size = 151936
    for rows in (1, 256):
        logits = [3 * random(rows, size) for _ in range(2)]
        temperatures = torch.full((rows,), 0.6, device=DEVICE)
        numbers = torch.arange(rows, device=DEVICE)
        inputs = SampleInputs(temperatures, numbers, numbers, numbers)
        tokens, valid = torch.zeros_like(numbers), torch.zeros(rows, dtype=torch.uint8, device=DEVICE)
        scratch = SampleScratch.allocate(rows, size, DEVICE)
        cuts = FilterParams(
            torch.full((rows,), 50, dtype=torch.int32, device=DEVICE), temperatures + 0.35, 0 * temperatures
        )
        for name, given in (("plain", None), ("top-k and top-p", cuts)):
            ms = time_ms([partial(sample, x, inputs, tokens, valid, scratch, given) for x in logits], rounds=4)
            _line(f"sample {rows} x {size} bf16 {name}", ms, f"{2 * rows * size / ms / 1e9:6.2f} TB/s")
        ms = time_ms([partial(torch.argmax, x, dim=-1) for x in logits], rounds=4)
        _line(f"torch argmax {rows} x {size}", ms, f"{2 * rows * size / ms / 1e9:6.2f} TB/s")


FAMILIES: dict[str, Callable[[], None]] = {
    "decode": time_decode,
    "chunk": time_chunk,
    "small": time_small,
    "linear": time_linear,
    "sampling": time_sampling,
    "fp8": time_fp8,
    "tune-decode": tune_decode,
    "tune-ragged": tune_ragged,
    "tune-chunk": tune_chunk,
    "tune-one-row": tune_one_row,
    "tune-linear": tune_linear,
}
