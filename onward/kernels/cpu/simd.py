"""Vectors of sixteen 32-bit lanes for numba kernels: explicit, so that the code defines the order of float operations.

`f32x16` and `i32x16` are numba types backed by LLVM vectors; LLVM lowers them to what the CPU has (one AVX-512 register,
two of AVX2, four of NEON). Arrays are contiguous, offsets count elements from the first one, and nothing checks bounds.
No operation may be reassociated or contracted: `fma` is fused on every CPU, `a * b + c` on none.
"""

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import lower_builtin, models, register_model

from onward.kernels.cpu.jit import inlined_kernel_function
from onward.kernels.cpu.llvm_vectors import (
    F32,
    F32X16,
    I8,
    I16,
    I32,
    I32X16,
    LANES,
    Builder,
    Value,
    call_llvm,
    element_pointer,
    fma_value,
    half_to_float,
    intrinsic,
    load_value,
    splat_value,
    store_value,
)

_LANE_INDEX = ir.Constant(I32X16, list(range(LANES)))


class SimdVectorType(types.Type):
    """A numba type whose values are one LLVM vector."""

    def __init__(self, name: str, llvm_type: ir.VectorType) -> None:
        super().__init__(name=name)
        self.llvm_type = llvm_type


f32x16 = SimdVectorType("f32x16", F32X16)
i32x16 = SimdVectorType("i32x16", I32X16)


@register_model(SimdVectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: SimdVectorType) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm_type)


# Memory.


@intrinsic
def load(typing_context, array, index):
    """Loads sixteen float32 from `array`, starting at element `index`."""

    def emit(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[0], *args)
        return load_value(builder, pointer, F32X16)

    return f32x16(array, types.intp), emit


@intrinsic
def store_float(typing_context, array, index, value):
    """Stores one float32 into memory of any type; `index` counts the array's own elements."""

    def emit(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[0], args[0], args[1])
        store_value(builder, pointer, args[2])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), emit


@intrinsic
def store(typing_context, array, index, vector):
    def emit(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[0], args[0], args[1])
        store_value(builder, pointer, args[2])
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), emit


@intrinsic
def store_i8_pair(typing_context, array, index, low, high):
    """Stores the low byte of each lane of two vectors, in one piece: narrowing stores are slow on some CPUs."""

    def emit(context, builder, sig, args):
        pointer = element_pointer(context, builder, sig.args[0], args[0], args[1])
        halves = [builder.trunc(vector, ir.VectorType(I8, LANES)) for vector in args[2:]]
        order = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(2 * LANES)))
        store_value(builder, pointer, builder.shuffle_vector(*halves, order), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, i32x16, i32x16), emit


# Kernels get addresses; these functions turn them into typed pointers.


def _emit_pointer(context, builder, sig, args):
    return builder.inttoptr(args[0], context.get_value_type(sig.return_type))


@intrinsic
def floats(typing_context, address):
    return types.CPointer(types.float32)(types.int64), _emit_pointer


@intrinsic
def uint8s(typing_context, address):
    return types.CPointer(types.uint8)(types.int64), _emit_pointer


@intrinsic
def int8s(typing_context, address):
    return types.CPointer(types.int8)(types.int64), _emit_pointer


@intrinsic
def int32s(typing_context, address):
    return types.CPointer(types.int32)(types.int64), _emit_pointer


@intrinsic
def int64s(typing_context, address):
    return types.CPointer(types.int64)(types.int64), _emit_pointer


@intrinsic
def uint64s(typing_context, address):
    return types.CPointer(types.uint64)(types.int64), _emit_pointer


@intrinsic
def doubles(typing_context, address):
    return types.CPointer(types.float64)(types.int64), _emit_pointer


def _emit_shifted(context, builder, sig, args):
    """Emits the pointer to an element, with the type of the result."""
    return builder.bitcast(builder.gep(args[0], [args[1]]), context.get_value_type(sig.return_type))


@intrinsic
def shifted(typing_context, pointer, index):
    """Returns a pointer to element `index`."""
    return pointer(pointer, types.int64), _emit_shifted


@intrinsic
def as_bytes(typing_context, pointer, index):
    """Returns the memory from element `index` on, as uint8."""
    return types.CPointer(types.uint8)(pointer, types.int64), _emit_shifted


@intrinsic
def as_int32s(typing_context, pointer, index):
    return types.CPointer(types.int32)(pointer, types.int64), _emit_shifted


