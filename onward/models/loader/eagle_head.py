"""A folder with EAGLE's draft layer for a Llama, checked by name and shape: `config.json`, and in safetensors

    fc.weight [hidden, 2 * hidden]
    fc.bias                           optional
    layers.0.*                        named as a Llama's layer, mostly without the norm before attention

Embedding and head are the served model's; an `embed_tokens.weight` in the folder is a copy of its embedding and not
read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onward.errors import StartupError
from onward.models.loader import checkpoint
from onward.models.loader.bounded_read import read_json
from onward.models.loader.config_parser import from_hf
from onward.models.loader.safetensors_file import MappedTensors
from onward.models.loader.safetensors_header import FLOAT_TYPES, read_header
from onward.models.loader.weight_conversion import Float32Tensors
from onward.models.tensor_names import Shape, expected_layer
from onward.proto.model import ModelConfig

_OPTIONAL = ("fc.bias", "layers.0.input_layernorm.weight")
_NOT_READ = ("embed_tokens.weight",)


@dataclass(frozen=True, slots=True)
class EagleHead:
    config: ModelConfig
    """Config of a model with this one layer."""
    tensors: Mapping[str, np.ndarray]
    """float32, made at each access."""


def read_eagle_head(folder: Path) -> EagleHead:
    if not (folder / "config.json").is_file():
        raise StartupError(f"{folder} is not a folder with a draft layer: it has no config.json")
    config = from_hf(read_json(folder / "config.json"))
    if config.num_layers != 1:
        raise StartupError(f"{folder}: config.json says num_hidden_layers {config.num_layers}; a draft layer is 1")
    files = checkpoint.weight_files(folder)
    stored = {name: location for file in files for name, location in read_header(file).items()}
    names = _check({name: location.shape for name, location in stored.items()}, config, folder)
    for name in names:
        checkpoint.check_type(stored[name], name, FLOAT_TYPES)
    return EagleHead(config, Float32Tensors(MappedTensors(files), names))


def expected(config: ModelConfig) -> dict[str, Shape]:
    """Returns all tensors that such a folder may have, with their shapes."""
    hidden = config.hidden_size
    return {"fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,)} | {
        f"layers.0.{name}": shape for name, shape in expected_layer(config).items()
    }


def _check(shapes: Mapping[str, Shape], config: ModelConfig, folder: Path) -> list[str]:
    """Checks the tensors and returns the names of those to read."""
    expected_shapes = expected(config)
    if missing := [name for name in expected_shapes if name not in shapes and name not in _OPTIONAL]:
        raise StartupError(f"{folder} lacks {', '.join(missing)}; a draft layer has fc.* and layers.0.*")
    if extra := [name for name in shapes if name not in expected_shapes and name not in _NOT_READ]:
        raise StartupError(f"{folder} has {', '.join(extra[:4])}, which a draft layer of this config does not")
    for name in (names := [name for name in expected_shapes if name in shapes]):
        if shapes[name] != expected_shapes[name]:
            shape, expected_shape = list(shapes[name]), list(expected_shapes[name])
            raise StartupError(f"{folder}: {name} has the shape {shape}, expected {expected_shape}")
    return names
