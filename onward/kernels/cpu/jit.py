"""How kernels are compiled: numba, cached on disk, no fast-math.

The cache folder is named after the kernels' sources, since numba itself only looks at the file of the outermost function;
inside, numba keys by CPU. Fast-math stays off everywhere: the order of float operations is part of the result.
"""

import hashlib
from pathlib import Path
from typing import Any

import numba

from onward.config import cache_dir


def _source_hash() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


numba.config.CACHE_DIR = str(cache_dir() / "kernels" / _source_hash())  # pyright: ignore[reportAttributeAccessIssue]
numba.config.THREADING_LAYER = "omp"  # pyright: ignore[reportAttributeAccessIssue]


def kernel(function: Any) -> Any:
    """Called from Python; may use `prange`."""
    return numba.njit(cache=True, parallel=True, nogil=True, error_model="numpy")(function)


def serial_kernel(function: Any) -> Any:
    """Called from Python; runs on one thread."""
    return numba.njit(cache=True, nogil=True, error_model="numpy")(function)


def device(function: Any) -> Any:
    """Called from kernels only."""
    return numba.njit(nogil=True, error_model="numpy")(function)


def inlined(function: Any) -> Any:
    """Called from kernels only, and small enough to be part of its caller."""
    return numba.njit(nogil=True, error_model="numpy", forceinline=True)(function)
