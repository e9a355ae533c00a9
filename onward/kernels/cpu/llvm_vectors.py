"""Emitting LLVM vectors: types, and the few operations that every kernel's code is built from.

Kernels call an intrinsic like a Python function. An intrinsic gets numba types, and returns a signature and a function
that emits code.
"""

from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core.errors import RequireLiteralValue

Value = Any
Builder = Any
"""Any, because llvmlite's own types lack attributes that its objects have."""

LANES = 16

F16 = ir.HalfType()
F32 = ir.FloatType()
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F16X16 = ir.VectorType(F16, LANES)
F32X16 = ir.VectorType(F32, LANES)
I32X16 = ir.VectorType(I32, LANES)
F32_ZEROS = ir.Constant(F32X16, [0.0] * LANES)


def intrinsic(function: Any) -> Any:
    return extending.intrinsic(function)


def intrinsic_on_literals(function: Any) -> Any:
    """Decorates an intrinsic of which some arguments must be literals; see `require_literals`."""
    decorate: Any = extending.intrinsic(prefer_literal=True)
    return decorate(function)


def require_literals(*values: Any) -> None:
    if not all(isinstance(value, types.Literal) for value in values):
        raise RequireLiteralValue("sizes of loops in registers must be literals")


def splat_value(builder: Builder, scalar: Value) -> Value:
    vector = ir.VectorType(scalar.type, LANES)
    undefined = ir.Constant(vector, ir.Undefined)
    single = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(single, undefined, ir.Constant(I32X16, [0] * LANES))


def call_llvm(builder: Builder, name: str, result: ir.Type, *args: Value) -> Value:
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(function, args)


def half_to_float(builder: Builder, bits: Value) -> Value:
    """Converts a finite float16, or a vector of them, given as the i32 with its bits. The result is exact on every CPU:
    the bits are moved into a float32, and its exponent is corrected."""
    is_vector = isinstance(bits.type, ir.VectorType)

    def constant(kind: ir.Type, value: float) -> ir.Constant:
        return ir.Constant(ir.VectorType(kind, LANES), [value] * LANES) if is_vector else ir.Constant(kind, value)

    magnitude = builder.shl(builder.and_(bits, constant(I32, 0x7FFF)), constant(I32, 13))
    sign = builder.shl(builder.and_(bits, constant(I32, 0x8000)), constant(I32, 16))
    as_float = builder.bitcast(magnitude, F32X16 if is_vector else F32)
    scaled = builder.fmul(as_float, constant(F32, 2.0**112))
    return builder.bitcast(builder.or_(builder.bitcast(scaled, bits.type), sign), as_float.type)


def fma_value(builder: Builder, a: Value, b: Value, c: Value) -> Value:
    return call_llvm(builder, "llvm.fma.v16f32", F32X16, a, b, c)


def element_pointer(context: Any, builder: Builder, array_type: Any, array: Any, index: Any) -> Value:
    """Returns a pointer to element `index` of a contiguous numba array of any shape, or of the memory at a pointer."""
    if isinstance(array_type, types.CPointer):
        return builder.gep(array, [index])
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


def load_value(builder: Builder, pointer: Value, kind: ir.Type, align: int = 4) -> Value:
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=align)


def store_value(builder: Builder, pointer: Value, value: Value, align: int = 4) -> None:
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=align)
