"""Small mixtures of experts as GGUF files store them: one model for each architecture, and weights in blocks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from onward.models.families.common_fields import yarn_magnitude
from onward.models.tensor_names import expected_tensors
from onward.proto.model import ClampedSwiglu, Experts, LayerKind, ModelConfig, YarnRope
from tests.kernels.block_weights import lively_rows
from tests.models.checkpoints import write_gguf

Raw = Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]
_WINDOW = 8


def _config(architecture: str, experts: Experts, **more: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 256, "intermediate_size": 512, "num_layers": 2, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 64, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    return ModelConfig(architecture=architecture, experts=experts, **(sizes | more))


CONFIGS = {
    "mixtral": _config("mixtral", Experts(4, 2, 256, renormalize=True)),
    "qwen2moe": _config("qwen2moe", Experts(6, 3, 256, shared_intermediate_size=512), qkv_bias=True),
    "qwen3moe": _config("qwen3moe", Experts(6, 3, 256, renormalize=True), qk_norm=True),
    "gptoss": _config(
        "gptoss", Experts(6, 3, 256, renormalize=True, router_bias=True), qkv_bias=True, o_bias=True, mlp_bias=True,
        attention_sinks=True, clamped_swiglu=ClampedSwiglu(1.702, 7.0), layers=(LayerKind(_WINDOW), LayerKind()),
        rope_scaling=YarnRope(4.0, 256, 32.0, 1.0, yarn_magnitude(4.0, 1.0), False),
    ),
}  # fmt: skip
"""By family. Rows have 256 inputs, as the formats of super-blocks need them."""


def tensors_of(config: ModelConfig) -> dict[str, np.ndarray]:
    """Random tensors: norms near one, and routers that are decisive."""
    generator = np.random.default_rng(5)
    tensors: dict[str, np.ndarray] = {}
    for name, shape in expected_tensors(config).items():
        values = generator.standard_normal(shape, dtype=np.float32)
        is_norm, scale = name.endswith("norm.weight"), 4.0 if ".router." in name else 1.5
        tensors[name] = 1 + 0.2 * values if is_norm else values * np.float32(scale * shape[-1] ** -0.5)
    return tensors


def blocks_of(config: ModelConfig, format_name: str) -> Raw:
    """Blocks of all matrices of experts."""
    kind = gguf.GGMLQuantizationType[format_name]
    shapes = {name: shape for name, shape in expected_tensors(config).items() if "experts." in name and len(shape) == 2}
    return {
        name: (lively_rows(format_name, *shape, seed=index), kind) for index, (name, shape) in enumerate(shapes.items())
    }


def write(path: Path, config: ModelConfig, format_name: str, **more: Any) -> dict[str, np.ndarray]:
    """Writes a file whose experts are in the format, and returns its tensors by canonical name, dequantized."""
    tensors, raw = tensors_of(config), blocks_of(config, format_name)
    write_gguf(path, config, tensors, raw=raw, **more)
    return tensors | {
        name: gguf.dequantize(rows, kind).reshape(tensors[name].shape) for name, (rows, kind) in raw.items()
    }
