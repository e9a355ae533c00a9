"""Llama, and the families that are a Llama with some more fields: Mistral, Qwen2 and Qwen3, Granite, SmolLM3."""

from typing import Any

from onward.models.families.common_fields import ACTIVATIONS, layer_kinds, rope, sizes
from onward.models.families.config_fields import ConfigFields
from onward.models.families.family import Family
from onward.proto.model import LayerKind


def parse_common(
    fields: ConfigFields, *, positions: int, theta: float = 10_000.0, partial: float = 1.0, **defaults: Any
) -> dict[str, Any]:
    found = sizes(fields, positions=positions, **defaults)
    found |= rope(fields, found, theta=theta, partial=partial)
    found["activation"] = fields.choice("hidden_act", ACTIVATIONS, "silu")
    found["tie_word_embeddings"] = fields.flag("tie_word_embeddings")
    return found


def _biases(fields: ConfigFields) -> dict[str, Any]:
    has_bias = fields.flag("attention_bias")
    return {"qkv_bias": has_bias, "o_bias": has_bias, "mlp_bias": fields.flag("mlp_bias")}


def parse_llama(fields: ConfigFields) -> dict[str, Any]:
    return parse_common(fields, positions=2048) | _biases(fields)


def _parse_mistral(fields: ConfigFields) -> dict[str, Any]:
    found = parse_common(fields, positions=131_072)
    window = fields.optional_integer("sliding_window", 4096)
    all_layers = [window is not None] * found["num_layers"]
    return found | {"layers": layer_kinds(fields, found["num_layers"], window, default=all_layers)}


def _parse_qwen2(fields: ConfigFields) -> dict[str, Any]:
    found = parse_common(fields, positions=32_768)
    return found | {"qkv_bias": True, "layers": _qwen_layers(fields, found["num_layers"])}


def _parse_qwen3(fields: ConfigFields) -> dict[str, Any]:
    found = parse_common(fields, positions=32_768, head_dim=128)
    has_bias = fields.flag("attention_bias")
    biases = {"qkv_bias": has_bias, "o_bias": has_bias}
    return found | biases | {"qk_norm": True, "layers": _qwen_layers(fields, found["num_layers"])}


def _qwen_layers(fields: ConfigFields, num_layers: int) -> tuple[LayerKind, ...]:
    """Returns the kinds of a Qwen's layers. The window is off unless `use_sliding_window` is on; then it applies to
    layers from `max_window_layers` on."""
    window = fields.optional_integer("sliding_window", 4096)
    first = fields.get("max_window_layers")
    if not fields.flag("use_sliding_window"):
        window = None
    first = 28 if first is None else first
    if isinstance(first, bool) or not isinstance(first, int):
        raise fields.wrong("max_window_layers", first)
    slides = [window is not None and layer >= first for layer in range(num_layers)]
    return layer_kinds(fields, num_layers, window, default=slides)


def _parse_granite(fields: ConfigFields) -> dict[str, Any]:
    return parse_llama(fields) | {
        "embedding_multiplier": fields.number("embedding_multiplier", 1.0),
        "residual_multiplier": fields.number("residual_multiplier", 1.0),
        "query_scale": fields.number("attention_multiplier", 1.0),
        "logits_multiplier": 1.0 / fields.number("logits_scaling", 1.0),
    }


def _parse_smollm3(fields: ConfigFields) -> dict[str, Any]:
    found = parse_common(fields, positions=32_768, theta=2_000_000.0) | _biases(fields)
    found["tie_word_embeddings"] = fields.flag("tie_word_embeddings", True)
    num_layers, window = found["num_layers"], fields.optional_integer("sliding_window")
    interval = fields.integer("no_rope_layer_interval", 4)
    has_rope = fields.get("no_rope_layers")
    if has_rope is None:
        has_rope = [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(has_rope, list) or len(has_rope) < num_layers:
        raise fields.wrong("no_rope_layers", has_rope)
    if not fields.flag("use_sliding_window"):
        window = None
    slides = [window is not None and not has_rope[layer] for layer in range(num_layers)]
    kinds = layer_kinds(fields, num_layers, window, default=slides) or (LayerKind(),) * num_layers
    kinds = tuple(
        LayerKind(kind.window, "global" if rotates else "none") for kind, rotates in zip(kinds, has_rope, strict=False)
    )
    return found | {"layers": kinds if any(kind != LayerKind() for kind in kinds) else ()}


FAMILIES = [
    Family("llama", "LlamaForCausalLM", parse_llama),
    Family("mistral", "MistralForCausalLM", _parse_mistral),
    Family("qwen2", "Qwen2ForCausalLM", _parse_qwen2),
    Family("qwen3", "Qwen3ForCausalLM", _parse_qwen3),
    Family("granite", "GraniteForCausalLM", _parse_granite),
    Family("smollm3", "SmolLM3ForCausalLM", _parse_smollm3),
]
