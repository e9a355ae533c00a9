"""Runs every check at many shapes and prints what is wrong. Used by `kernels.py`."""

import random as chance
import traceback
from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu import checks
from benchmarks.gpu.paged_case import QWEN3_0_6B, QWEN3_8B, Heads
from onward.kernels.triton.chunk_attention import ChunkPlan
from onward.kernels.triton.decode_attention import DecodePlan
from onward.kernels.triton.invariant_linear_plan import LinearPlan

SHAPES = [
    QWEN3_0_6B, QWEN3_8B, Heads(8, 8, 128), Heads(64, 8, 128), Heads(9, 3, 64), Heads(14, 2, 64), Heads(20, 1, 64),
    Heads(10, 2, 96), Heads(12, 2, 256),
]  # fmt: skip
PAGED_SHAPES = [(heads, 16) for heads in SHAPES] + [(QWEN3_8B, size) for size in (32, 64, 128)]
Check = tuple[str, Callable[[], float]]


def _lengths(count: int, longest: int) -> list[int]:
    return [chance.randint(1, longest) for _ in range(count)]


def decode_checks() -> Iterator[Check]:
    lengths = [0, 1, 2, 15, 16, 17, 63, 64, 65, 128, 129, 256, 257, 1000, 2048, 2049, 2561, *_lengths(4, 3000)]
    for heads, block_size in PAGED_SHAPES:
        normed = block_size == 16
        for plan in checks.DECODE_PLANS:
            yield (
                f"decode {heads} page {block_size} {plan} norm {normed}",
                lambda h=heads, b=block_size, p=plan, w=normed: checks.decode_error(
                    h, b, lengths, p, normed=w, overlap=True
                ),
            )
    for few in ([1], [4096], [32768], [32768, 1, 5000], [1] * 256, _lengths(256, 1024), _lengths(64, 4000)):
        for fixed_order in (False, True):
            plan = DecodePlan.choose(len(few), 8, 128, max(few), fixed_order=fixed_order)
            yield (
                f"decode batch {len(few)} longest {max(few)} {plan}",
                lambda n=few, p=plan: checks.decode_error(QWEN3_0_6B, 16, n, p, normed=True),
            )


def chunk_checks() -> Iterator[Check]:
    mixed = [(0, 1), (0, 17), (100, 1), (513, 129), (0, 300), (1000, 1), (31, 1), (2000, 64), (2047, 2)]
    for fixed_order in (False, True):
        for heads, block_size in PAGED_SHAPES:
            plan = ChunkPlan.choose(heads.dim, fixed_order=fixed_order)
            yield (
                f"chunks {heads} page {block_size} {plan}",
                lambda h=heads, b=block_size, p=plan: checks.chunk_error(h, b, mixed, p),
            )
        plan = ChunkPlan.choose(128, fixed_order=fixed_order)
        for chunks in ([(0, 4096)], [(30000, 512), (0, 5)]):
            yield f"chunks {chunks} {plan}", lambda c=chunks, p=plan: checks.chunk_error(QWEN3_0_6B, 16, c, p)


def small_checks() -> Iterator[Check]:
    for heads in SHAPES:
        for rows in (1, 77, 512):
            for normed in (True, False):
                yield (
                    f"rotate and store {heads} rows {rows} norm {normed}",
                    lambda h=heads, r=rows, w=normed: checks.rotate_and_store_error(h, 16, r, normed=w),
                )
    for rows, size in ((1, 1024), (256, 1024), (3, 4096), (1000, 4096), (5, 576), (2, 5120)):
        for adds in (True, False):
            yield f"norm {rows}x{size} add {adds}", lambda r=rows, s=size, a=adds: checks.norm_error(r, s, adds=a)
    for rows, size in ((1, 3072), (256, 3072), (17, 12288), (3, 1536)):
        yield f"silu gate {rows}x{size}", lambda r=rows, s=size: checks.silu_gate_error(r, s)
    for inputs, outputs in ((1024, 4096), (2048, 1024), (3072, 1024), (4096, 6144), (12288, 4096), (576, 999)):
        for normed, adds, gates in (
            (False, False, False),
            (True, False, False),
            (False, True, False),
            (True, False, True),
        ):
            yield (
                f"one row {inputs}->{outputs} {normed} {adds} {gates}",
                lambda i=inputs, o=outputs, n=normed, a=adds, g=gates: checks.one_row_error(
                    i, o, normed=n, adds=a, gates=g
                ),
            )
        yield (
            f"one row of float8 {inputs}->{outputs}",
            lambda i=inputs, o=outputs: checks.one_row_error(i, o, normed=True, adds=False, gates=True, scaled=True),
        )


def linear_checks() -> Iterator[Check]:
    for plan in (LinearPlan(128, 64), LinearPlan(64, 32, 128, ahead=1024), LinearPlan(64, 128, 64, 8)):
        for gates in (False, True):
            for rows in (1, 63, 256, 300):
                yield (
                    f"linear {rows} rows {plan} gates {gates}",
                    lambda r=rows, p=plan, g=gates: checks.linear_error(r, 1024, 3072, p, gates=g, overlap=True),
                )
    plans = [LinearPlan(128, 64), LinearPlan(64, 32, 128), LinearPlan(64, 64, 64, 4, 5), LinearPlan(128, 128, 64, 8)]
    for gates in (False, True):
        yield f"linear's bits, gates {gates}", lambda g=gates: checks.linear_differences(1024, 3072, plans, gates=g)


def sampling_checks() -> Iterator[Check]:
    for rows, size in ((1, 151936), (64, 151936), (16, 4096), (16, 1000), (7, 49152)):
        for cut in (False, True):
            for dtype in (torch.float32, torch.bfloat16):
                yield (
                    f"sampling {rows}x{size} cut {cut} {dtype}",
                    lambda r=rows, s=size, c=cut, d=dtype: float(checks.sampling_mistakes(r, s, cut=c, dtype=d)),
                )
    for rows, size in ((1, 151936), (300, 4097)):
        yield f"log totals {rows}x{size}", lambda r=rows, s=size: 1e10 * checks.log_totals_error(r, s)


def run(groups: list[str]) -> tuple[int, int]:
    """(checks, failures). A crash of the device ends everything; a kernel that does not compile ends only itself."""
    families = {"decode": decode_checks, "chunk": chunk_checks, "small": small_checks, "sampling": sampling_checks}
    families["linear"] = linear_checks
    total = failures = 0
    for group in groups:
        worst, broken = 0.0, set()
        for name, check in families[group]():
            total += 1
            try:
                found = check()
            except Exception as problem:
                failures += 1
                kind = f"{type(problem).__name__}: {str(problem)[:1500]}"
                if kind not in broken:
                    broken.add(kind)
                    traceback.print_exc(limit=-2)
                    print("BROKEN", name, kind, flush=True)
                continue
            worst = max(worst, found)
            if not found <= checks.TOLERANCE:
                failures += 1
                print(f"WRONG {name}: {found:.4g}", flush=True)
        print(f"{group}: worst error {worst:.2e}", flush=True)
    return total, failures
