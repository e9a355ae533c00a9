"""Rows of int8 with a scale per 32 values: how activations reach the matrix kernels."""

from typing import Any, NamedTuple

import numpy as np

from onward.kernels.cpu import simd
from onward.kernels.cpu.jit import inlined_kernel_function
from onward.kernels.weight_packing import GROUP


class QuantizedActivations(NamedTuple):
    """[rows, inputs] int8, and three arrays [rows, inputs / 32]: arrays for Python, pointers for kernels."""

    values: Any
    scales: Any
    totals: Any
    """Scale times the sum of the group's values: what a weight's offset is multiplied with."""
    corrections: Any
    """-128 times the sum: what makes up for weights being stored plus 128."""

    @classmethod
    def allocate(cls, max_rows: int, inputs: int) -> "QuantizedActivations":
        groups = max_rows * inputs // GROUP
        return cls(
            np.zeros(max_rows * inputs, np.int8),
            np.zeros(groups, np.float32),
            np.zeros(groups, np.float32),
            np.zeros(groups, np.int32),
        )


@inlined_kernel_function
def quantize_group(low, high, target, group):
    """Writes 32 values, given as two vectors, as group number `group` of the whole array.

    NaN makes the scale NaN, and so the product.
    """
    largest = simd.max_magnitude(simd.larger_magnitude(low, high))
    inverse = np.float32(127.0) / largest if largest > np.float32(0.0) else np.float32(0.0)
    factor = simd.splat(inverse)
    low_i = simd.to_i32(simd.round_even(low * factor))
    high_i = simd.to_i32(simd.round_even(high * factor))
    simd.store_i8_pair(target.values, group * GROUP, low_i, high_i)
    total = simd.sum_lanes_i32(low_i + high_i)
    scale = largest / np.float32(127.0)
    target.scales[group] = scale
    target.totals[group] = scale * np.float32(total)
    target.corrections[group] = np.int32(-128) * total
