"""Norms of rows of the residual stream, RMSNorm or LayerNorm: sixteen values at a time, in a fixed order."""

import numpy as np

from onward.kernels.cpu import simd
from onward.kernels.cpu.jit import inlined_kernel_function
from onward.kernels.cpu.rope import mean_square


@inlined_kernel_function
def _mean(x, at, size):
    total = simd.splat(np.float32(0.0))
    for i in range(0, size, 16):
        total = total + simd.load(x, at + i)
    return simd.sum_lanes(total) / np.float32(size)


@inlined_kernel_function
def _mean_square_around(x, at, size, mean):
    total, middle = simd.splat(np.float32(0.0)), simd.splat(mean)
    for i in range(0, size, 16):
        v = simd.load(x, at + i) - middle
        total = simd.fma(v, v, total)
    return simd.sum_lanes(total) / np.float32(size)


@inlined_kernel_function
def middle_and_inverse(c, x, at):
    """Returns the number that a row's norm subtracts, and the factor that it multiplies by."""
    size = c.hidden_size
    if c.is_layer_norm != 0:
        mean = _mean(x, at, size)
        return mean, np.float32(1.0) / np.sqrt(_mean_square_around(x, at, size, mean) + c.eps)
    return np.float32(0.0), np.float32(1.0) / np.sqrt(mean_square(x, at, size) + c.eps)


@inlined_kernel_function
def normed_values(x, at, i, mean, inverse, weight_address, bias_address):
    """Returns sixteen normed values of a row, from index `i` on."""
    value = (simd.load(x, at + i) - simd.splat(mean)) * simd.splat(inverse) * simd.load(simd.floats(weight_address), i)
    if bias_address != 0:
        value = value + simd.load(simd.floats(bias_address), i)
    return value
