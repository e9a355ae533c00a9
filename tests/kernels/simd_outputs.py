"""What every CPU kernel gives for fixed inputs, on the SIMD level of this process.

The level is chosen once per process, so a test compares what it computes itself with what a child has written:
`python -m tests.kernels.simd_outputs FILE`.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numba
import numpy as np
from numba import types
from numba.core.registry import cpu_target

from onward.config import environment_with
from onward.kernels.cpu import simd
from onward.kernels.cpu.exp_sum import exp_sum
from onward.kernels.cpu.threads import ThreadPool
from onward.models.layers.rotary_table import RotaryTable
from onward.proto.sampling_params import SamplingParams
from onward.worker.sampler import Sampler, SamplingRow
from onward.worker.token_logprobs import token_logprobs
from tests.kernels.test_attention import LENGTH, Case
from tests.worker import exact_int8

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ((32, 3), (64, 7), (96, 1), (128, 4), (256, 8))
VOCAB = 6_000


def outputs() -> dict[str, np.ndarray]:
    made = {f"logits {head_dim}/{group}": _logits(head_dim, group) for head_dim, group in SHAPES}
    made["logits of nibbles"] = _logits(64, 3, is_grid=True)
    made["logits of qwen3"] = _logits(64, 2, architecture="qwen3", qk_norm=True)
    made["float attention"] = Case("float32").attend([LENGTH])
    rows_of_one = np.linspace(-90, 88, 4_000, dtype=np.float32)[:, None]
    made["exp"] = np.array([exp_sum(row, np.float32(0.0)) for row in rows_of_one])
    made["sampled"] = _sampled()
    made["logprobs"] = _logprobs()
    for theta, head_dim in ((10_000.0, 64), (1_000_000.0, 128), (500_000.0, 96)):
        table = RotaryTable.build(theta, head_dim, 2048, [1.0 + i % 7 for i in range(head_dim // 2)])
        made[f"rotary {head_dim}"] = np.stack([table.cos, table.sin])
    return made


def _logits(head_dim: int, group: int, is_grid: bool = False, **changes: object) -> np.ndarray:
    driver = exact_int8.new_driver(exact_int8.shape(head_dim, group, **changes), is_grid=is_grid)
    return exact_int8.in_chunks(1, 70)(driver, exact_int8.tokens(LENGTH))


def _rows() -> np.ndarray:
    return 3 * np.random.default_rng(0).standard_normal((200, VOCAB), dtype=np.float32)


def _sampled() -> np.ndarray:
    kinds = ({}, {"top_k": 40}, {"top_p": 0.7}, {"min_p": 0.05}, {"top_k": 4_500, "top_p": 0.9, "temperature": 1.9})
    rows = _rows()
    draws = [SamplingRow(SamplingParams(seed=row, **kinds[row % len(kinds)]), row) for row in range(len(rows))]  # type: ignore[arg-type]
    return np.array(Sampler(VOCAB, len(rows), ThreadPool(1)).sample(rows, draws), np.int64)


def _logprobs() -> np.ndarray:
    told = [token_logprobs(row, 5 * place, 5) for place, row in enumerate(_rows())]
    return np.array([[one.logprob, *(logprob for _, logprob in one.top)] for one in told])


def registers() -> set[str]:
    """The widths of vectors in code that is compiled here and now."""

    def add(x, y):
        simd.store(y, 0, simd.load(x, 0) + simd.load(y, 0))

    pointer = types.CPointer(types.float32)
    code = numba.cfunc(types.void(pointer, pointer))(add)._library.get_asm_str()
    return {name for name in ("zmm", "ymm", "xmm") if name in code}


def of_level(level: str) -> tuple[dict[str, np.ndarray], str, set[str]]:
    """A child's outputs; the CPU that its kernels were compiled for, which numba's cache is keyed by; its registers."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outputs.npz"
        command = [sys.executable, "-m", "tests.kernels.simd_outputs", str(file)]
        env = environment_with({"ONWARD_SIMD": level} | _libraries_of(level))
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        cpu, *names = done.stdout.split()
        with np.load(file) as found:
            return dict(found), cpu, set(names)


def _libraries_of(level: str) -> dict[str, str]:
    """numpy and the C library choose code by the CPU too. They are held to the level, so that a dependence shows."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__  # type: ignore[import-not-found]

    wide = [name for name in __cpu_dispatch__ if __cpu_features__[name]]
    if level == "avx2":
        wide = [name for name in wide if name.startswith(("X86_V4", "AVX512"))]
    hidden = {"avx2": "-AVX512F,-AVX512VL", "plain": "-AVX512F,-AVX512VL,-AVX2,-AVX,-FMA,-FMA4"}[level]
    return {"NPY_DISABLE_CPU_FEATURES": " ".join(wide), "GLIBC_TUNABLES": f"glibc.cpu.hwcaps={hidden}"}


def main() -> None:
    np.savez(sys.argv[1], **outputs())  # type: ignore[arg-type]
    print(cpu_target.target_context.codegen().magic_tuple()[1], *registers())


if __name__ == "__main__":
    main()
