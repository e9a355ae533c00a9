"""Qwen2-MoE and Qwen3-MoE: a Qwen with experts in some layers, and in Qwen2-MoE an expert that every token gets."""

from typing import Any

import msgspec

from onward.errors import StartupError
from onward.models.families.common_fields import layer_kinds
from onward.models.families.config_fields import ConfigFields, unsupported
from onward.models.families.expert_tensors import locate_in_fused
from onward.models.families.family import Family, TensorSource
from onward.models.families.llama import parse_common
from onward.models.tensor_names import Shape
from onward.proto.model import Experts, LayerKind, ModelConfig


def _experts(fields: ConfigFields, *, size: int, num_experts: int, top_k: int, shared: int | None) -> Experts:
    """Parses the fields of the experts. The arguments are the family's defaults for missing fields; without `shared`
    there is no shared expert."""
    fields.ignore("router_aux_loss_coef")  # used in training only
    return Experts(
        num_experts=fields.integer("num_experts", fields.integer("num_local_experts", num_experts)),
        top_k=fields.integer("num_experts_per_tok", top_k),
        intermediate_size=fields.integer("moe_intermediate_size", size),
        renormalize=fields.flag("norm_topk_prob"),
        shared_intermediate_size=shared and fields.integer("shared_expert_intermediate_size", shared),
    )


def _with_dense_layers(fields: ConfigFields, kinds: tuple[LayerKind, ...], num_layers: int) -> tuple[LayerKind, ...]:
    """Marks the dense layers. `mlp_only_layers` lists dense layers, and of the others only every
    `decoder_sparse_step`th layer has experts."""
    step, named = fields.integer("decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in named):
        raise fields.wrong("mlp_only_layers", named)
    is_dense = [layer in named or (layer + 1) % step != 0 for layer in range(num_layers)]
    if all(is_dense):
        raise StartupError(
            "the model's config is wrong: no layer has experts (`mlp_only_layers`, `decoder_sparse_step`)"
        )
    kinds = kinds or (LayerKind(),) * num_layers
    kinds = tuple(msgspec.structs.replace(kind, is_dense=d) for kind, d in zip(kinds, is_dense, strict=True))
    return kinds if any(kind != LayerKind() for kind in kinds) else ()


def _parse_qwen2_moe(fields: ConfigFields) -> dict[str, Any]:
    found = parse_common(fields, positions=32_768)
    num_layers, window = found["num_layers"], fields.optional_integer("sliding_window", 4096)
    last = fields.get("max_window_layers")
    last = 28 if last is None else last
    if isinstance(last, bool) or not isinstance(last, int):
        raise fields.wrong("max_window_layers", last)
    if not fields.flag("use_sliding_window"):
        window = None
    slides = [window is not None and layer % 2 == 0 and layer < last for layer in range(num_layers)]
    kinds = layer_kinds(fields, num_layers, window, default=slides)
    return found | {
        "qkv_bias": fields.flag("qkv_bias", True),
        "layers": _with_dense_layers(fields, kinds, num_layers),
        "experts": _experts(fields, size=1408, num_experts=60, top_k=4, shared=5632),
    }


def _parse_qwen3_moe(fields: ConfigFields) -> dict[str, Any]:
    """Parses the config of a Qwen3-MoE. The window applies to all layers; `max_window_layers`, which published configs
    have, has no effect. Some configs also set what holds for every model of the family: `use_qk_norm`, and a shared
    expert of size 0."""
    found = parse_common(fields, positions=32_768)
    num_layers, window = found["num_layers"], fields.optional_integer("sliding_window", 4096)
    fields.ignore("max_window_layers")
    if not fields.flag("use_qk_norm", True):
        raise unsupported("use_qk_norm (False) of a Qwen3-MoE")
    fields.refuse("shared_expert_intermediate_size", "qkv_bias")
    if not fields.flag("use_sliding_window"):
        window = None
    kinds = (LayerKind(window),) * num_layers if window is not None else ()
    has_bias = fields.flag("attention_bias")
    return found | {
        "qkv_bias": has_bias,
        "o_bias": has_bias,
        "qk_norm": True,
        "layers": _with_dense_layers(fields, kinds, num_layers),
        "experts": _experts(fields, size=768, num_experts=128, top_k=8, shared=None),
    }


def _locate(name: str, shape: Shape, config: ModelConfig) -> TensorSource:
    return TensorSource({"mlp.router.weight": "mlp.gate.weight"}.get(name, name), shape)


FAMILIES = [
    Family("qwen2moe", "Qwen2MoeForCausalLM", _parse_qwen2_moe, _locate, other_layouts=(locate_in_fused,)),
    Family("qwen3moe", "Qwen3MoeForCausalLM", _parse_qwen3_moe, _locate, other_layouts=(locate_in_fused,)),
]
