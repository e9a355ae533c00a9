"""A model with some of its layers left out: the simplest draft model with the same vocabulary as the whole model.

Nothing is trained. Each layer only adds to the residual stream, so with most layers kept the outputs are similar. How
few layers are enough depends on the model; small models need nearly all.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from onward.proto.model import ModelConfig

_LAYER = re.compile(r"(?P<before>(?:model\.)?layers\.)(?P<index>\d+)(?P<after>\..+)")


def every_nth(num_layers: int, n: int) -> list[int]:
    """Returns every n-th layer, from the first one on, because only the first layer was trained on embeddings as
    input."""
    return list(range(0, num_layers, n))


def all_but_every_nth(num_layers: int, n: int) -> list[int]:
    """Returns all layers but every n-th, and always the first and the last one: the first was trained on embeddings as
    input, and the head on the outputs of the last."""
    return [layer for layer in range(num_layers) if layer in (0, num_layers - 1) or layer % n != n // 2]


def thinned_config(config: ModelConfig, kept: Sequence[int]) -> ModelConfig:
    layers = tuple(config.layers[layer] for layer in kept) if config.layers else ()
    return msgspec.structs.replace(config, num_layers=len(kept), layers=layers)


class ThinnedTensors(Mapping[str, Any]):
    """A model's tensors, in floats or packed, with the kept layers renumbered."""

    def __init__(self, tensors: Mapping[str, Any], kept: Sequence[int]) -> None:
        self._tensors = tensors
        new_indices = {old_index: index for index, old_index in enumerate(kept)}
        self._old_names = {name: old for old in tensors if (name := _renamed(old, new_indices)) is not None}

    def __getitem__(self, name: str) -> Any:
        return self._tensors[self._old_names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._old_names)

    def __len__(self) -> int:
        return len(self._old_names)


def _renamed(name: str, new_indices: Mapping[int, int]) -> str | None:
    """Returns the name in the thinned model; None for a tensor of a layer that is left out."""
    if (match := _LAYER.fullmatch(name)) is None:
        return name
    index = new_indices.get(int(match["index"]))
    return None if index is None else f"{match['before']}{index}{match['after']}"
