"""Opens a prepared model's weights for the worker: mapped arrays by canonical name, read when they are touched.

Tensors come in the type in which they are stored (a float checkpoint that is used as it is may hold another one than
`PreparedModel.dtype`; whoever builds the model converts). torch is imported only if something is stored in bfloat16.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.models.loader.dummy_weights import DummyWeights
from onward.models.loader.safetensors_file import Array, BFloat16Bits, CanonicalTensors, MappedTensors
from onward.proto.model import PreparedModel

if TYPE_CHECKING:
    import torch

    Tensor = np.ndarray | torch.Tensor


def open_weights(model: PreparedModel) -> "Mapping[str, Tensor]":
    """Quantized models have the names that `kernels.quantize` gave; others exactly those of `expected_tensors`."""
    if not model.weights:
        return DummyWeights(model.config)
    tensors = MappedTensors(Path(model.folder) / file for file in model.weights)
    return _Weights(tensors if model.quantization == "int8" else CanonicalTensors(tensors, model.config))


class _Weights(Mapping[str, Any]):
    def __init__(self, tensors: Mapping[str, Array]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> "Tensor":
        array = self._tensors[name]
        return _to_torch(array) if isinstance(array, BFloat16Bits) else array

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _to_torch(array: BFloat16Bits) -> "torch.Tensor":
    import torch

    return torch.from_numpy(array.bits).view(torch.bfloat16)
