"""How long a draft takes, as a share of what a pass of the served model takes.

Estimated from the numbers of weights: with few rows, a pass takes as long as it takes to read them all.
"""

import math

from onward.models.tensor_names import expected_layer
from onward.proto.model import ModelConfig


def of_model(draft: ModelConfig, served: ModelConfig) -> float:
    return _weights(draft) / _weights(served)


def of_float_layer(layer: ModelConfig, served: ModelConfig, *, served_is_int8: bool) -> float:
    """One layer in float32, between the served model's ends."""
    own = _layer_weights(layer) * (4 if served_is_int8 else 1)
    return (own + _head_weights(served)) / _weights(served)


def _weights(config: ModelConfig) -> int:
    """That a pass multiplies with."""
    return config.num_layers * _layer_weights(config) + _head_weights(config)


def _layer_weights(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in expected_layer(config).values())


def _head_weights(config: ModelConfig) -> int:
    return config.vocab_size * config.hidden_size
