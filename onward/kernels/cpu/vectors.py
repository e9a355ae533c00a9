"""Emitting LLVM vectors: types and the few operations that every kernel's code is built from."""

from typing import Any

from llvmlite import ir
from numba import types

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


def splat_value(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    vector = ir.VectorType(scalar.type, LANES)
    undefined = ir.Constant(vector, ir.Undefined)
    single = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(single, undefined, ir.Constant(I32X16, [0] * LANES))


def call_llvm(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(result, [a.type for a in args]), name)
    return builder.call(function, args)


def fma_value(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return call_llvm(builder, "llvm.fma.v16f32", F32X16, a, b, c)


def element_pointer(context: Any, builder: ir.IRBuilder, array_type: Any, array: Any, index: Any) -> ir.Value:
    """Points to element `index` of a contiguous numba array, whatever its shape, or of what a pointer points to."""
    if isinstance(array_type, types.CPointer):
        return builder.gep(array, [index])
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


def load_value(builder: ir.IRBuilder, pointer: ir.Value, kind: ir.Type, align: int = 4) -> ir.Value:
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=align)


def store_value(builder: ir.IRBuilder, pointer: ir.Value, value: ir.Value, align: int = 4) -> None:
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=align)


def load_floats(builder: ir.IRBuilder, pointer: ir.Value) -> ir.Value:
    """Sixteen float32 from a pointer to them, or to int8 that are widened."""
    if pointer.type.pointee == I8:
        return builder.sitofp(load_value(builder, pointer, ir.VectorType(I8, LANES), align=1), F32X16)
    return load_value(builder, pointer, F32X16)
