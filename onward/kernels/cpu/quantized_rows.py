"""Rows of int8 with a scale per 32 values: the form in which activations reach the matrix kernels."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from onward.kernels.cpu import simd
from onward.kernels.cpu.jit import inlined_kernel_function
from onward.kernels.weight_formats import GROUP


def _private_zeros(name: str, size: int, dtype: type) -> np.ndarray:
    return np.zeros(size, dtype)


class QuantizedActivations(NamedTuple):
    """[rows, inputs] int8, and four arrays [rows, inputs / 32]: arrays for Python, pointers for kernels."""

    values: Any
    scales: Any
    totals: Any
    """Scale times the sum of the group's values: the factor of a weight's offset."""
    corrections: Any
    """-128 times the sum: compensates for weights that are stored plus 128."""
    low_corrections: Any
    """The corrections of each group's first 16 values, for weights with a scale for 16 inputs."""

    @classmethod
    def allocate(
        cls, max_rows: int, inputs: int, zeros: Callable[[str, int, type], np.ndarray] = _private_zeros
    ) -> "QuantizedActivations":
        """Allocates the arrays for `max_rows` rows. `zeros(name, size, dtype)` allocates an array of zeros."""
        groups = max_rows * inputs // GROUP
        return cls(
            zeros("values", max_rows * inputs, np.int8),
            zeros("scales", groups, np.float32),
            zeros("totals", groups, np.float32),
            zeros("corrections", groups, np.int32),
            zeros("low_corrections", groups, np.int32),
        )


@inlined_kernel_function
def quantize_group(low, high, target, group):
    """Writes 32 values, given as two vectors, as group number `group` of the whole array.

    NaN makes the scale NaN, and with it the product.
    """
    largest = simd.max_magnitude(simd.larger_magnitude(low, high))
    inverse = np.float32(127.0) / largest if largest > np.float32(0.0) else np.float32(0.0)
    factor = simd.splat(inverse)
    low_i = simd.to_i32(simd.round_even(low * factor))
    high_i = simd.to_i32(simd.round_even(high * factor))
    simd.store_i8_pair(target.values, group * GROUP, low_i, high_i)
    low_total = simd.sum_lanes_i32(low_i)
    total = low_total + simd.sum_lanes_i32(high_i)
    scale = largest / np.float32(127.0)
    target.scales[group] = scale
    target.totals[group] = scale * np.float32(total)
    target.corrections[group] = np.int32(-128) * total
    target.low_corrections[group] = np.int32(-128) * low_total
