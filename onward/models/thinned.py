"""A model with some of its layers left out: the plainest small model of the same vocabulary, to draft for the whole one.

Nothing is trained. Each layer adds to what the others leave, so with most layers left it still speaks alike; how few are
enough is up to the model, and small ones need nearly all.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from onward.proto.model import ModelConfig

_LAYER = re.compile(r"(?P<before>(?:model\.)?layers\.)(?P<index>\d+)(?P<after>\..+)")


def every_nth(num_layers: int, n: int) -> list[int]:
    """From the first one on, which alone is used to embeddings."""
    return list(range(0, num_layers, n))


def all_but_every_nth(num_layers: int, n: int) -> list[int]:
    """Neither the first nor, for n above 2, the last is left out."""
    return [layer for layer in range(num_layers) if layer % n != n // 2]


def thinned_config(config: ModelConfig, kept: Sequence[int]) -> ModelConfig:
    layers = tuple(config.layers[layer] for layer in kept) if config.layers else ()
    return msgspec.structs.replace(config, num_layers=len(kept), layers=layers)


class ThinnedTensors(Mapping[str, Any]):
    """A model's tensors, in floats or packed, with the kept layers numbered anew."""

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
    """None for what is left out."""
    if (match := _LAYER.fullmatch(name)) is None:
        return name
    index = new_indices.get(int(match["index"]))
    return None if index is None else f"{match['before']}{index}{match['after']}"
