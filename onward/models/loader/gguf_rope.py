"""Recovers rope scaling from GGUF, which stores a tensor of divisors, one per frequency, instead of the rule behind
them.

The rule (Llama-3) is accepted only if it reproduces the tensor. Its parameters are determined up to a common factor of
three of them, which does not change the result, so one is fixed at its usual value.
"""

from collections.abc import Sequence

from onward.errors import StartupError
from onward.models.rope_scaling import llama3_divisors, wavelength
from onward.proto.model import Llama3Rope

_USUAL_ORIGINAL = 8192
_TOLERANCE = 1e-4


def fit_rope_scaling(divisors: Sequence[float], theta: float, head_dim: int) -> Llama3Rope | None:
    """Returns the scaling that has these divisors; None if they are all one."""
    if len(divisors) != head_dim // 2:
        raise StartupError(f"rope_freqs.weight has {len(divisors)} values, expected {head_dim // 2}")
    if all(abs(divisor - 1.0) < _TOLERANCE for divisor in divisors):
        return None
    factor = _rounded(max(divisors))
    for scaling in (Llama3Rope(factor, 1.0, 4.0, _USUAL_ORIGINAL), _fit(divisors, theta, head_dim, factor)):
        if scaling is not None and _matches(scaling, divisors, theta, head_dim):
            return scaling
    raise StartupError("rope_freqs.weight is not a scaling of the Llama-3 kind, which is the only one supported")


def _fit(divisors: Sequence[float], theta: float, head_dim: int, factor: float) -> Llama3Rope | None:
    """Returns the scaling that the ramp of these divisors determines; None if they have no ramp. Along the ramp,
    `smooth` is linear in the inverse wavelength, so two of its points determine low and high."""
    ramp = [
        (1.0 / wavelength(theta, head_dim, i), (1.0 / divisor - 1.0 / factor) / (1.0 - 1.0 / factor))
        for i, divisor in enumerate(divisors)
        if 1.0 + _TOLERANCE < divisor < factor * (1.0 - _TOLERANCE)
    ]
    if len(ramp) < 2:
        return None
    (x0, y0), (x1, y1) = ramp[0], ramp[-1]
    slope = (y1 - y0) / (x1 - x0)
    if slope <= 0:
        return None
    span = _USUAL_ORIGINAL / slope
    low = (slope * x0 - y0) * span
    return Llama3Rope(factor, _rounded(low), _rounded(low + span), _USUAL_ORIGINAL)


def _matches(scaling: Llama3Rope, divisors: Sequence[float], theta: float, head_dim: int) -> bool:
    actual = llama3_divisors(scaling, theta, head_dim)
    return all(abs(value - expected) <= _TOLERANCE * expected for value, expected in zip(actual, divisors, strict=True))


def _rounded(value: float) -> float:
    """Rounds a value that is close to two decimals. The tensor is float32, so 31.999998 was 32."""
    rounded = round(value, 2)
    return rounded if abs(rounded - value) <= _TOLERANCE * abs(value) else value
