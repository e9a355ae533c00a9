"""A small int8 model whose matrices keep the bits of every block format."""

from collections.abc import Iterator, Mapping
from itertools import cycle

import msgspec
import numpy as np

from onward.kernels.quantize import BlockMatrix, quantize_model
from onward.kernels.weight_formats import FORMATS
from onward.models.loader.dummy_weights import DummyWeights
from onward.models.tensor_names import expected_tensors
from onward.proto.model import Experts, ModelConfig
from tests.kernels.block_weights import lively_rows

CONFIG = ModelConfig(
    architecture="llama", vocab_size=97, hidden_size=256, intermediate_size=512, num_layers=3, num_heads=6, num_kv_heads=2,
    head_dim=128, max_position_embeddings=2048, rms_norm_eps=1e-5, rope_theta=10_000.0, tie_word_embeddings=False,
)  # fmt: skip

EXPERTS = msgspec.structs.replace(CONFIG, architecture="qwen3moe", num_layers=2, experts=Experts(6, 3, 256))


def block_formats(config: ModelConfig = CONFIG) -> dict[str, str]:
    """The format of each matrix: every one in turn, and gate and up alike."""
    names: Iterator[str] = cycle(FORMATS)
    formats: dict[str, str] = {}
    for name, shape in expected_tensors(config).items():
        if len(shape) == 2:
            formats[name] = formats[name.replace("up_proj", "gate_proj")] if "up_proj" in name else next(names)
    return formats


def blocks(config: ModelConfig = CONFIG) -> Mapping[str, BlockMatrix]:
    shapes = expected_tensors(config)
    return {
        name: BlockMatrix(kind, lively_rows(kind, *shapes[name], seed=index))
        for index, (name, kind) in enumerate(block_formats(config).items())
    }


def arrays(config: ModelConfig = CONFIG) -> dict[str, np.ndarray]:
    return dict(quantize_model(config, DummyWeights(config), blocks(config)))
