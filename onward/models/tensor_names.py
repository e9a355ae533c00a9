"""The canonical names and shapes of a model's tensors. Every loader speaks these names, which are Hugging Face's.

Knows nothing of files or of quantization.
"""

from collections.abc import Iterator, Mapping

from onward.errors import StartupError
from onward.proto.model import ModelConfig

Shape = tuple[int, ...]

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """What a complete checkpoint of this model holds. Tied embeddings have no `lm_head.weight`."""
    vocabulary = (config.vocab_size, config.hidden_size)
    tensors: dict[str, Shape] = {EMBED: vocabulary}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= {prefix + name: shape for name, shape in expected_layer(config).items()}
    tensors[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        tensors[LM_HEAD] = vocabulary
    return tensors


def expected_layer(config: ModelConfig) -> dict[str, Shape]:
    """Of one layer, without its prefix."""
    return dict(_layer_tensors(config))


def _layer_tensors(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", (hidden,)
    for name, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
        yield f"self_attn.{name}.weight", (size, hidden)
        if config.qkv_bias:
            yield f"self_attn.{name}.bias", (size,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    yield "self_attn.o_proj.weight", (hidden, q_size)
    yield "post_attention_layernorm.weight", (hidden,)
    yield "mlp.gate_proj.weight", (inner, hidden)
    yield "mlp.up_proj.weight", (inner, hidden)
    yield "mlp.down_proj.weight", (hidden, inner)


def check_tensors(found: Mapping[str, Shape], config: ModelConfig, source: str) -> None:
    """Raises unless exactly the model's tensors are there, in its shapes."""
    expected = expected_tensors(config)
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
