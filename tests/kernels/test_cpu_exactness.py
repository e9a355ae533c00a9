"""The SIMD level changes how fast CPU kernels are, and not one bit of what they give."""

import llvmlite.binding as llvm
import pytest

from onward.config import SIMD_VARIABLE, simd_level
from onward.errors import StartupError
from onward.kernels.cpu.target import target_for
from tests.kernels import simd_outputs
from tests.kernels.exact_bits import differing

HAS_AVX2 = dict.fromkeys(("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave", "sse4.2"), True)
HAS_VNNI = HAS_AVX2 | {"avx512f": True, "avx512bw": True, "avx512vnni": True, "amx-int8": False}


def _levels() -> list:
    """Returns the levels that can be forced here. The plain one exists on every CPU and differs most: it fuses nothing."""
    host = llvm.get_host_cpu_features()
    has_avx2 = all(host.get(name) for name in HAS_AVX2)
    return ["plain", *([pytest.param("avx2", marks=pytest.mark.full)] if has_avx2 else [])]


@pytest.mark.parametrize("level", _levels())
def test_no_element_that_any_kernel_gives_differs_on_a_forced_level(level: str) -> None:
    here = simd_outputs.outputs()
    there, cpu, registers = simd_outputs.of_level(level)
    assert {name: differing(there[name], array) for name, array in here.items()} == dict.fromkeys(here, 0)
    # It was the level: compiled for another CPU, which numba's cache is keyed by, and with narrower registers.
    assert cpu != llvm.get_host_cpu_name()
    assert not registers & {"zmm", *(["ymm"] if level == "plain" else [])}


def test_an_unknown_level_is_refused_with_the_levels_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIMD_VARIABLE, "sse9")
    with pytest.raises(StartupError, match="ONWARD_SIMD is 'sse9'; it may be native, avx2, plain"):
        simd_level()


@pytest.mark.parametrize("value", [None, "", "native"])
def test_the_level_is_native_where_none_is_named(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv(SIMD_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(SIMD_VARIABLE, value)
    assert simd_level() == "native"


def test_native_takes_what_the_machine_has_and_leaves_the_rest() -> None:
    target = target_for("native", HAS_VNNI, is_x86=True)
    assert "avx512vnni" in target.instructions
    assert "amx-int8" not in target.instructions
    assert "-amx-int8" in target.features.split(",")


@pytest.mark.parametrize(("level", "cpu"), [("avx2", "x86-64-v3"), ("plain", "x86-64")])
def test_a_forced_level_has_no_instruction_beyond_it(level: str, cpu: str) -> None:
    target = target_for(level, HAS_VNNI, is_x86=True)  # type: ignore[arg-type]
    assert target.cpu == cpu
    assert not any(name.startswith("avx512") for name in target.instructions)


def test_a_level_that_the_cpu_lacks_is_refused_and_the_missing_instructions_are_named() -> None:
    with pytest.raises(StartupError, match=r"ONWARD_SIMD=avx2: this CPU lacks f16c, fma; set ONWARD_SIMD to native or"):
        target_for("avx2", HAS_AVX2 | {"fma": False, "f16c": False}, is_x86=True)


def test_the_plain_level_exists_on_other_architectures() -> None:
    assert target_for("plain", {"neon": True, "dotprod": True}, is_x86=False).cpu == "generic"
