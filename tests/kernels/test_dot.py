"""The integer instruction under all int8 products, and the test that guards it."""

import functools

import pytest
from llvmlite import ir

from onward.kernels.cpu.dot_instruction import best_level, emit_dot, passes_self_test, supported_levels
from onward.kernels.cpu.llvm_vectors import I32X16, call_llvm


@pytest.mark.parametrize("level", supported_levels())
def test_every_level_of_this_cpu_gives_the_known_answer(level: str) -> None:
    assert passes_self_test(functools.partial(emit_dot, level))


def test_the_plain_level_is_there_on_every_cpu() -> None:
    assert supported_levels()[-1] == "plain"


def test_the_fastest_right_level_is_chosen() -> None:
    assert best_level() == supported_levels()[0]


def _saturating(builder: ir.IRBuilder, total: ir.Value, weights: ir.Value, inputs: ir.Value) -> ir.Value:
    """Sums of two products clamped to 16 bits: what a CPU without VNNI has for this purpose."""
    products = [builder.mul(_byte(builder, weights, j), _signed_byte(builder, inputs, j)) for j in range(4)]
    for low in (0, 2):
        pair = builder.add(products[low], products[low + 1])
        clamped = call_llvm(builder, "llvm.smin.v16i32", I32X16, pair, _all(2**15 - 1))
        clamped = call_llvm(builder, "llvm.smax.v16i32", I32X16, clamped, _all(-(2**15)))
        total = builder.add(total, clamped)
    return total


def _ignoring_the_last_byte(builder: ir.IRBuilder, total: ir.Value, weights: ir.Value, inputs: ir.Value) -> ir.Value:
    for j in range(3):
        total = builder.add(total, builder.mul(_byte(builder, weights, j), _signed_byte(builder, inputs, j)))
    return total


@pytest.mark.parametrize("wrong", [_saturating, _ignoring_the_last_byte])
def test_an_instruction_that_is_wrong_is_found_out(wrong: object) -> None:
    assert not passes_self_test(wrong)  # type: ignore[arg-type]


def _all(value: int) -> ir.Constant:
    return ir.Constant(I32X16, [value] * 16)


def _byte(builder: ir.IRBuilder, words: ir.Value, j: int) -> ir.Value:
    return builder.and_(builder.lshr(words, _all(8 * j)), _all(255))


def _signed_byte(builder: ir.IRBuilder, words: ir.Value, j: int) -> ir.Value:
    return builder.ashr(builder.shl(words, _all(24 - 8 * j)), _all(24))
