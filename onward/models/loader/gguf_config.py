"""Turns the metadata of a GGUF file into a `ModelConfig`. Its sizes are checked by `config_parser`.

Some facts (tied embeddings, biases, the size of experts) are shown by the shapes of the file's tensors only. A field that
could change the result and is not computed is an error that names the field.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from onward.errors import StartupError
from onward.models.families.common_fields import yarn_magnitude
from onward.models.families.config_fields import ConfigFields, unsupported
from onward.models.loader import gguf_rope
from onward.models.tensor_names import Shape
from onward.proto.model import ClampedSwiglu, Experts, LayerKind, ModelConfig, YarnRope

Shapes = Mapping[str, Shape]

_FAMILIES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen2moe": "qwen2moe", "qwen3moe": "qwen3moe",
    "gpt-oss": "gptoss",
}  # fmt: skip
"""The family by the file's architecture. A `llama` with experts is a Mixtral."""
_WITH_EXPERTS = ("qwen2moe", "qwen3moe", "gpt-oss")
_SOFTMAX_BEFORE_TOP_K, _SOFTMAX_AFTER_TOP_K = 1, 3
"""Values of `expert_gating_func`."""
_EXPERT_FIELDS = {"expert_count", "expert_used_count", "expert_gating_func", "expert_weights_norm", "expert_weights_scale",
                  "expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_shared_count"}  # fmt: skip
"""The last three repeat what the shapes of tensors show."""
_EXPERT_PREFIXES = ("expert_", "moe_", "interleave_moe", "leading_dense", "swiglu_")
_ROPE_FIELDS = {"type", "factor", "original_context_length", "finetuned", "yarn_beta_fast", "yarn_beta_slow"}
_GPT_OSS_SWIGLU = ClampedSwiglu(1.702, 7.0)
"""The file has no fields for these."""