@intrinsic
def as_int64s(typing_context, pointer, index):
    return types.CPointer(types.int64)(pointer, types.int64), _emit_shifted


@intrinsic
def itemsize(typing_context, pointer):
    """Returns the bytes of an element at a pointer, known when the kernel is compiled."""
    size = pointer.dtype.bitwidth // 8
    return types.int64(pointer), lambda context, builder, sig, args: context.get_constant(types.int64, size)


def _emit_scalar(kind: ir.Type) -> Any:
    def emit(context, builder, sig, args):
        return load_value(builder, builder.gep(args[0], [args[1]]), kind, align=1)

    return emit


@intrinsic
def float_at(typing_context, pointer, offset):
    """Loads a float32 at a byte offset."""
    return types.float32(pointer, types.intp), _emit_scalar(F32)


@intrinsic
def half_at(typing_context, pointer, offset):
    """Loads a finite float16 at a byte offset, widened."""

    def emit(context, builder, sig, args):
        return half_to_float(builder, builder.zext(_emit_scalar(I16)(context, builder, sig, args), I32))

    return types.float32(pointer, types.intp), emit


# Arithmetic: + - * on two vectors of a kind, and the functions below.


class _SameVectors(AbstractTemplate):
    def generic(self, args, kws):
        if len(args) == 2 and isinstance(args[0], SimdVectorType) and args[0] == args[1]:
            return signature(args[0], args[0], args[0])
        return None


_OPERATORS = {
    operator.add: ("fadd", "add"),
    operator.sub: ("fsub", "sub"),
    operator.mul: ("fmul", "mul"),
    operator.truediv: ("fdiv", "sdiv"),
}


def _lower_operator(function: Any, float_name: str, int_name: str) -> None:
    declare: Any = infer_global(function)
    declare(type(f"_{int_name}", (_SameVectors,), {"key": function}))

    @lower_builtin(function, SimdVectorType, SimdVectorType)
    def emit(context, builder, sig, args):
        return getattr(builder, float_name if sig.return_type == f32x16 else int_name)(*args)


for _function, _names in _OPERATORS.items():
    _lower_operator(_function, *_names)


@intrinsic
def splat(typing_context, scalar):
    """Returns a vector with `scalar`, a float32, in every lane."""
    return f32x16(types.float32), lambda context, builder, sig, args: splat_value(builder, args[0])


@intrinsic
def splat_i32(typing_context, scalar):
    return i32x16(types.int32), lambda context, builder, sig, args: splat_value(builder, args[0])


@intrinsic
def fma(typing_context, a, b, c):
    return f32x16(f32x16, f32x16, f32x16), lambda context, builder, sig, args: fma_value(builder, *args)


def _emit_call(name: str, result: ir.Type) -> Any:
    return lambda context, builder, sig, args: call_llvm(builder, name, result, *args)


@intrinsic
def maximum(typing_context, a, b):
    return f32x16(f32x16, f32x16), _emit_call("llvm.maxnum.v16f32", F32X16)


@intrinsic
def minimum(typing_context, a, b):
    return f32x16(f32x16, f32x16), _emit_call("llvm.minnum.v16f32", F32X16)


@intrinsic
def larger_magnitude(typing_context, a, b):
    """Returns in each lane the larger of the absolute values. NaN counts as larger than everything, so that a fault
    stays visible; the plain maximum would drop it."""

    def emit(context, builder, sig, args):
        return builder.bitcast(_max_bits(builder, *(_magnitude_bits(builder, a) for a in args)), F32X16)

    return f32x16(f32x16, f32x16), emit


def _magnitude_bits(builder: Builder, value: Value) -> Value:
    """Returns integers whose order is that of the magnitudes."""
    return builder.and_(builder.bitcast(value, I32X16), splat_value(builder, ir.Constant(I32, 0x7FFFFFFF)))


def _max_bits(builder: Builder, a: Value, b: Value) -> Value:
    return call_llvm(builder, "llvm.smax.v16i32", I32X16, a, b)


@intrinsic
def round_even(typing_context, a):
    return f32x16(f32x16), _emit_call("llvm.nearbyint.v16f32", F32X16)


@intrinsic
def to_i32(typing_context, a):
    """Converts whole numbers within the range of int32."""
    return i32x16(f32x16), lambda context, builder, sig, args: builder.fptosi(args[0], I32X16)


@intrinsic
def to_f32(typing_context, a):
    return f32x16(i32x16), lambda context, builder, sig, args: builder.sitofp(args[0], F32X16)


