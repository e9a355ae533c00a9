"""Tables of cosines and sines for rotary embeddings, one row per position."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class RotaryTable:
    """Flat [max_model_len, head_dim / 2] float32."""

    cos: np.ndarray
    sin: np.ndarray

    @classmethod
    def build(cls, theta: float, head_dim: int, max_model_len: int, divisors: Sequence[float] | None) -> "RotaryTable":
        """`divisors` slow each frequency down (rope scaling)."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        frequencies = (1.0 / np.float32(theta) ** exponents).astype(np.float32)
        if divisors is not None:
            frequencies = (frequencies / np.array(divisors, np.float32)).astype(np.float32)
        angles = np.arange(max_model_len, dtype=np.float32)[:, None] * frequencies[None, :]
        return cls(np.cos(angles).reshape(-1), np.sin(angles).reshape(-1))
