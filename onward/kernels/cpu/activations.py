"""Activations and soft-caps of sixteen lanes, from `simd.exp`: the same bits on every CPU.

`numpy_reference` has the textbook formulas.
"""

import numpy as np

from onward.kernels.cpu import simd
from onward.kernels.cpu.jit import inlined_kernel_function

KINDS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}
_SILU, _GELU_TANH, _GELU = KINDS["silu"], KINDS["gelu_tanh"], KINDS["gelu"]


@inlined_kernel_function
def _sigmoid(x):
    one = simd.splat(np.float32(1.0))
    return one / (one + simd.exp(simd.splat(np.float32(0.0)) - x))


@inlined_kernel_function
def soft_cap(x, cap):
    """Returns cap * tanh(x / cap), computed as tanh(y) = 1 - 2 / (e^2y + 1)."""
    one, two = simd.splat(np.float32(1.0)), simd.splat(np.float32(2.0))
    limit = simd.splat(cap)
    return limit * (one - two / (simd.exp(two * (x / limit)) + one))


@inlined_kernel_function
def _erf_of_magnitude(x):
    """Returns erf(|x|) to 1.5e-7 (Abramowitz and Stegun, 7.1.26)."""
    one = simd.splat(np.float32(1.0))
    size = simd.larger_magnitude(x, simd.splat(np.float32(0.0)))
    t = one / simd.fma(simd.splat(np.float32(0.3275911)), size, one)
    p = simd.splat(np.float32(1.061405429))
    p = simd.fma(p, t, simd.splat(np.float32(-1.453152027)))
    p = simd.fma(p, t, simd.splat(np.float32(1.421413741)))
    p = simd.fma(p, t, simd.splat(np.float32(-0.284496736)))
    p = simd.fma(p, t, simd.splat(np.float32(0.254829592)))
    return one - p * t * simd.exp(simd.splat(np.float32(0.0)) - size * size)


@inlined_kernel_function
def clamped_swiglu(gate, up, alpha, limit):
    """Returns `proto.model.ClampedSwiglu` of gate and up. NaN stays NaN, which the clamps alone would drop, and
    infinity becomes NaN."""
    zero, one, highest = simd.splat(np.float32(0.0)), simd.splat(np.float32(1.0)), simd.splat(limit)
    fault = (gate - gate) + (up - up)
    gate = simd.minimum(gate, highest)
    up = simd.maximum(simd.minimum(up, highest), zero - highest)
    return (up + one) * (gate * _sigmoid(simd.splat(alpha) * gate)) + fault


@inlined_kernel_function
def activate(kind, x):
    """Returns the activation of x. `kind` is one of `KINDS`. NaN stays NaN."""
    if kind == _SILU:
        return x * _sigmoid(x)
    if kind == _GELU_TANH:  # 0.5 x (1 + tanh(u)) = x * sigmoid(2 u)
        inner = simd.fma(simd.splat(np.float32(0.044715)) * x * x, x, x)
        return x * _sigmoid(simd.splat(np.float32(1.5957691216057308)) * inner)
    if kind == _GELU:  # x/2 + |x|/2 * erf(|x| / sqrt(2)), as erf is odd
        half = simd.splat(np.float32(0.5)) * x
        size = simd.larger_magnitude(half, simd.splat(np.float32(0.0)))
        return half + size * _erf_of_magnitude(x * simd.splat(np.float32(0.7071067811865476)))
    return simd.maximum(x, simd.splat(np.float32(0.0)))
