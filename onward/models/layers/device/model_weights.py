"""A model's weights on a device, as its products read them: matrices that share an input are one.

Filled piece by piece, so that nothing is held twice: who loads asks for the place of each tensor of the checkpoint.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from onward.kernels.ops import FP8_MAX
from onward.proto.model import ModelConfig

FP8 = torch.float8_e4m3fn


@dataclass(slots=True)
class LinearWeights:
    """[outputs, inputs]."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    """float32 [outputs], where the weight is float8."""

    def quantize_to_fp8(self) -> None:
        """To float8, one scale for each output."""
        wide = self.weight.float()
        scales = wide.abs().amax(1).clamp(min=1e-12) / FP8_MAX
        self.weight, self.scales = (wide / scales[:, None]).to(FP8), scales


@dataclass(slots=True)
class LayerWeights:
    input_norm: torch.Tensor
    qkv: LinearWeights
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    o: LinearWeights
    post_norm: torch.Tensor
    gate_up: LinearWeights
    down: LinearWeights

    @property
    def matrices(self) -> tuple[LinearWeights, ...]:
        return self.qkv, self.o, self.gate_up, self.down


@dataclass(slots=True)
class ModelWeights:
    embedding: torch.Tensor
    layers: list[LayerWeights]
    norm: torch.Tensor
    head: torch.Tensor

    def following_norms(self) -> list[torch.Tensor]:
        """After each layer comes the next one's input norm, or the last norm."""
        return [layer.input_norm for layer in self.layers[1:]] + [self.norm]


def allocate(config: ModelConfig, dtype: torch.dtype, device: str) -> ModelWeights:
    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    embedding = new(config.vocab_size, config.hidden_size)
    return ModelWeights(
        embedding,
        [_allocate_layer(config, new) for _ in range(config.num_layers)],
        new(config.hidden_size),
        embedding if config.tie_word_embeddings else new(config.vocab_size, config.hidden_size),
    )


def _allocate_layer(config: ModelConfig, new: Callable[..., torch.Tensor]) -> LayerWeights:
    hidden, inner, q_size = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    qkv_size = q_size + 2 * config.num_kv_heads * config.head_dim
    return LayerWeights(
        new(hidden),
        LinearWeights(new(qkv_size, hidden), new(qkv_size) if config.qkv_bias else None),
        (new(config.head_dim), new(config.head_dim)) if config.qk_norm else None,
        LinearWeights(new(hidden, q_size)),
        new(hidden),
        LinearWeights(new(2 * inner, hidden)),
        LinearWeights(new(hidden, inner)),
    )


def checkpoint_targets(weights: ModelWeights, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint by its canonical name, and where it goes."""
    yield "model.embed_tokens.weight", weights.embedding
    for index, layer in enumerate(weights.layers):
        for name, target in _layer_targets(layer, config):
            yield f"model.layers.{index}.{name}", target
    yield "model.norm.weight", weights.norm
    if not config.tie_word_embeddings:
        yield "lm_head.weight", weights.head


def _layer_targets(layer: LayerWeights, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", layer.input_norm
    parts = layer.qkv.weight.split([q_size, kv_size, kv_size])
    biases = [None] * 3 if layer.qkv.bias is None else layer.qkv.bias.split([q_size, kv_size, kv_size])
    for name, weight, bias in zip(("q_proj", "k_proj", "v_proj"), parts, biases, strict=True):
        yield f"self_attn.{name}.weight", weight
        if bias is not None:
            yield f"self_attn.{name}.bias", bias
    if layer.head_norms is not None:
        yield "self_attn.q_norm.weight", layer.head_norms[0]
        yield "self_attn.k_norm.weight", layer.head_norms[1]
    yield "self_attn.o_proj.weight", layer.o.weight
    yield "post_attention_layernorm.weight", layer.post_norm
    gate, up = layer.gate_up.weight.chunk(2)
    yield "mlp.gate_proj.weight", gate
    yield "mlp.up_proj.weight", up
    yield "mlp.down_proj.weight", layer.down.weight
