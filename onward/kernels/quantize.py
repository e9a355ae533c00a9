"""Turns a checkpoint into the arrays that the int8 kernels use. They are written once, and mapped from then on.

Matrices that share their input become one. Gate and up alternate in tiles of sixteen outputs, so that one pass of the
kernel has both factors that it multiplies. A tied embedding is stored once, packed, for the lookup and the head.
Matrices in blocks keep their bits where that is possible; all others are floats, and are quantized.
"""

from collections.abc import Iterator, Mapping
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np

from onward.kernels.block_packing import pack_blocks
from onward.kernels.weight_formats import TILE
from onward.kernels.weight_packing import pack
from onward.proto.model import Experts, ModelConfig

MATRIX_SEGMENTS = 3
"""The most segments of a matrix: q, k and v."""


class BlockMatrix(NamedTuple):
    """A matrix in the blocks of its checkpoint."""

    format_name: str
    rows: np.ndarray
    """uint8 [outputs, bytes]."""


Blocks = Mapping[str, BlockMatrix]
_NO_BLOCKS: Blocks = {}


def quantize_model(
    config: ModelConfig, tensors: Mapping[str, np.ndarray], blocks: Blocks = _NO_BLOCKS
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields named arrays exactly as `models.layers.int8_layers` reads them. `tensors` are float32, by their canonical
    names. The offset of norms and the multiplier of residuals become part of the weights. `blocks` has the matrices
    that keep their bits, by the same names, heads padded."""
    yield "embed", _packed("model.embed_tokens.weight", tensors, blocks)
    if config.learned_positions:
        yield "positions", tensors["model.position_embeddings.weight"]
    for layer in range(config.num_layers):
        quantizer = _LayerQuantizer(config, tensors, blocks, f"model.layers.{layer}.")
        for name, array in chain(quantizer.attention(), quantizer.mlp(config.layer_experts(layer))):
            yield f"layers.{layer}.{name}", array
    yield "norm", _offset(tensors["model.norm.weight"], config)
    if config.norm_bias:
        yield "norm_bias", tensors["model.norm.bias"]
    if not config.tie_word_embeddings:
        yield "head", _packed("lm_head.weight", tensors, blocks)


def segments_of(weights: Mapping[str, np.ndarray], name: str) -> list[np.ndarray]:
    """Returns the segments of a matrix: `name`, `name.1` and so on. It has several if its outputs are not all in one
    format."""
    names = [name, *(f"{name}.{index}" for index in range(1, MATRIX_SEGMENTS))]
    return [weights[part] for part in names if part in weights]


def _packed(name: str, tensors: Mapping[str, np.ndarray], blocks: Blocks) -> np.ndarray:
    found = blocks.get(name)
    return pack(tensors[name]) if found is None else pack_blocks(found.format_name, found.rows, name)


def _offset(weight: np.ndarray, config: ModelConfig) -> np.ndarray:
    return weight + np.float32(config.norm_weight_offset) if config.norm_weight_offset else weight


Named = Iterator[tuple[str, np.ndarray]]


class _LayerQuantizer:
    def __init__(self, config: ModelConfig, tensors: Mapping[str, np.ndarray], blocks: Blocks, prefix: str) -> None:
        self._config, self._tensors, self._blocks, self._prefix = config, tensors, blocks, prefix
        self._residual = config.residual_multiplier

    def attention(self) -> Named:
        config = self._config
        yield from self._norm("input_norm", "input_layernorm", config.pre_norm)
        for index, array in enumerate(self._qkv()):
            yield f"qkv.{index}" if index else "qkv", array
        if config.qkv_bias:
            yield "qkv_bias", self._joined("bias")
        if config.qk_norm:
            yield "q_norm", _offset(self._get("self_attn.q_norm.weight"), config)
            yield "k_norm", _offset(self._get("self_attn.k_norm.weight"), config)
        if config.attention_sinks:
            yield "sinks", self._get("self_attn.sinks")
        yield from self._output("o", "self_attn.o_proj", config.o_bias)
        yield from self._norm("out_norm", "attention_output_norm", config.post_norm, self._residual)

    def mlp(self, experts: Experts | None) -> Named:
        config = self._config
        yield from self._norm("post_norm", "post_attention_layernorm", config.pre_norm)
        if experts is None:
            yield from self._one_mlp("", "mlp")
        else:
            yield from self._experts(experts)
        yield from self._norm("mlp_norm", "mlp_output_norm", config.post_norm, self._residual)

    def _experts(self, experts: Experts) -> Named:
        """Yields the arrays of a layer's experts. The expert router stays float32: a rounded score can choose another
        expert."""
        yield "router", self._get("mlp.router.weight")
        if experts.router_bias:
            yield "router_bias", self._get("mlp.router.bias")
        if experts.selection_bias:
            yield "selection_bias", self._get("mlp.router.selection_bias")
        for expert in range(experts.num_experts):
            yield from self._one_mlp(f"experts.{expert}.", f"mlp.experts.{expert}")
        if experts.shared_intermediate_size is not None:
            yield from self._one_mlp("", "mlp.shared_expert")
            if experts.shared_is_gated:
                yield "shared_gate", self._get("mlp.shared_expert_gate.weight")[0]

    def _one_mlp(self, name: str, source: str) -> Named:
        """Yields the arrays of an MLP or an expert, with names that begin with `name`."""
        config = self._config
        if config.gated_mlp:
            yield f"{name}gate_up", self._gate_up(source)
        else:
            yield f"{name}gate_up", _packed(f"{self._prefix}{source}.up_proj.weight", self._tensors, self._blocks)
        if config.mlp_bias:
            bias = self._get(f"{source}.up_proj.bias")
            if config.gated_mlp:
                bias = interleave_gate_up(self._get(f"{source}.gate_proj.bias")[:, None], bias[:, None])[:, 0]
            yield f"{name}gate_up_bias", np.ascontiguousarray(bias)
        yield from self._output(f"{name}down", f"{source}.down_proj", config.mlp_bias)

    def _get(self, name: str) -> np.ndarray:
        return self._tensors[self._prefix + name]

    def _qkv(self) -> Iterator[np.ndarray]:
        """Yields the segments of q, k and v. Neighbours in one format become one array."""
        names = [f"{self._prefix}self_attn.{part}_proj.weight" for part in "qkv"]
        stored = [(name, self._blocks.get(name)) for name in names]
        for format_name, run in groupby(stored, key=lambda part: None if part[1] is None else part[1].format_name):
            parts = list(run)
            if format_name is None:
                yield pack(np.concatenate([self._tensors[name] for name, _ in parts]))
            else:
                rows = np.concatenate([found.rows for _, found in parts if found is not None])
                yield pack_blocks(format_name, rows, " or ".join(name for name, _ in parts))

    def _gate_up(self, source: str) -> np.ndarray:
        """Returns gate and up as one array. A pair of tiles has one format, so both keep their bits only if they have
        the same."""
        names = [f"{self._prefix}{source}.{part}_proj.weight" for part in ("gate", "up")]
        gate, up = (self._blocks.get(name) for name in names)
        if gate is not None and up is not None and gate.format_name == up.format_name:
            return pack_blocks(gate.format_name, interleave_gate_up(gate.rows, up.rows), " or ".join(names))
        return pack(interleave_gate_up(*(self._tensors[name] for name in names)))

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
        """Yields a matrix whose product is added to the residual stream. The multiplier of residuals becomes part of
        it, unless a norm comes between."""
        factor = 1.0 if self._config.post_norm else self._residual
        full_name = f"{self._prefix}{source}.weight"
        if factor == 1:
            yield name, _packed(full_name, self._tensors, self._blocks)
        else:
            yield name, pack(self._tensors[full_name] * np.float32(factor))
        if has_bias:
            yield f"{name}_bias", self._get(f"{source}.bias") * np.float32(factor)


def interleave_gate_up(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Returns sixteen rows of gate, sixteen of up, and so on."""
    rows, inputs = gate.shape
    tiles = (rows // TILE, TILE, inputs)
    return np.stack([gate.reshape(tiles), up.reshape(tiles)], axis=1).reshape(2 * rows, inputs)
