"""How exactness is counted: by elements whose bits differ."""

import numpy as np


def differing(mine: np.ndarray, other: np.ndarray) -> int:
    assert mine.shape == other.shape and mine.dtype == other.dtype
    bits = f"u{mine.dtype.itemsize}"
    return int((mine.view(bits) != other.view(bits)).sum())
