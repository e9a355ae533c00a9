"""A tiny int8 model with made-up weights, for tests of the worker that do not care what it says."""

import functools
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from onward.kernels.quantize import quantize_model
from onward.models.loader.dummy_weights import DummyWeights
from onward.proto.model import ModelConfig
from tests.worker.driver import Driver, prepared

CONFIG = ModelConfig(
    architecture="llama", vocab_size=97, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=32, max_position_embeddings=256, rms_norm_eps=1e-5, rope_theta=10_000.0, tie_word_embeddings=True,
)  # fmt: skip


UNTIED = msgspec.structs.replace(CONFIG, tie_word_embeddings=False)


@functools.cache
def arrays(config: ModelConfig = CONFIG) -> dict[str, np.ndarray]:
    return dict(quantize_model(config, DummyWeights(config)))


def driver(config: ModelConfig = CONFIG, changes: Mapping[str, np.ndarray] | None = None, **settings: Any) -> Driver:
    """`changes` replace some of the weights."""
    defaults = {"num_kv_blocks": 64, "max_num_seqs": 8, "max_model_len": 128, "max_num_batched_tokens": 64}
    weights = arrays(config) | dict(changes or {})
    return Driver(prepared(config, quantization="int8"), weights, **(defaults | settings))
