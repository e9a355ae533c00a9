"""Where the tensors of a model's weights lie in one region of memory. The same for every process that serves the model."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from onward.models.layers.device.model_weights import ModelWeights, allocate
from onward.proto.model import PreparedModel

_ALIGNMENT = 256
"""Of each tensor, as torch's own allocator aligns at least."""


class WeightsLayout:
    def __init__(self, model: PreparedModel, dtype: torch.dtype) -> None:
        self._template = allocate(model.config, dtype, "meta")
        if model.quantization == "fp8":
            self._template.quantize_to_fp8()
        self._offsets: dict[int, int] = {}
        """By the identity of the template's tensor: a tensor that is used in two places is stored once."""
        self.num_bytes = 0
        for tensor in tensors_of(self._template):
            if id(tensor) not in self._offsets:
                self._offsets[id(tensor)] = self.num_bytes
                self.num_bytes += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT

    def weights_in(self, memory: torch.Tensor) -> ModelWeights:
        """The weights as views of this memory (uint8), whatever is in it."""
        assert len(memory) == self.num_bytes, "the memory has the size of the weights"

        def view(tensor: torch.Tensor) -> torch.Tensor:
            start = self._offsets[id(tensor)]
            return memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

        return _map_tensors(self._template, view)


def tensors_of(weights: ModelWeights) -> Iterator[torch.Tensor]:
    """All of them, in a fixed order; one that is used in two places comes twice."""
    found: list[torch.Tensor] = []
    _map_tensors(weights, lambda tensor: found.append(tensor) or tensor)
    yield from found


def _map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of the structure with each tensor replaced."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: _map_tensors(getattr(value, name), function) for name in names})
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(one, function) for one in value)
    return value
