"""A model's weights on a device, as its products read them: matrices that share an input are stored as one.

A loader fills them tensor by tensor (`checkpoint_targets`), so that the weights are never in memory twice.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from onward.kernels.ops import FP8_MAX, Norms, NormWeights
from onward.models.tensor_names import EMBED, FINAL_NORM, LM_HEAD, POSITIONS
from onward.proto.model import Experts, ModelConfig

FP8 = torch.float8_e4m3fn


@dataclass(slots=True)
class LinearWeights:
    """A matrix [outputs, inputs], with its bias and its scales."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    """float32 [outputs], if the weight is float8."""
    add_up: Callable[[torch.Tensor], None] | None = None
    """Replaces products by the sums of those of all ranks, if each rank has a part of the inputs."""

    def quantize_to_fp8(self) -> None:
        """Converts the weight to float8, with a scale for each output."""
        wide = self.weight.float()
        scales = wide.abs().amax(1).clamp(min=1e-12) / FP8_MAX
        self.weight, self.scales = (wide / scales[:, None]).to(FP8), scales


@dataclass(slots=True)
class SharedExpertWeights:
    gate_up: LinearWeights
    down: LinearWeights
    gate: LinearWeights | None
    """float32 [1, hidden]: the sigmoid of its product with the input is the factor of the output."""


@dataclass(slots=True)
class ExpertWeights:
    """The expert router and the shared expert of a layer with experts."""

    router: LinearWeights
    """float32: a rounded score can choose another expert."""
    selection_bias: torch.Tensor | None
    """float32 [experts]."""
    shared: SharedExpertWeights | None


@dataclass(slots=True)
class LayerWeights:
    """The weights of a layer. Norms are None if the model has none of that kind."""

    input_norm: NormWeights | None
    qkv: LinearWeights
    head_norms: Norms | None
    """Norms of q and k over each head."""
    whole_norms: tuple[NormWeights, NormWeights] | None
    """Norms of q and k over all heads together."""
    sinks: torch.Tensor | None
    """float32 [heads]."""
    o: LinearWeights
    attention_output_norm: NormWeights | None
    mlp_norm: NormWeights | None
    gate_up: LinearWeights
    """Only `up` if the MLP has no gate. In a layer with experts, this and `down` have all experts one after the
    other."""
    down: LinearWeights
    experts: ExpertWeights | None
    mlp_output_norm: NormWeights | None

    @property
    def matrices(self) -> tuple[LinearWeights, ...]:
        return self.qkv, self.o, self.gate_up, self.down


@dataclass(slots=True)
class ModelWeights:
    embedding: torch.Tensor
    positions: torch.Tensor | None
    """Learned positions, [max_position_embeddings, hidden]."""
    layers: list[LayerWeights]
    norm: NormWeights
    head: torch.Tensor

    def quantize_to_fp8(self) -> None:
        for layer in self.layers:
            for matrix in layer.matrices:
                matrix.quantize_to_fp8()


class _Allocation:
    """Allocates the tensors of one model."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        self._config, self._dtype, self._device = config, dtype, device

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)

    def linear(self, outputs: int, inputs: int, *, has_bias: bool, dtype: torch.dtype | None = None) -> LinearWeights:
        bias = self.tensor(outputs, dtype=dtype) if has_bias else None
        return LinearWeights(self.tensor(outputs, inputs, dtype=dtype), bias)

    def norm_weight(self, size: int) -> torch.Tensor:
        """Allocates the weights of a norm. Weights that get an offset are float32, because one plus a small number has
        few bits left in bfloat16."""
        return self.tensor(size, dtype=torch.float32 if self._config.norm_weight_offset else None)

    def norm(self, *, exists: bool = True) -> NormWeights | None:
        config = self._config
        if not exists:
            return None
        bias = self.tensor(config.hidden_size) if config.norm_bias else None
        return NormWeights(self.norm_weight(config.hidden_size), bias, centers=config.norm == "layer")

    def whole_norm(self, num_heads: int) -> NormWeights:
        weight = self.norm_weight(num_heads * self._config.head_dim)
        return NormWeights(weight, count=num_heads * self._config.true_head_dim)

    def experts(self, experts: Experts) -> ExpertWeights:
        hidden, has_bias, size = self._config.hidden_size, self._config.mlp_bias, experts.shared_intermediate_size
        shared = None
        if size is not None:
            shared = SharedExpertWeights(
                self.linear(2 * size, hidden, has_bias=has_bias),
                self.linear(hidden, size, has_bias=has_bias),
                self.linear(1, hidden, has_bias=False, dtype=torch.float32) if experts.shared_is_gated else None,
            )
        router = self.linear(experts.num_experts, hidden, has_bias=experts.router_bias, dtype=torch.float32)
        bias = self.tensor(experts.num_experts, dtype=torch.float32) if experts.selection_bias else None
        return ExpertWeights(router, bias, shared)

    def layer(self, index: int) -> LayerWeights:
        config, experts = self._config, self._config.layer_experts(index)
        hidden, q_size = config.hidden_size, config.num_heads * config.head_dim
        inner = config.intermediate_size if experts is None else experts.intermediate_size
        count = 1 if experts is None else experts.num_experts
        is_whole, is_by_head = (
            config.qk_norm and config.qk_norm_is_whole,
            config.qk_norm and not config.qk_norm_is_whole,
        )
        sizes = (config.num_heads, config.num_kv_heads)
        return LayerWeights(
            input_norm=self.norm(exists=config.pre_norm),
            qkv=self.linear(q_size + 2 * config.num_kv_heads * config.head_dim, hidden, has_bias=config.qkv_bias),
            head_norms=(self._head_norm(), self._head_norm()) if is_by_head else None,
            whole_norms=(self.whole_norm(sizes[0]), self.whole_norm(sizes[1])) if is_whole else None,
            sinks=self.tensor(config.num_heads, dtype=torch.float32) if config.attention_sinks else None,
            o=self.linear(hidden, q_size, has_bias=config.o_bias),
            attention_output_norm=self.norm(exists=config.post_norm),
            mlp_norm=self.norm(exists=config.pre_norm),
            gate_up=self.linear(count * (2 if config.gated_mlp else 1) * inner, hidden, has_bias=config.mlp_bias),
            down=self.linear(count * hidden, inner, has_bias=config.mlp_bias),
            experts=None if experts is None else self.experts(experts),
            mlp_output_norm=self.norm(exists=config.post_norm),
        )

    def _head_norm(self) -> torch.Tensor:
        return self.norm_weight(self._config.true_head_dim)


