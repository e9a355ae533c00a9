"""The one instruction from which int8 matrix products are built: sixteen sums of four products, unsigned times signed.

    vnni    one AVX-512 instruction
    avx2    16-bit multiply-adds, which cannot saturate on these operands
    plain   shifts and 32-bit multiplies, for every CPU

All levels are exact, so they give the same bits. The level is the fastest that the target has (see `target`) and that
gives a known answer: an instruction that saturates or is emulated wrongly is not used.
"""

import ctypes
import functools
import logging
from collections.abc import Callable

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from onward.kernels.cpu.llvm_vectors import I16, I32, I32X16, Builder, Value, call_llvm, load_value, store_value
from onward.kernels.cpu.target import kernel_target
from onward.log import event

LEVELS = ("vnni", "avx2", "plain")
_NEEDS = {"vnni": ("avx512vnni", "avx512bw"), "avx2": ("avx2", "f16c"), "plain": ()}
_I16X32 = ir.VectorType(I16, 32)
_I16X16 = ir.VectorType(I16, 16)
_I32X8 = ir.VectorType(I32, 8)

log = logging.getLogger(__name__)


Emit = Callable[[Builder, Value, Value, Value], Value]


def emit_dot(level: str, builder: Builder, total: Value, weights: Value, inputs: Value) -> Value:
    """Emits total[i] + sum over j < 4 of weights[i].byte[j] (unsigned) * inputs[i].byte[j] (signed); all are <16 x
    i32>."""
    if level == "vnni":
        return call_llvm(builder, "llvm.x86.avx512.vpdpbusd.512", I32X16, total, weights, inputs)
    if level == "avx2":
        return _emit_pairs(builder, total, weights, inputs)
    return _emit_plain(builder, total, weights, inputs)


def _emit_plain(builder: Builder, total: Value, weights: Value, inputs: Value) -> Value:
    for byte in range(4):
        weight = builder.and_(builder.lshr(weights, _i32s(8 * byte)), _i32s(255))
        value = builder.ashr(builder.shl(inputs, _i32s(24 - 8 * byte)), _i32s(24))
        total = builder.add(total, builder.mul(weight, value))
    return total


def _emit_pairs(builder: Builder, total: Value, weights: Value, inputs: Value) -> Value:
    """Multiplies bytes 0 and 2, then 1 and 3, as pairs of 16 bits."""
    low_bytes, eight = ir.Constant(_I16X32, [255] * 32), ir.Constant(_I16X32, [8] * 32)
    weights, inputs = builder.bitcast(weights, _I16X32), builder.bitcast(inputs, _I16X32)
    even = (builder.and_(weights, low_bytes), builder.ashr(builder.shl(inputs, eight), eight))
    odd = (builder.lshr(weights, eight), builder.ashr(inputs, eight))
    undefined = ir.Constant(_I16X32, ir.Undefined)
    halves = []
    for first in (0, 16):
        lanes = ir.Constant(ir.VectorType(I32, 16), list(range(first, first + 16)))
        sums = [
            call_llvm(
                builder,
                "llvm.x86.avx2.pmadd.wd",
                _I32X8,
                *(builder.shuffle_vector(operand, undefined, lanes) for operand in pair),
            )
            for pair in (even, odd)
        ]
        halves.append(builder.add(*sums))
    return builder.add(total, builder.shuffle_vector(*halves, ir.Constant(I32X16, list(range(16)))))


def _i32s(value: int) -> ir.Constant:
    return ir.Constant(I32X16, [value] * 16)


def supported_levels() -> list[str]:
    """Returns the levels whose instructions the target has, fastest first."""
    instructions = kernel_target().instructions
    return [level for level in LEVELS if instructions.issuperset(_NEEDS[level])]


@functools.cache
def best_level() -> str:
    """Returns the fastest level that the target has and that gives the known answer."""
    for level in supported_levels():
        if passes_self_test(functools.partial(emit_dot, level)):
            return level
        log.warning(event("int8 products are wrong on this CPU and will not be used", level=level))
    raise AssertionError("plain integer arithmetic is wrong on this CPU")


def passes_self_test(emit: Emit) -> bool:
    """Compares with known answers: for the largest possible sums, of either sign, and for every byte on its own."""
    cases = [([255] * 4, [127] * 4), ([255] * 4, [-128] * 4), ([255, 255, 0, 0], [127, 127, 0, 0])]
    cases += [([1 << j if i == j else 0 for i in range(4)], [-3, 5, -7, 11]) for j in range(4)]
    cases += [([7 * i + 1, 255 - i, 3 * i, 128 + i], [i - 8, 8 - i, -i, 127 - i]) for i in range(9)]
    weights = np.array([case[0] for case in cases], np.uint8)
    inputs = np.array([case[1] for case in cases], np.int8)
    totals = np.arange(-8, 8, dtype=np.int32) * 100_000
    expected = totals + (weights.astype(np.int32) * inputs).sum(axis=1)
    _compile(emit)(totals, weights, inputs)
    return bool((totals == expected).all())


def _compile(emit: Emit) -> Callable[..., None]:
    """Returns a function on three arrays of 64 bytes. It is built without numba, so that numba compiles nothing before
    the choice."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    pointer = ir.IntType(8).as_pointer()
    module = ir.Module(name="known_answer")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer] * 3), "dot")
    builder = ir.IRBuilder(function.append_basic_block())
    values = [load_value(builder, argument, I32X16, align=1) for argument in function.args]
    store_value(builder, function.args[0], emit(builder, *values), align=1)
    builder.ret_void()
    target = kernel_target()
    machine = llvm.Target.from_default_triple().create_target_machine(cpu=target.cpu, features=target.features)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), machine)
    engine.finalize_object()
    address = engine.get_function_address("dot")

    def run(*arrays: np.ndarray) -> None:
        assert engine is not None  # owns the code
        ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)(address)(*(array.ctypes.data for array in arrays))

    return run
