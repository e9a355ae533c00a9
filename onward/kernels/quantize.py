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
    """Float32 tensors by their canonical names in; named arrays, exactly as `models.layers.int8_layers` reads them,
    out. The offset of norms and the multiplier of residuals become part of the weights."""
    yield "embed", pack(tensors["model.embed_tokens.weight"])
    if config.learned_positions:
        yield "positions", tensors["model.position_embeddings.weight"]
    for layer in range(config.num_layers):
        quantizer = _LayerQuantizer(config, tensors, f"model.layers.{layer}.")
        for name, array in (*quantizer.attention(), *quantizer.mlp()):
            yield f"layers.{layer}.{name}", array
    yield "norm", _offset(tensors["model.norm.weight"], config)
    if config.norm_bias:
        yield "norm_bias", tensors["model.norm.bias"]
    if not config.tie_word_embeddings:
        yield "head", pack(tensors["lm_head.weight"])


def _offset(weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    return weight + np.float32(config.norm_weight_offset) if config.norm_weight_offset else weight


Named = Iterator[tuple[str, np.ndarray]]


class _LayerQuantizer:
    def __init__(self, config: ModelConfig, tensors: Mapping[str, np.ndarray], prefix: str) -> None:
        self._config, self._tensors, self._prefix = config, tensors, prefix
        self._residual = config.residual_multiplier

    def attention(self) -> Named:
        config = self._config
        yield from self._norm("input_norm", "input_layernorm", config.pre_norm)
        yield "qkv", pack(self._joined("weight"))
        if config.qkv_bias:
            yield "qkv_bias", self._joined("bias")
        if config.qk_norm:
            yield "q_norm", _offset(self._get("self_attn.q_norm.weight"), config)
            yield "k_norm", _offset(self._get("self_attn.k_norm.weight"), config)
        if config.attention_sinks:
            yield "sinks", self._get("self_attn.sinks")
        yield from self._output("o", "self_attn.o_proj", config.o_bias)
        yield from self._norm("out_norm", "attention_output_norm", config.post_norm, self._residual)

    def mlp(self) -> Named:
        config = self._config
        yield from self._norm("post_norm", "post_attention_layernorm", config.pre_norm)
        if config.gated_mlp:
            yield (
                "gate_up",
                pack(interleave_gate_up(*(self._get(f"mlp.{part}_proj.weight") for part in ("gate", "up")))),
            )
        else:
            yield "gate_up", pack(self._get("mlp.up_proj.weight"))
        if config.mlp_bias:
            up = self._get("mlp.up_proj.bias")
            if config.gated_mlp:
                up = interleave_gate_up(self._get("mlp.gate_proj.bias")[:, None], up[:, None])[:, 0]
            yield "gate_up_bias", np.ascontiguousarray(up)
        yield from self._output("down", "mlp.down_proj", config.mlp_bias)
        yield from self._norm("mlp_norm", "mlp_output_norm", config.post_norm, self._residual)

    def _get(self, name: str) -> np.ndarray:
        return self._tensors[self._prefix + name]

    def _joined(self, kind: str) -> np.ndarray:
        return np.concatenate([self._get(f"self_attn.{part}_proj.{kind}") for part in "qkv"])

    def _norm(self, name: str, source: str, exists: bool, factor: float = 1.0) -> Named:
        if not exists:
            return
        weight = _offset(self._get(f"{source}.weight"), self._config)
        yield name, weight if factor == 1 else weight * np.float32(factor)
        if self._config.norm_bias:
            yield f"{name}_bias", self._get(f"{source}.bias") * np.float32(factor)

    def _output(self, name: str, source: str, has_bias: bool) -> Named:
        """A product whose result goes to the residual stream, times a factor unless a norm comes between."""
        factor = 1.0 if self._config.post_norm else self._residual
        weight = self._get(f"{source}.weight")
        yield name, pack(weight if factor == 1 else weight * np.float32(factor))
        if has_bias:
            yield f"{name}_bias", self._get(f"{source}.bias") * np.float32(factor)


def interleave_gate_up(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Sixteen rows of gate, sixteen of up, and so on."""
    rows, inputs = gate.shape
    tiles = (rows // TILE, TILE, inputs)
    return np.stack([gate.reshape(tiles), up.reshape(tiles)], axis=1).reshape(2 * rows, inputs)