def parse_gguf(metadata: Mapping[str, Any], shapes: Shapes, rope_freqs: Sequence[float] | None) -> ModelConfig:
    """Returns the config. `rope_freqs` is the content of the tensor of that name, GGUF's form of Llama-3 rope scaling.
    Raises `StartupError` at the first field that is missing, wrong or not supported."""
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _FAMILIES:
        raise StartupError(
            f"the GGUF's architecture is not supported: {str(architecture)[:80]!r}; "
            f"supported are {', '.join(_FAMILIES)}"
        )
    prefix = architecture + "."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    fields = ConfigFields(own)
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    is_gpt_oss = architecture == "gpt-oss"
    _refuse_unsupported(own, shapes, head_dim, is_gpt_oss=is_gpt_oss)
    experts = _experts(fields, architecture, own, shapes)
    theta = shortest_float(fields.number("rope.freq_base", 10000.0))
    num_layers = fields.integer("block_count")
    config = {
        "architecture": "mixtral" if experts is not None and architecture == "llama" else _FAMILIES[architecture],
        "vocab_size": _shape(shapes, "token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length", experts and experts.intermediate_size),
        "num_layers": num_layers,
        "num_heads": heads,
        "num_kv_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": shortest_float(fields.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_scaling": gguf_rope.fit_rope_scaling(rope_freqs, theta, head_dim) if rope_freqs else None,
        "tie_word_embeddings": "output.weight" not in shapes,
        "qkv_bias": "blk.0.attn_q.bias" in shapes,
        "qk_norm": architecture in ("qwen3", "qwen3moe"),
        "experts": experts,
    }
    return ModelConfig(**config | (_gpt_oss_parts(fields, num_layers) if is_gpt_oss else {}))


def _gpt_oss_parts(fields: ConfigFields, num_layers: int) -> dict[str, Any]:
    """Returns the config fields in which gpt-oss differs. The window applies to every second layer, from the first on."""
    window = fields.integer("attention.sliding_window")
    slides = [layer % 2 == 0 for layer in range(min(num_layers, 1 << 10))]
    return {
        "rope_scaling": _yarn(fields) if fields.get("rope.scaling.type") == "yarn" else None,
        "o_bias": True,
        "mlp_bias": True,
        "attention_sinks": True,
        "clamped_swiglu": _GPT_OSS_SWIGLU,
        "layers": tuple(LayerKind(window) if sliding else LayerKind() for sliding in slides),
    }


def _yarn(fields: ConfigFields) -> YarnRope:
    """Returns the YaRN scaling of gpt-oss. The ends of the ramp are not rounded to whole dimensions, as in the
    `config.json` of gpt-oss. The file has no field for that."""
    factor = shortest_float(fields.number("rope.scaling.factor"))
    return YarnRope(
        factor=factor,
        original_max_position_embeddings=fields.integer("rope.scaling.original_context_length"),
        beta_fast=shortest_float(fields.number("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=shortest_float(fields.number("rope.scaling.yarn_beta_slow", 1.0)),
        attention_factor=yarn_magnitude(factor, 1.0),
        truncate=False,
    )


def _experts(fields: ConfigFields, architecture: str, own: Mapping[str, Any], shapes: Shapes) -> Experts | None:
    if not own.get("expert_count"):
        if architecture in _WITH_EXPERTS:
            raise StartupError(f"the model's config lacks `expert_count`, and its architecture is {architecture}")
        return None
    for key, value in own.items():
        if key.startswith(_EXPERT_PREFIXES) and key not in _EXPERT_FIELDS and value:
            raise unsupported(f"{key} ({str(value)[:80]})")
    usual = _SOFTMAX_AFTER_TOP_K if architecture == "gpt-oss" else _SOFTMAX_BEFORE_TOP_K
    if (kind := own.get("expert_gating_func", usual)) != usual:
        raise unsupported(f"expert_gating_func {str(kind)[:80]} of the architecture {architecture}")
    if (scale := own.get("expert_weights_scale", 1.0)) not in (0.0, 1.0):  # 0: no scale
        raise unsupported(f"expert_weights_scale {str(scale)[:80]}")
    renormalizes = fields.flag("expert_weights_norm", architecture != "qwen2moe")
    shared = shapes.get("blk.0.ffn_up_shexp.weight")
    return Experts(
        num_experts=fields.integer("expert_count"),
        top_k=fields.integer("expert_used_count"),
        intermediate_size=_shape(shapes, "blk.0.ffn_up_exps.weight", 3)[1],
        renormalize=renormalizes or architecture == "gpt-oss",
        router_bias="blk.0.ffn_gate_inp.bias" in shapes,
        shared_intermediate_size=None if shared is None else shared[0],
    )


def _shape(shapes: Shapes, name: str, num_dims: int = 2) -> Shape:
    if name not in shapes:
        raise StartupError(f"the GGUF has no tensor {name}")
    if len(shapes[name]) != num_dims:
        raise StartupError(f"the GGUF's tensor {name} has the shape {list(shapes[name])}, not {num_dims} dimensions")
    return shapes[name]


def _refuse_unsupported(fields: Mapping[str, Any], shapes: Shapes, head_dim: int, *, is_gpt_oss: bool) -> None:
    _shape(shapes, "token_embd.weight")
    if fields.get("attention.sliding_window") and not is_gpt_oss:
        raise unsupported("sliding window attention (attention.sliding_window)")
    if (pattern := fields.get("attention.sliding_window_pattern", 2)) != 2 and is_gpt_oss:
        raise unsupported(f"attention.sliding_window_pattern {str(pattern)[:80]}")
    kind = fields.get("rope.scaling.type", "none")
    if kind != "none" and not (is_gpt_oss and kind == "yarn"):
        raise unsupported(f"rope scaling type {str(kind)[:80]!r}")
    if kind == "yarn":
        prefix = "rope.scaling."
        for key in fields:
            if key.startswith(prefix) and key.removeprefix(prefix) not in _ROPE_FIELDS:
                raise unsupported(f"{key} ({str(fields[key])[:80]})")
    if (rotary := fields.get("rope.dimension_count", head_dim)) != head_dim:
        raise unsupported(f"rope over {rotary} of {head_dim} dimensions (rope.dimension_count)")
    if (value_dim := fields.get("attention.value_length", head_dim)) != head_dim:
        raise unsupported(f"values of another size than keys (attention.value_length {value_dim})")


def shortest_float(value: float) -> float:
    """Returns the shortest decimal of the same float32. GGUF stores float32, so 1e-5 is read as 9.999999747e-06."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value
