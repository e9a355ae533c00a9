"""Arrays by name in anonymous memory that all ranks of a group map. It ends with the last process that maps it."""

import math
import mmap
import os
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from onward.models.layers.step_arrays import Shape
from onward.proto.rank import SHARED_ARRAYS_FILE, SharedArraySpec


class SharedArrays:
    """Rank 0's arrays: it allocates them."""

    def __init__(self) -> None:
        self.specs: dict[str, SharedArraySpec] = {}
        self.fd = os.memfd_create(SHARED_ARRAYS_FILE, os.MFD_CLOEXEC)
        self._num_bytes = 0
        weakref.finalize(self, os.close, self.fd)

    def zeros(self, name: str, shape: Shape, dtype: Any) -> np.ndarray:
        assert name not in self.specs, f"the name {name} is used once"
        sizes = shape if isinstance(shape, tuple) else (shape,)
        spec = self.specs[name] = SharedArraySpec(self._num_bytes, sizes, np.dtype(dtype).str)
        self._num_bytes += -(-_num_bytes(spec) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        os.ftruncate(self.fd, self._num_bytes)
        return _map(self.fd, spec)


class AttachedArrays:
    """The same arrays in another rank."""

    def __init__(self, fd: int, specs: Mapping[str, SharedArraySpec]) -> None:
        """Takes over the file descriptor."""
        self._fd, self._specs = fd, specs
        weakref.finalize(self, os.close, fd)

    def zeros(self, name: str, shape: Shape, dtype: Any) -> np.ndarray:
        """Returns the array that rank 0 has allocated under this name."""
        sizes = shape if isinstance(shape, tuple) else (shape,)
        spec = self._specs[name]
        assert (spec.shape, spec.dtype) == (sizes, np.dtype(dtype).str), f"all ranks have the same {name}"
        return self.attach(name)

    def attach(self, name: str) -> np.ndarray:
        return _map(self._fd, self._specs[name])


def _num_bytes(spec: SharedArraySpec) -> int:
    return math.prod(spec.shape) * np.dtype(spec.dtype).itemsize


def _map(fd: int, spec: SharedArraySpec) -> np.ndarray:
    if not _num_bytes(spec):
        return np.zeros(spec.shape, spec.dtype)
    memory = mmap.mmap(fd, _num_bytes(spec), offset=spec.offset)
    return np.frombuffer(memory, spec.dtype).reshape(spec.shape)
