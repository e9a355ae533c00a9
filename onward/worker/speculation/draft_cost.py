"""Estimates the time of a draft, as a share of the time of a pass of the served model.

The estimate compares numbers of weights: with few rows, a pass takes as long as it takes to read all weights.
"""

import math

from onward.models.tensor_names import expected_layer
from onward.proto.model import ModelConfig


def of_model(draft: ModelConfig, served: ModelConfig) -> float:
    return _weights(draft) / _weights(served)


def of_float_layer(layer: ModelConfig, served: ModelConfig, *, served_is_int8: bool) -> float:
    """Returns the cost of one layer in float32 that uses the served model's embedding and head."""
    own = _layer_weights(layer) * (4 if served_is_int8 else 1)
    return (own + _head_weights(served)) / _weights(served)


def _weights(config: ModelConfig) -> int:
    """Returns the number of weights that a pass multiplies with."""
    return sum(_layer_weights(config, layer) for layer in range(config.num_layers)) + _head_weights(config)


def _layer_weights(config: ModelConfig, layer: int = 0) -> int:
    """Returns the number of weights of a layer. Of the experts, only as many count as one token gets."""
    shapes, experts = expected_layer(config, layer), config.layer_experts(layer)
    if experts is None:
        return sum(map(math.prod, shapes.values()))
    of_experts = sum(math.prod(shape) for name, shape in shapes.items() if ".experts." in name)
    return sum(map(math.prod, shapes.values())) - of_experts + of_experts * experts.top_k // experts.num_experts


def _head_weights(config: ModelConfig) -> int:
    return config.vocab_size * config.hidden_size
