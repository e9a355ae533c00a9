"""Opens a prepared model's weights for the worker: mapped arrays by name, whose pages are read when they are touched.

Tensors have the type in which they are stored. A float checkpoint that is used in place may have another type than
`PreparedModel.dtype`; the code that builds the model converts it. torch is imported only if a tensor is stored in
bfloat16.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.models.device_support import head_unit
from onward.models.head_padding import padded_config
from onward.models.loader.dummy_weights import DummyWeights
from onward.models.loader.int8_arrays import check_int8_arrays
from onward.models.loader.safetensors_file import Array, BFloat16Bits, CanonicalTensors, Float8Bits, MappedTensors
from onward.proto.model import PreparedModel

if TYPE_CHECKING:
    import torch

    Tensor = np.ndarray | torch.Tensor


def open_weights(model: PreparedModel) -> "Mapping[str, Tensor]":
    """Returns the weights by name. int8 models have the names of `kernels.quantize`, others exactly those of
    `expected_tensors`. Raises `StartupError` if an array of an int8 model has another size than the config says."""
    if not model.weights:
        return DummyWeights(model.config)
    tensors = MappedTensors(Path(model.folder) / file for file in model.weights)
    if model.quantization == "int8":
        check_int8_arrays(tensors.locations, padded_config(model.config, head_unit("int8")), model.folder)
    return _Weights(tensors if model.is_converted else CanonicalTensors(tensors, model.config))


class _Weights(Mapping[str, Any]):
    def __init__(self, tensors: Mapping[str, Array]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> "Tensor":
        array = self._tensors[name]
        assert not isinstance(array, Float8Bits), "such checkpoints are converted"
        return _to_torch(array) if isinstance(array, BFloat16Bits) else array

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _to_torch(array: BFloat16Bits) -> "torch.Tensor":
    import torch

    return torch.from_numpy(array.bits).view(torch.bfloat16)
