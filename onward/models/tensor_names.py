"""The canonical names and shapes of a model's tensors. Tensors that Hugging Face's Llama has are named as there.

All loaders use these names; `models.families` maps them to the names in checkpoints. This module knows nothing of files
or of quantization.

    input_layernorm            before attention                 attention_output_norm   on the output of attention
    post_attention_layernorm   before the MLP                   mlp_output_norm         on the output of the MLP
    mlp.router                 scores of experts                mlp.experts.N           an expert
    mlp.shared_expert          the expert of every token        mlp.shared_expert_gate  the factor of its output
"""

from collections.abc import Iterator, Mapping

from onward.errors import StartupError
from onward.proto.model import Experts, ModelConfig

Shape = tuple[int, ...]

EMBED = "model.embed_tokens.weight"
POSITIONS = "model.position_embeddings.weight"
FINAL_NORM = "model.norm.weight"
FINAL_NORM_BIAS = "model.norm.bias"
LM_HEAD = "lm_head.weight"


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Returns the tensors of a complete model with their shapes. With tied embeddings there is no `lm_head.weight`."""
    vocabulary = (config.vocab_size, config.hidden_size)
    tensors: dict[str, Shape] = {EMBED: vocabulary}
    if config.learned_positions:
        tensors[POSITIONS] = (config.max_position_embeddings, config.hidden_size)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= {prefix + name: shape for name, shape in expected_layer(config, layer).items()}
    tensors[FINAL_NORM] = (config.hidden_size,)
    if config.norm_bias:
        tensors[FINAL_NORM_BIAS] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        tensors[LM_HEAD] = vocabulary
    return tensors


def expected_layer(config: ModelConfig, layer: int = 0) -> dict[str, Shape]:
    """Returns the tensors of one layer with their shapes, by names without the prefix of the layer."""
    return dict([*_attention_tensors(config), *_mlp_tensors(config, config.layer_experts(layer))])


def _attention_tensors(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if config.pre_norm:
        yield from _norm("input_layernorm", config)
    for name, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
        yield from _linear(f"self_attn.{name}", size, config.hidden_size, config.qkv_bias)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (q_size if config.qk_norm_is_whole else config.head_dim,)
        yield "self_attn.k_norm.weight", (kv_size if config.qk_norm_is_whole else config.head_dim,)
    if config.attention_sinks:
        yield "self_attn.sinks", (config.num_heads,)
    yield from _linear("self_attn.o_proj", config.hidden_size, q_size, config.o_bias)
    if config.post_norm:
        yield from _norm("attention_output_norm", config)


def _mlp_tensors(config: ModelConfig, experts: Experts | None) -> Iterator[tuple[str, Shape]]:
    if config.pre_norm:
        yield from _norm("post_attention_layernorm", config)
    if experts is None:
        yield from _one_mlp("mlp", config.intermediate_size, config)
    else:
        yield from _linear("mlp.router", experts.num_experts, config.hidden_size, experts.router_bias)
        if experts.selection_bias:
            yield "mlp.router.selection_bias", (experts.num_experts,)
        for expert in range(experts.num_experts):
            yield from _one_mlp(f"mlp.experts.{expert}", experts.intermediate_size, config)
        if experts.shared_intermediate_size is not None:
            yield from _one_mlp("mlp.shared_expert", experts.shared_intermediate_size, config)
            if experts.shared_is_gated:
                yield "mlp.shared_expert_gate.weight", (1, config.hidden_size)
    if config.post_norm:
        yield from _norm("mlp_output_norm", config)


def _one_mlp(name: str, inner: int, config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    if config.gated_mlp:
        yield from _linear(f"{name}.gate_proj", inner, config.hidden_size, config.mlp_bias)
    yield from _linear(f"{name}.up_proj", inner, config.hidden_size, config.mlp_bias)
    yield from _linear(f"{name}.down_proj", config.hidden_size, inner, config.mlp_bias)


def _linear(name: str, outputs: int, inputs: int, has_bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (outputs, inputs)
    if has_bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (config.hidden_size,)
    if config.norm_bias:
        yield f"{name}.bias", (config.hidden_size,)


def check_tensors(found: Mapping[str, Shape], expected: Mapping[str, Shape], source: str) -> None:
    """Raises `StartupError` unless exactly the expected tensors are found, in the expected shapes."""
    if missing := [name for name in expected if name not in found]:
        raise StartupError(f"{source} lacks {_listed(missing)}")
    if extra := [name for name in found if name not in expected]:
        raise StartupError(f"{source} has {_listed(extra)}, which the model's config does not account for")
    for name, shape in expected.items():
        if found[name] != shape:
            raise StartupError(f"{source}: {name} has the shape {list(found[name])}, expected {list(shape)}")


def _listed(tensors: list[str]) -> str:
    shown = ", ".join(tensors[:4])
    return f"{shown} and {len(tensors) - 4} more tensors" if len(tensors) > 4 else f"the tensors {shown}"
