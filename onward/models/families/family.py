"""What a family of models is: how its `config.json` becomes a `ModelConfig`, and how its checkpoints name the tensors.

Neither knows files. `models.families.registry` lists the families.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from onward.models.families.config_fields import ConfigFields
from onward.models.tensor_names import Shape
from onward.proto.model import ModelConfig

Pick = Callable[[Any], Any]


class TensorSource(NamedTuple):
    """Where a canonical tensor is in a checkpoint: all of a stored tensor, or a part of it."""

    name: str
    shape: Shape
    """Of the stored tensor."""
    pick: Pick | None = None
    """From the stored array to the canonical one; None: as it is."""


def same_name(name: str, shape: Shape, config: ModelConfig) -> TensorSource:
    return TensorSource(name, shape)


@dataclass(frozen=True, slots=True)
class Family:
    """`locate` gets and gives names within a layer (`self_attn.q_proj.weight`), and whole ones of what is outside."""

    architecture: str
    hf_name: str
    """In `architectures` of `config.json`."""
    parse: Callable[[ConfigFields], dict[str, Any]]
    """The fields of a `ModelConfig`, but `architecture`."""
    locate: Callable[[str, Shape, ModelConfig], TensorSource] = same_name
    """From a canonical name and shape to its source, which has a name of the same kind."""
    layer_prefix: str = "model.layers."
    prefixes: tuple[str, ...] = ("",)
    """Before all names of a checkpoint but `lm_head.weight`; the first whose embedding is there counts."""
    unserved: tuple[str, ...] = ()
    """Beginnings of names of parts that are not served, such as those for images."""
    ignored: tuple[str, ...] = ()
    """Ends of names of what follows from the config: old checkpoints store masks."""