@intrinsic
def keep_first(typing_context, vector, count, fill):
    """Replaces lanes from `count` on by `fill`."""

    def emit(context, builder, sig, args):
        limit = splat_value(builder, builder.trunc(args[1], I32))
        inside = builder.icmp_signed("<", _LANE_INDEX, limit)
        return builder.select(inside, args[0], splat_value(builder, args[2]))

    return f32x16(f32x16, types.int64, types.float32), emit


def _not_below(builder: Builder, vector: Value, limit: Value) -> Value:
    """Returns a mask of the lanes that are at least `limit`, or NaN."""
    return builder.fcmp_unordered(">=", vector, splat_value(builder, limit))


@intrinsic
def keep_not_below(typing_context, vector, limit):
    """Replaces lanes below `limit` by 0."""

    def emit(context, builder, sig, args):
        return builder.select(_not_below(builder, *args), args[0], splat_value(builder, ir.Constant(F32, 0.0)))

    return f32x16(f32x16, types.float32), emit


@intrinsic
def count_not_below(typing_context, total, vector, limit):
    """Adds 1 to the lanes of `total` where the vector is not below `limit`. NaN counts as not below."""

    def emit(context, builder, sig, args):
        return builder.add(args[0], builder.zext(_not_below(builder, args[1], args[2]), I32X16))

    return i32x16(i32x16, f32x16, types.float32), emit


@intrinsic
def float_of_bits(typing_context, bits):
    return types.float32(types.int32), lambda context, builder, sig, args: builder.bitcast(args[0], F32)


@intrinsic
def power_of_two(typing_context, exponent):
    """Returns 2 to the given whole powers, which must lie in -127..127 (-127 gives 0)."""

    def emit(context, builder, sig, args):
        biased = builder.add(args[0], splat_value(builder, ir.Constant(I32, 127)))
        return builder.bitcast(builder.shl(biased, splat_value(builder, ir.Constant(I32, 23))), F32X16)

    return f32x16(i32x16), emit


# Reductions across lanes always combine lane i with lane i + 8, then 4, 2, 1.


def _fold(builder: Builder, vector: Value, combine: Any) -> Value:
    width = LANES // 2
    while width:
        order = ir.Constant(I32X16, [(lane + width) % LANES for lane in range(LANES)])
        vector = combine(vector, builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), order))
        width //= 2
    return builder.extract_element(vector, ir.Constant(I32, 0))


@intrinsic
def sum_lanes(typing_context, vector):
    return types.float32(f32x16), lambda context, builder, sig, args: _fold(builder, args[0], builder.fadd)


@intrinsic
def sum_lanes_i32(typing_context, vector):
    return types.int32(i32x16), lambda context, builder, sig, args: _fold(builder, args[0], builder.add)


@intrinsic
def max_magnitude(typing_context, vector):
    """Returns the largest magnitude of all lanes; NaN if any of them is NaN."""

    def emit(context, builder, sig, args):
        bits = _magnitude_bits(builder, args[0])
        largest = _fold(builder, bits, lambda a, b: _max_bits(builder, a, b))
        return builder.bitcast(largest, F32)

    return types.float32(f32x16), emit


@intrinsic
def max_lanes(typing_context, vector):
    def emit(context, builder, sig, args):
        return _fold(builder, args[0], lambda a, b: call_llvm(builder, "llvm.maxnum.v16f32", F32X16, a, b))

    return types.float32(f32x16), emit


# exp(x) = 2^n * e^r with n = round(x / ln 2), |r| <= ln(2) / 2, and a polynomial for e^r: within 2 ulp.


@inlined_kernel_function
def exp(x):
    """Returns e to the x. Below -87.3 the result is 0; above 88 it stays at e^88."""
    x = maximum(minimum(x, splat(88.0)), splat(-87.9))
    n = round_even(x * splat(1.4426950408889634))
    r = fma(n, splat(-0.693359375), x)
    r = fma(n, splat(2.12194440e-4), r)
    p = splat(1.9875691500e-4)
    p = fma(p, r, splat(1.3981999507e-3))
    p = fma(p, r, splat(8.3334519073e-3))
    p = fma(p, r, splat(4.1665795894e-2))
    p = fma(p, r, splat(1.6666665459e-1))
    p = fma(p, r, splat(5.0000001201e-1))
    y = fma(p, r * r, r + splat(1.0))
    return y * power_of_two(to_i32(n))
