"""What drafts for the default model at little cost: it says every token once more. Where a text repeats a word that is one
token, it is right; elsewhere it is wrong. Made of the model's own embedding, so that a token is likeliest to itself.
"""

from pathlib import Path

import msgspec
import numpy as np

from onward.config import DEFAULT_MODEL, cache_dir
from onward.models.loader.model_store import resolve_source
from onward.models.tensor_names import EMBED, FINAL_NORM, expected_tensors
from onward.proto.model import ModelConfig
from tests.models.checkpoints import write_folder
from tests.models.default_model import default_model
from tests.worker.speculation.plain_eagle import random_head, write_head

SURE = 30.0
"""Logits are so many times as large as they would be, so that it says the same at a temperature."""


def one_layer() -> ModelConfig:
    return msgspec.structs.replace(default_model("int8").config, num_layers=1)


def write_echo_model(folder: Path) -> Path:
    """For `draft:`. Its one layer adds nothing."""
    config = one_layer()
    tensors = {name: np.zeros(shape, np.float32) for name, shape in expected_tensors(config).items()}
    opened = resolve_source(
        DEFAULT_MODEL, with_weights=True, cache_dir=cache_dir(), progress=lambda message, part: None
    ).open()
    tensors[EMBED] = opened.open_weights().tensors[EMBED]
    tensors[FINAL_NORM][:] = SURE
    return write_folder(folder, config, tensors)


def write_echo_layer(folder: Path) -> Path:
    """For `eagle:`. Of [embedding; hidden] it takes the embedding."""
    config = one_layer()
    tensors = {name: np.zeros_like(array) for name, array in random_head(config, bias=False).items()}
    tensors["fc.weight"][:, : config.hidden_size] = SURE * np.eye(config.hidden_size, dtype=np.float32)
    return write_head(folder, config, tensors)
