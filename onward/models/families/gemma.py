"""Gemma 1, 2 and 3 (text): norms whose weights count from one, and scaled embeddings. Gemma 2 and 3 also have norms on
both sides of each sublayer, alternating windows and soft-caps."""

from typing import Any

from onward.models.families.common_fields import ACTIVATIONS, layer_kinds, rope, rope_scaling, sizes
from onward.models.families.config_fields import ConfigFields
from onward.models.families.family import Family, TensorSource
from onward.models.layers.decimal_power import square_root
from onward.models.tensor_names import Shape
from onward.proto.model import ModelConfig


def _common(fields: ConfigFields, *, positions: int) -> dict[str, Any]:
    found = sizes(fields, positions=positions, head_dim=256)
    fields.refuse("use_bidirectional_attention")
    has_bias = fields.flag("attention_bias")
    return found | {
        "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
        "qkv_bias": has_bias,
        "o_bias": has_bias,
        "norm_weight_offset": 1.0,
        "embedding_multiplier": square_root(found["hidden_size"]),
    }


def _parse_gemma1(fields: ConfigFields) -> dict[str, Any]:
    """Parses the config of a Gemma 1. In the first releases `gelu` means the approximation by tanh."""
    found = _common(fields, positions=8192)
    act = fields.choice("hidden_act", ACTIVATIONS | {"gelu": "gelu_tanh"}, "gelu_pytorch_tanh")
    fields.choice("hidden_activation", {"gelu_pytorch_tanh": act}, "gelu_pytorch_tanh")
    return found | rope(fields, found) | {"activation": act}


def _both_norms_and_caps(fields: ConfigFields, *, attention: float | None, logits: float | None) -> dict[str, Any]:
    act = fields.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")
    fields.choice("hidden_act", {"gelu_pytorch_tanh": act}, "gelu_pytorch_tanh")
    return {
        "activation": act,
        "post_norm": True,
        "query_scale": 1.0 / square_root(fields.number("query_pre_attn_scalar", 256.0)),
        "attention_softcap": fields.optional_number("attn_logit_softcapping", attention),
        "logit_softcap": fields.optional_number("final_logit_softcapping", logits),
    }


def _parse_gemma2(fields: ConfigFields) -> dict[str, Any]:
    found = _common(fields, positions=8192)
    window, num_layers = fields.optional_integer("sliding_window", 4096), found["num_layers"]
    slides = [(layer + 1) % 2 != 0 for layer in range(num_layers)]
    return (
        found
        | rope(fields, found)
        | _both_norms_and_caps(fields, attention=50.0, logits=30.0)
        | {"layers": layer_kinds(fields, num_layers, window, default=slides)}
    )


def _parse_gemma3(fields: ConfigFields) -> dict[str, Any]:
    """Parses the config of a Gemma 3. Sliding layers have a rope of their own."""
    found = _common(fields, positions=131_072)
    window, num_layers = fields.optional_integer("sliding_window", 4096), found["num_layers"]
    pattern = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    slides = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    return (
        found
        | _gemma3_rope(fields, found)
        | _both_norms_and_caps(fields, attention=None, logits=None)
        | {"qk_norm": True, "layers": layer_kinds(fields, num_layers, window, default=slides, local_rope=True)}
    )


_TEXT_DEFAULTS = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
"""Defaults of transformers for fields that `text_config` leaves out, as Google's configs do."""


def _parse_gemma3_with_images(fields: ConfigFields) -> dict[str, Any]:
    """Parses the text part alone."""
    text = fields.section("text_config", _TEXT_DEFAULTS)
    found = _parse_gemma3(text)
    text.refuse_unread("gemma3")
    fields.ignore("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")
    return found | {"tie_word_embeddings": fields.flag("tie_word_embeddings", True)}


def _gemma3_rope(fields: ConfigFields, found: dict[str, Any]) -> dict[str, Any]:
    """Reads `rope_parameters` by kind of layer, or in the older spelling `rope_theta`, `rope_scaling` and
    `rope_local_base_freq`; there the scaling is that of layers without a window."""
    dim, positions = found["head_dim"], found["max_position_embeddings"]
    both = fields.section("rope_parameters")
    full, local = both.section("full_attention"), both.section("sliding_attention")
    both.refuse_unread("gemma3")
    old = fields.section("rope_scaling")
    scaling = rope_scaling(old, dim, positions) or rope_scaling(full, dim, positions)
    result = {
        "rope_theta": full.number("rope_theta", fields.number("rope_theta", 1_000_000.0)),
        "rope_scaling": scaling,
        "local_rope_theta": local.number("rope_theta", fields.number("rope_local_base_freq", 10_000.0)),
        "local_rope_scaling": rope_scaling(local, dim, positions),
    }
    for section in (full, local, old):
        section.refuse_unread("gemma3")
    return result


_BOTH_NORMS = {
    "post_attention_layernorm.weight": "pre_feedforward_layernorm.weight",
    "attention_output_norm.weight": "post_attention_layernorm.weight",
    "mlp_output_norm.weight": "post_feedforward_layernorm.weight",
}


def _locate_both_norms(name: str, shape: Shape, config: ModelConfig) -> TensorSource:
    return TensorSource(_BOTH_NORMS.get(name, name), shape)


FAMILIES = [
    Family("gemma", "GemmaForCausalLM", _parse_gemma1),
    Family("gemma2", "Gemma2ForCausalLM", _parse_gemma2, _locate_both_norms),
    *(
        Family(
            "gemma3", hf_name, parse, _locate_both_norms, prefixes=("", "language_model."),
            unserved=("vision_tower.", "multi_modal_projector."),
        )
        for hf_name, parse in (
            ("Gemma3ForConditionalGeneration", _parse_gemma3_with_images),
            ("Gemma3ForCausalLM", _parse_gemma3),
        )
    ),
]  # fmt: skip
