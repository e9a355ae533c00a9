"""Describes a family of models: how its `config.json` becomes a `ModelConfig`, and how its checkpoints name the
tensors.

No family opens files. `models.families.registry` lists the families.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from onward.models.families.config_fields import ConfigFields
from onward.models.tensor_names import Shape
from onward.proto.model import ModelConfig

Pick = Callable[..., Any]


class TensorSource(NamedTuple):
    """Says how to read a canonical tensor from a checkpoint: the stored tensors that it needs, and how its array is
    made from them. It may be a part of one, transposed or dequantized."""

    name: str
    shape: Shape
    """Shape of the stored tensor."""
    pick: Pick | None = None
    """Returns the canonical array from the stored array and those of `others`; None: the stored array as it is."""
    others: tuple[tuple[str, Shape], ...] = ()
    """Names and shapes of more stored tensors that `pick` needs, such as scales."""
    pick_blocks: Pick | None = None
    """For tensors that are stored quantized: returns the format and the rows of a `kernels.quantize.BlockMatrix`, with the
    same weights as `pick`, from the same arrays."""


Locate = Callable[[str, Shape, ModelConfig], TensorSource]


def same_name(name: str, shape: Shape, config: ModelConfig) -> TensorSource:
    return TensorSource(name, shape)


@dataclass(frozen=True, slots=True)
class Family:
    """`locate` takes and returns names within a layer (`self_attn.q_proj.weight`), and whole names of tensors outside
    of layers."""

    architecture: str
    hf_name: str
    """Its name in `architectures` of `config.json`."""
    parse: Callable[[ConfigFields], dict[str, Any]]
    """Returns all fields of a `ModelConfig` except `architecture`."""
    locate: Locate = same_name
    """Returns the source of a canonical name and shape. The source has a name of the same kind."""
    layer_prefix: str = "model.layers."
    prefixes: tuple[str, ...] = ("",)
    """Possible prefixes of all names of a checkpoint except `lm_head.weight`. The first prefix with which the embedding
    is stored is used."""
    unserved: tuple[str, ...] = ()
    """Name prefixes of parts that are not served, such as those for images."""
    ignored: tuple[str, ...] = ()
    """Name suffixes of tensors that follow from the config, such as masks in old checkpoints."""
    other_layouts: tuple[Locate, ...] = ()
    """Further layouts, for checkpoints without the tensor that `locate` names."""
    has_draft_layers: bool = False
    """Checkpoints may have more layers than the config says, which predict several tokens. They are not read."""
    quantization_methods: tuple[str, ...] = ()
    """Values of `quantization_config.quant_method` whose tensors these layouts read."""
