"""How long a draft takes, in the time that one more row of the served model's pass would take.

A guess of its making, from the numbers of weights: a pass reads them all, whoever's they are. What nobody else drafts
along with is the dearest, and is what is told: it is better to draft too little than to be slower than without.
"""

import math

from onward.models.names import expected_layer
from onward.proto.model import ModelConfig

_ROWS_OF_A_PASS = 5.0
"""A pass over one row takes as long as so many rows that are added to one. Measured with int8 on two cores."""


def of_model(draft: ModelConfig, served: ModelConfig) -> float:
    return _ROWS_OF_A_PASS * _weights(draft) / _weights(served)


def of_float_layer(layer: ModelConfig, served: ModelConfig, *, served_is_int8: bool) -> float:
    """One layer in float32, between the served model's ends."""
    own = _layer_weights(layer) * (4 if served_is_int8 else 1)
    return _ROWS_OF_A_PASS * (own + _head_weights(served)) / _weights(served)


def _weights(config: ModelConfig) -> int:
    """That a pass multiplies with."""
    return config.num_layers * _layer_weights(config) + _head_weights(config)


def _layer_weights(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in expected_layer(config).values())


def _head_weights(config: ModelConfig) -> int:
    return config.vocab_size * config.hidden_size
