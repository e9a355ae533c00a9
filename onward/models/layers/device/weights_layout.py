"""The layout of a model's weights in one region of memory. It is the same in every process that serves the model."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from onward.models.layers.device.model_weights import ModelWeights, allocate
from onward.proto.model import PreparedModel

_ALIGNMENT = 256
"""Alignment of each tensor in bytes; torch's own allocator aligns to at least this."""


class WeightsLayout:
    def __init__(self, model: PreparedModel, dtype: torch.dtype) -> None:
        self._template = allocate(model.config, dtype, "meta")
        if model.quantization == "fp8":
            self._template.quantize_to_fp8()
        self._offsets: dict[int, int] = {}
        """Offsets by the identity of the template's tensor: a tensor that is used in two places is stored once."""
        self.num_bytes = 0
        for tensor in tensors_of(self._template):
            if id(tensor) not in self._offsets:
                self._offsets[id(tensor)] = self.num_bytes
                self.num_bytes += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT

    @property
    def digest(self) -> str:
        """Hash of the name, type, shape and offset of each tensor. Processes of another version may have another layout of
        the same size."""
        described = "\n".join(
            f"{name} {tensor.dtype} {tuple(tensor.shape)} {self._offsets[id(tensor)]}"
            for name, tensor in _named_tensors(self._template, "")
        )
        return hashlib.blake2b(described.encode(), digest_size=16).hexdigest()

    def weights_in(self, memory: torch.Tensor) -> ModelWeights:
        """Returns the weights as views of this memory (uint8), whatever its contents."""
        assert len(memory) == self.num_bytes, "the memory has the size of the weights"

        def view(tensor: torch.Tensor) -> torch.Tensor:
            start = self._offsets[id(tensor)]
            return memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

        return _map_tensors(self._template, view)


def tensors_of(weights: ModelWeights) -> Iterator[torch.Tensor]:
    """Yields all tensors in a fixed order; a tensor that is used in two places comes twice."""
    for _, tensor in _named_tensors(weights, ""):
        yield tensor


def _named_tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _named_tensors(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _named_tensors(item, f"{name}.{index}")


def _map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns a copy of the structure in which each tensor is replaced by the function's result."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: _map_tensors(getattr(value, name), function) for name in names})
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(one, function) for one in value)
    return value
