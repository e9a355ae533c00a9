"""Tables of cosines and sines for rotary embeddings, one row per position.

numpy chooses its code for `cos`, `sin` and `**` by the vector instructions of the CPU, and the last bits of the results
differ. A table is a part of the model and must be the same on every machine, also if it is copied to a GPU. So it is
computed with single additions, multiplications and divisions, which IEEE 754 rounds alike everywhere, and with decimal
arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onward.models.layers.decimal_power import power
from onward.models.rope_scaling import rope_factors
from onward.proto.model import ModelConfig

_ROWS_AT_ONCE = 1024
"""Positions that are computed at a time. Their float64 intermediates take a few megabytes, which stay in the cache."""

_QUARTER_HIGH, _QUARTER_LOW = 1.57079632673412561417, 6.07710050650619224932e-11
"""pi / 2 in two parts. The first has 33 bits, so that its product with a number below 2 ** 20 is exact."""
_SIN = (1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06,
        -1.98412698298579493134e-04, 8.33333333332248946124e-03, -1.66666666666666324348e-01)  # fmt: skip
_COS = (-1.13596475577881948265e-11, 2.08757232129817482790e-09, -2.75573143513906633035e-07,
        2.48015872894767294178e-05, -1.38888888888741095749e-03, 4.16666666666666019037e-02)  # fmt: skip
"""Minimax polynomials on [-pi/4, pi/4], highest power first: those of fdlibm, good to 2 ** -57."""


@dataclass(slots=True)
class RotaryTable:
    """Flat [max_model_len, head_dim / 2] float32."""

    cos: np.ndarray
    sin: np.ndarray

    @classmethod
    def build(
        cls,
        theta: float,
        head_dim: int,
        max_model_len: int,
        divisors: Sequence[float] | None,
        attention_factor: float = 1.0,
    ) -> "RotaryTable":
        """Computes the table for all positions below `max_model_len`. `head_dim` counts the rotated dimensions.
        `divisors` slow each frequency down (rope scaling)."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        frequencies = np.float32(1.0) / _powers(np.float32(theta), exponents)
        if divisors is not None:
            frequencies = (frequencies / np.array(divisors, np.float32)).astype(np.float32)
        cos, sin = np.empty((2, max_model_len, len(frequencies)), np.float32)
        for start in range(0, max_model_len, _ROWS_AT_ONCE):
            rows = slice(start, min(start + _ROWS_AT_ONCE, max_model_len))
            # Rounded to float32 before the cosine is taken, as the models were trained.
            angles = np.arange(rows.start, rows.stop, dtype=np.float32)[:, None] * frequencies[None, :]
            cos[rows], sin[rows] = _cos_and_sin(angles.astype(np.float64))
        if attention_factor != 1.0:
            cos *= np.float32(attention_factor)
            sin *= np.float32(attention_factor)
        return cls(cos.reshape(-1), sin.reshape(-1))


def build_rotary(config: ModelConfig, max_model_len: int, *, is_local: bool = False) -> RotaryTable:
    """Returns the table of layers whose `LayerKind.rope` is global, or of those whose rope is local."""
    theta, scaling = config.rope_theta, config.rope_scaling
    if is_local:
        assert config.local_rope_theta is not None, "a model with local rope says its theta"
        theta, scaling = config.local_rope_theta, config.local_rope_scaling
    factors = rope_factors(scaling, theta, config.rotated_dim, max_model_len)
    return RotaryTable.build(
        factors.theta, config.rotated_dim, max_model_len, factors.divisors, factors.attention_factor
    )


@dataclass(slots=True)
class RotaryTables:
    """The rotary tables of a model's layers."""

    everywhere: RotaryTable
    local: RotaryTable | None

    @classmethod
    def build(cls, config: ModelConfig, max_model_len: int) -> "RotaryTables":
        has_local = any(kind.rope == "local" for kind in config.layers)
        local = build_rotary(config, max_model_len, is_local=True) if has_local else None
        return cls(build_rotary(config, max_model_len), local)

    def of_layer(self, config: ModelConfig, layer: int) -> RotaryTable | None:
        """Returns the table of a layer; None if the layer rotates nothing."""
        kind = "none" if config.learned_positions else config.layer(layer).rope
        return {"global": self.everywhere, "local": self.local, "none": None}[kind]


def _powers(base: np.float32, exponents: np.ndarray) -> np.ndarray:
    return np.array([power(float(base), float(exponent)) for exponent in exponents], np.float32)


def _cos_and_sin(angles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the cosines and sines of angles (float64, from 0 on), with an error far below the last bit of float32."""
    quarters = np.rint(angles * (2.0 / np.pi))
    x = (angles - quarters * _QUARTER_HIGH) - quarters * _QUARTER_LOW
    square = x * x
    cos = 1.0 - 0.5 * square + square * square * _polynomial(_COS, square)
    sin = x + x * square * _polynomial(_SIN, square)
    turn = quarters.astype(np.int64) % 4
    is_odd = turn % 2 == 1
    turned_cos, turned_sin = np.where(is_odd, sin, cos), np.where(is_odd, cos, sin)
    return np.where((turn == 1) | (turn == 2), -turned_cos, turned_cos), np.where(turn >= 2, -turned_sin, turned_sin)


def _polynomial(coefficients: Sequence[float], x: np.ndarray) -> np.ndarray:
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total
