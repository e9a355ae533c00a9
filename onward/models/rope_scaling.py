"""Scaled rope as numbers: theta, one divisor per frequency, and a factor of the cosines and sines.

Some kinds depend on the length of the text. Here they depend on `max_model_len` alone, which is chosen once at the
start. If a request's own length decided, the keys of a resumed stream would differ from those of its first attempt.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from onward.models.layers.decimal_power import log, power
from onward.proto.model import DynamicRope, LinearRope, Llama3Rope, LongRope, RopeScaling, YarnRope


class RopeFactors(NamedTuple):
    theta: float
    divisors: Sequence[float] | None
    """A divisor for each of the `dim / 2` frequencies; None: all are one."""
    attention_factor: float
    """Factor of cosines and sines."""


def rope_factors(scaling: RopeScaling | None, theta: float, dim: int, max_model_len: int) -> RopeFactors:
    """Returns the numbers of a scaled rope. `dim` is the number of rotated dimensions of a head."""
    match scaling:
        case None:
            return RopeFactors(theta, None, 1.0)
        case LinearRope():
            return RopeFactors(theta, [scaling.factor] * (dim // 2), 1.0)
        case DynamicRope():
            return RopeFactors(_dynamic_theta(scaling, theta, dim, max_model_len), None, 1.0)
        case Llama3Rope():
            return RopeFactors(theta, llama3_divisors(scaling, theta, dim), 1.0)
        case YarnRope():
            return RopeFactors(theta, _yarn_divisors(scaling, theta, dim), scaling.attention_factor)
        case LongRope():
            is_long = max_model_len > scaling.original_max_position_embeddings
            divisors = scaling.long_factor if is_long else scaling.short_factor
            assert len(divisors) == dim // 2, "the parser has checked that there is a factor for each frequency"
            return RopeFactors(theta, divisors, scaling.attention_factor)


def length_choice(scaling: RopeScaling | None, max_model_len: int) -> str:
    """Returns what `max_model_len` decides about the rope, or an empty string if it has no effect. Keys of two servers
    agree only if this is equal."""
    match scaling:
        case DynamicRope():
            return f"dynamic:{max(max_model_len, scaling.original_max_position_embeddings)}"
        case LongRope():
            return "longrope:long" if max_model_len > scaling.original_max_position_embeddings else "longrope:short"
        case _:
            return ""


def llama3_divisors(scaling: Llama3Rope, theta: float, dim: int) -> list[float]:
    """Returns by how much each frequency of the rope is divided in Llama 3's scaling:

    wavelength:  short ------- original/high ------ original/low ------- long
    divisor:          1              ramp                    factor
    """
    divisors: list[float] = []
    for i in range(dim // 2):
        turns = scaling.original_max_position_embeddings / wavelength(theta, dim, i)
        smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = min(1.0, max(0.0, smooth))
        divisors.append(1.0 / ((1.0 - smooth) / scaling.factor + smooth))
    return divisors


def _dynamic_theta(scaling: DynamicRope, theta: float, dim: int, max_model_len: int) -> float:
    original = scaling.original_max_position_embeddings
    stretch = scaling.factor * max(max_model_len, original) / original - (scaling.factor - 1)
    return theta * power(stretch, dim / (dim - 2))


def _yarn_divisors(scaling: YarnRope, theta: float, dim: int) -> list[float]:
    """Returns by how much each frequency of the rope is divided in YaRN:

        dimension:  0 -------- low -------- high -------- dim / 2
        divisor:            1          ramp          factor

    `low` makes `beta_fast` turns within the original length, `high` makes `beta_slow`.
    """
    low, high = (_yarn_dimension(scaling, theta, dim, beta) for beta in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = [min(1.0, max(0.0, (i - low) / (high - low))) for i in range(dim // 2)]
    return [1.0 / (x / scaling.factor + (1.0 - x)) for x in ramp]


def _yarn_dimension(scaling: YarnRope, theta: float, dim: int, turns: float) -> float:
    return dim * log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * log(theta))


def wavelength(theta: float, dim: int, i: int) -> float:
    return 2.0 * math.pi * power(theta, 2.0 * i / dim)
