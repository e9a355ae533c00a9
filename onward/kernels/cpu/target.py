"""The CPU that kernels are compiled for: this one, or a simpler one that `ONWARD_SIMD` names.

    native   the CPU that LLVM finds on this machine
    avx2     x86-64-v3: AVX2, FMA and F16C, no AVX-512
    plain    the least that the architecture has; on x86-64 that is SSE2, where `fma` is a call into the C library

The level decides how fast a kernel is, never which bits it gives. Forced levels let tests check that on a single
machine.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import llvmlite.binding as llvm

from onward.config import SimdLevel, simd_level
from onward.errors import StartupError

_OF_AVX2 = ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave")
"""Features that LLVM may use for x86-64-v3 beyond SSE."""


@dataclass(frozen=True, slots=True)
class CpuTarget:
    """A CPU and its features, in LLVM's notation."""

    cpu: str
    features: str
    instructions: frozenset[str]
    """Features by which kernels may choose code."""


@functools.cache
def kernel_target() -> CpuTarget:
    return target_for(simd_level(), llvm.get_host_cpu_features(), is_x86=llvm.get_default_triple().startswith("x86_64"))


def target_for(level: SimdLevel, features: Mapping[str, bool], *, is_x86: bool) -> CpuTarget:
    """Returns the target of a level on a machine with these features."""
    present = frozenset(name for name, is_there in features.items() if is_there)
    if level == "native":
        return CpuTarget(llvm.get_host_cpu_name(), _flattened(features), present)
    if level == "plain":
        return CpuTarget("x86-64" if is_x86 else "generic", "", frozenset())
    missing = [name for name in _OF_AVX2 if name not in present]
    if missing:
        raise StartupError(
            f"ONWARD_SIMD=avx2: this CPU lacks {', '.join(missing)}; set ONWARD_SIMD to native or plain, or unset it"
        )
    return CpuTarget("x86-64-v3", "", frozenset(_OF_AVX2))


def _flattened(features: Mapping[str, bool]) -> str:
    return ",".join(f"{'+' if is_there else '-'}{name}" for name, is_there in sorted(features.items()))