def allocate(config: ModelConfig, dtype: torch.dtype, device: str) -> ModelWeights:
    new = _Allocation(config, dtype, device)
    embedding = new.tensor(config.vocab_size, config.hidden_size)
    norm = new.norm()
    assert norm is not None, "every model ends with a norm"
    return ModelWeights(
        embedding,
        new.tensor(config.max_position_embeddings, config.hidden_size) if config.learned_positions else None,
        [new.layer(index) for index in range(config.num_layers)],
        norm,
        embedding if config.tie_word_embeddings else new.tensor(config.vocab_size, config.hidden_size),
    )


def checkpoint_targets(weights: ModelWeights, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the canonical name of every tensor of the checkpoint, and the tensor that it is loaded into."""
    yield EMBED, weights.embedding
    if weights.positions is not None:
        yield POSITIONS, weights.positions
    for index, layer in enumerate(weights.layers):
        for name, target in _layer_targets(layer, config):
            yield f"model.layers.{index}.{name}", target
    yield from _norm_targets(FINAL_NORM.removesuffix(".weight"), weights.norm)
    if not config.tie_word_embeddings:
        yield LM_HEAD, weights.head


def norm_weights(weights: ModelWeights) -> Iterator[torch.Tensor]:
    """Yields the weights of all norms, including those of q and k."""
    yield weights.norm.weight
    for layer in weights.layers:
        norms = (layer.input_norm, layer.attention_output_norm, layer.mlp_norm, layer.mlp_output_norm)
        for norm in (*norms, *(layer.whole_norms or ())):
            if norm is not None:
                yield norm.weight
        yield from layer.head_norms or ()


def _layer_targets(layer: LayerWeights, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield from _norm_targets("input_layernorm", layer.input_norm)
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    yield from _linear_targets(names, layer.qkv, [q_size, kv_size, kv_size])
    for name, norm in zip(("q_norm", "k_norm"), layer.head_norms or (), strict=False):
        yield f"self_attn.{name}.weight", norm
    for name, norm in zip(("self_attn.q_norm", "self_attn.k_norm"), layer.whole_norms or (), strict=False):
        yield from _norm_targets(name, norm)
    if layer.sinks is not None:
        yield "self_attn.sinks", layer.sinks
    yield from _linear_targets(("self_attn.o_proj",), layer.o, [config.hidden_size])
    yield from _norm_targets("attention_output_norm", layer.attention_output_norm)
    yield from _norm_targets("post_attention_layernorm", layer.mlp_norm)
    if layer.experts is None:
        yield from _mlp_targets(["mlp"], layer.gate_up, layer.down, config)
    else:
        yield from _expert_targets(layer.experts, layer, config)
    yield from _norm_targets("mlp_output_norm", layer.mlp_output_norm)


def _mlp_targets(
    names: Sequence[str], gate_up: LinearWeights, down: LinearWeights, config: ModelConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the targets of MLPs of equal size that are stored one after the other."""
    parts = ("gate_proj", "up_proj") if config.gated_mlp else ("up_proj",)
    inner = len(gate_up.weight) // len(names) // len(parts)
    yield from _linear_targets(
        [f"{name}.{part}" for name in names for part in parts], gate_up, [inner] * len(names) * len(parts)
    )
    yield from _linear_targets([f"{name}.down_proj" for name in names], down, [config.hidden_size] * len(names))


def _expert_targets(
    experts: ExpertWeights, layer: LayerWeights, config: ModelConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    count = len(experts.router.weight)
    yield from _linear_targets(("mlp.router",), experts.router, [count])
    if experts.selection_bias is not None:
        yield "mlp.router.selection_bias", experts.selection_bias
    yield from _mlp_targets([f"mlp.experts.{i}" for i in range(count)], layer.gate_up, layer.down, config)
    if experts.shared is not None:
        yield from _mlp_targets(["mlp.shared_expert"], experts.shared.gate_up, experts.shared.down, config)
        if experts.shared.gate is not None:
            yield from _linear_targets(("mlp.shared_expert_gate",), experts.shared.gate, [1])


def _linear_targets(
    names: Sequence[str], linear: LinearWeights, sizes: Sequence[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the targets of matrices that are stored one after the other in a fused one."""
    biases = [None] * len(names) if linear.bias is None else linear.bias.split(sizes)
    for name, weight, bias in zip(names, linear.weight.split(sizes), biases, strict=True):
        yield f"{name}.weight", weight
        if bias is not None:
            yield f"{name}.bias", bias


def _norm_targets(name: str, norm: NormWeights | None) -> Iterator[tuple[str, torch.Tensor]]:
    if norm is None:
        return
    yield f"{name}.weight", norm.weight
    if norm.bias is not None:
        yield f"{name}.bias", norm.bias
