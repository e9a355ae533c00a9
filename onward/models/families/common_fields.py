"""Parts of `config.json` that many families have in common: sizes, rope, activations, windows."""

from collections.abc import Sequence
from typing import Any

from onward.errors import StartupError
from onward.models.families.config_fields import ConfigFields, unsupported
from onward.models.layers.decimal_power import log, square_root
from onward.proto.model import DynamicRope, LayerKind, LinearRope, Llama3Rope, LongRope, RopeScaling, YarnRope

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu",
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # fmt: skip


def sizes(fields: ConfigFields, *, positions: int, head_dim: int | None = None, eps: float = 1e-6) -> dict[str, Any]:
    """Reads the sizes. `positions`, `head_dim` and `eps` are the family's defaults; without one, `head_dim` is the
    hidden size divided by the number of heads."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": fields.integer("head_dim", head_dim or hidden // heads),
        "max_position_embeddings": fields.integer("max_position_embeddings", positions),
        "rms_norm_eps": fields.number("rms_norm_eps", eps),
    }


def rope(
    fields: ConfigFields, found: dict[str, Any], *, theta: float = 10_000.0, partial: float = 1.0
) -> dict[str, Any]:
    """Reads the rope in both spellings: `rope_parameters` (transformers 5), and the older `rope_theta` with
    `rope_scaling`.

    A scaling that stretches the context makes it as long as its factor says, if the config itself has a smaller length.
    """
    section = fields.section("rope_parameters" if "rope_parameters" in fields else "rope_scaling")
    fields.ignore("rope_scaling")
    base = section.number("rope_theta", fields.number("rope_theta", theta))
    partial = section.number("partial_rotary_factor", fields.number("partial_rotary_factor", partial))
    rotary_dim = _rotary_dim(found["head_dim"], partial)
    original = fields.optional_integer("original_max_position_embeddings")
    positions = found["max_position_embeddings"]
    scaling = rope_scaling(section, rotary_dim, positions, original)
    section.refuse_unread("rope")
    stretched = positions
    if isinstance(scaling, (DynamicRope, YarnRope)):
        stretched = max(positions, int(scaling.original_max_position_embeddings * scaling.factor))
    return {
        "rope_theta": base,
        "rope_scaling": scaling,
        "rotary_dim": rotary_dim if rotary_dim != found["head_dim"] else None,
        "max_position_embeddings": stretched,
    }


def rope_scaling(
    section: ConfigFields, rotary_dim: int, positions: int, original: int | None = None
) -> RopeScaling | None:
    """Reads the scaling of a rope. `original` is the context before scaling, if the config has it outside of the
    section."""
    kind = section.get("rope_type") or section.get("type") or "default"
    section.ignore("type", "rope_type")
    match kind:
        case "default":
            return None
        case "linear":
            return LinearRope(section.number("factor"))
        case "dynamic":
            section.ignore("original_max_position_embeddings")  # transformers reads `max_position_embeddings` instead
            return DynamicRope(section.number("factor"), positions)
        case "llama3":
            return _llama3(section, positions, original)
        case "yarn":
            return _yarn(section, positions, original)
        case "longrope" | "su":
            return _longrope(section, rotary_dim, positions, original)
        case _:
            raise unsupported(f"rope type {str(kind)[:80]!r}")


def _llama3(section: ConfigFields, positions: int, original: int | None) -> Llama3Rope:
    scaling = Llama3Rope(
        factor=section.number("factor"),
        low_freq_factor=section.number("low_freq_factor"),
        high_freq_factor=section.number("high_freq_factor"),
        original_max_position_embeddings=original or section.integer("original_max_position_embeddings", positions),
    )
    section.ignore("original_max_position_embeddings")
    if scaling.low_freq_factor == scaling.high_freq_factor:
        raise StartupError("the model's config is wrong: `low_freq_factor` and `high_freq_factor` are the same")
    return scaling


def _yarn(section: ConfigFields, positions: int, original: int | None) -> YarnRope:
    original = original or section.integer("original_max_position_embeddings", positions)
    section.ignore("original_max_position_embeddings")
    factor = section.number("factor", positions / original)
    mscale, mscale_all = section.optional_number("mscale"), section.optional_number("mscale_all_dim")
    inferred = yarn_magnitude(factor, 1.0)
    if mscale and mscale_all:
        inferred = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all)
    return YarnRope(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        attention_factor=section.number("attention_factor", inferred),
        truncate=section.flag("truncate", True),
    )


def yarn_magnitude(factor: float, mscale: float) -> float:
    """Returns the factor of cosines and sines that follows from the factor of the context."""
    return 1.0 if factor <= 1 else 0.1 * mscale * log(factor) + 1.0


def _longrope(section: ConfigFields, rotary_dim: int, positions: int, original: int | None) -> LongRope:
    original = original or section.integer("original_max_position_embeddings", positions)
    section.ignore("original_max_position_embeddings")
    factor = section.number("factor", positions / original)
    inferred = 1.0 if factor <= 1 else square_root(1 + log(factor) / log(original))
    return LongRope(
        short_factor=section.numbers("short_factor", rotary_dim // 2),
        long_factor=section.numbers("long_factor", rotary_dim // 2),
        original_max_position_embeddings=original,
        attention_factor=section.number("attention_factor", inferred),
    )


def _rotary_dim(head_dim: int, partial: float) -> int:
    rotary_dim = int(head_dim * partial)
    if partial > 1 or rotary_dim < 2 or rotary_dim % 2:
        raise StartupError(
            f"the model's config is wrong: partial_rotary_factor {partial} of head_dim {head_dim} is {rotary_dim}, "
            "not an even number from 2 on"
        )
    return rotary_dim


def layer_kinds(
    fields: ConfigFields, num_layers: int, window: int | None, *, default: Sequence[bool], local_rope: bool = False
) -> tuple[LayerKind, ...]:
    """Returns the kind of each layer; empty if all layers are plain. `layer_types`, or else `default`, says for each
    layer whether its attention has the window."""
    types = fields.strings("layer_types")
    if types is None:
        is_sliding = list(default)
    else:
        for kind in types:
            if kind not in ("full_attention", "sliding_attention"):
                raise unsupported(f"layer_types {kind[:80]!r}")
        is_sliding = [kind == "sliding_attention" for kind in types]
    if len(is_sliding) != num_layers:
        raise StartupError(f"the model's config is wrong: `layer_types` is not a list of {num_layers}")
    if any(is_sliding) and window is None:
        raise StartupError(
            "the model's config is wrong: `layer_types` has sliding layers, and `sliding_window` is null"
        )
    sliding = LayerKind(window, "local" if local_rope else "global")
    kinds = tuple(sliding if slides else LayerKind() for slides in is_sliding)
    return kinds if any(is_sliding) else ()
