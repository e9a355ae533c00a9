"""From a float checkpoint to the arrays that the int8 kernels use, to be written once and mapped ever after.

Matrices that share their input become one. Gate and up alternate in tiles of sixteen outputs, so that one pass of the
kernel holds both halves of what it multiplies. A tied embedding is stored once, packed, for the lookup and the head.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from onward.kernels.weight_packing import TILE, pack
from onward.proto.model import ModelConfig

SCHEME = "int8-g32-v1"
"""Int8 activations with a scale per row and 32 inputs, weights likewise (or exact 4-bit grids); the layout included."""


def quantize_model(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Float32 tensors by their Hugging Face names in; named arrays, exactly as `models.layers.int8_layers` reads them,
    out."""
    yield "embed", pack(tensors["model.embed_tokens.weight"])
    for layer in range(config.num_layers):
        for name, array in _quantize_layer(config, tensors, f"model.layers.{layer}."):
            yield f"layers.{layer}.{name}", array
    yield "norm", tensors["model.norm.weight"]
    if not config.tie_word_embeddings:
        yield "head", pack(tensors["lm_head.weight"])


def _quantize_layer(
    config: ModelConfig, tensors: Mapping[str, np.ndarray], prefix: str
) -> Iterator[tuple[str, np.ndarray]]:
    def joined(kind: str) -> np.ndarray:
        return np.concatenate([tensors[f"{prefix}self_attn.{part}_proj.{kind}"] for part in "qkv"])

    yield "input_norm", tensors[prefix + "input_layernorm.weight"]
    yield "qkv", pack(joined("weight"))
    if config.qkv_bias:
        yield "qkv_bias", joined("bias")
    if config.qk_norm:
        yield "q_norm", tensors[prefix + "self_attn.q_norm.weight"]
        yield "k_norm", tensors[prefix + "self_attn.k_norm.weight"]
    yield "o", pack(tensors[prefix + "self_attn.o_proj.weight"])
    yield "post_norm", tensors[prefix + "post_attention_layernorm.weight"]
    yield (
        "gate_up",
        pack(interleave_gate_up(tensors[prefix + "mlp.gate_proj.weight"], tensors[prefix + "mlp.up_proj.weight"])),
    )
    yield "down", pack(tensors[prefix + "mlp.down_proj.weight"])


def interleave_gate_up(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Sixteen rows of gate, sixteen of up, and so on."""
    rows, inputs = gate.shape
    tiles = (rows // TILE, TILE, inputs)
    return np.stack([gate.reshape(tiles), up.reshape(tiles)], axis=1).reshape(2 * rows, inputs)
