"""Products with packed weights: a function for each weight format.

Forward passes call them by address, so a model compiles only the functions of its own formats, and a matrix may change
its format from one pair of tiles to the next.
"""

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from onward.kernels.cpu import simd
from onward.kernels.cpu.dot_instruction import best_level
from onward.kernels.cpu.int8_matmul_tile import int8_tile
from onward.kernels.cpu.jit import compile_cached
from onward.kernels.cpu.llvm_vectors import Builder, intrinsic
from onward.kernels.weight_formats import OUTPUT_UNIT, TILE, format_of_record

_LEVEL = best_level()
_FLOATS = types.CPointer(types.float32)
_INTS = types.CPointer(types.int32)
_MULTIPLY = types.void(
    types.int64, types.int64, types.int64, types.CPointer(types.int8), _FLOATS, _FLOATS, _INTS, _INTS, _FLOATS
)


@functools.cache
def multiply_kernel(format_name: str) -> Any:
    """Returns the compiled C function that sets out[row, 0:32] to the product of each input row and two tiles. Its
    arguments: address of the weights, number of groups of 32 inputs, rows (1 to 4), the five parts of
    `QuantizedActivations`, out."""

    def multiply(weights, groups, num_rows, x, s, t, c, l, out):  # noqa: E741
        w = simd.uint8s(weights)
        if num_rows == 4:
            int8_tile(_LEVEL, format_name, 4, w, groups, x, s, t, c, l, out)
        elif num_rows == 3:
            int8_tile(_LEVEL, format_name, 3, w, groups, x, s, t, c, l, out)
        elif num_rows == 2:
            int8_tile(_LEVEL, format_name, 2, w, groups, x, s, t, c, l, out)
        else:
            int8_tile(_LEVEL, format_name, 1, w, groups, x, s, t, c, l, out)

    return compile_cached(_MULTIPLY, multiply, error_model="numpy")


def _emit_call(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
    function = ir.FunctionType(ir.VoidType(), [arg.type for arg in args[1:]]).as_pointer()
    builder.call(builder.inttoptr(args[0], function), args[1:])
    return context.get_dummy_value()


@intrinsic
def call_multiply(typing_context: Any, address: Any, weights: Any, groups: Any, num_rows: Any, x: Any, s: Any, t: Any,
                  c: Any, low: Any, out: Any) -> Any:  # fmt: skip
    return types.void(types.int64, *_MULTIPLY.args), _emit_call


def pair_table(parts: list[np.ndarray]) -> np.ndarray:
    """Returns int64 [pairs of tiles, 2]: the address of each pair's weights, and of the kernel for them. `parts` are
    packed arrays with the same inputs, whose outputs follow each other; the caller keeps them alive."""
    rows: list[tuple[int, int]] = []
    for part in parts:
        kernel = multiply_kernel(format_of_record(part.shape[-1]).name).address
        pair_bytes = 2 * part.shape[1] * part.shape[2]
        first = part.ctypes.data
        rows += [(first + pair * pair_bytes, kernel) for pair in range(part.shape[0] * TILE // OUTPUT_UNIT)]
    return np.array(rows, np.int64)
