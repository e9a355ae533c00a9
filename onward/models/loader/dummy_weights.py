"""Random weights for `--load-format dummy`: the right shapes without a download, and the same in every process."""

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np

from onward.models.tensor_names import expected_tensors
from onward.proto.model import ModelConfig

VERSION = "dummy-1"
"""Stands for the hash of the weights. Raised when the values change."""

_SCALE = 0.02


class DummyWeights(Mapping[str, np.ndarray]):
    """Each tensor is a function of its name and shape, computed at each access."""

    def __init__(self, config: ModelConfig) -> None:
        self._shapes = expected_tensors(config)

    def __getitem__(self, name: str) -> np.ndarray:
        shape = self._shapes[name]
        seed = int.from_bytes(hashlib.sha256(f"{VERSION} {name}".encode()).digest()[:8], "little")
        values = np.random.Generator(np.random.Philox(seed)).standard_normal(shape, dtype=np.float32)
        values *= np.float32(_SCALE)
        if name.endswith("norm.weight"):
            values += np.float32(1.0)
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)
