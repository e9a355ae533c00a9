"""GLM-4.5: dense first layers, then experts whose scores are sigmoids, and a shared expert without a gate."""

from typing import Any

from onward.models.families.config_fields import ConfigFields
from onward.models.families.expert_tensors import locate_in_fused
from onward.models.families.family import Family, TensorSource
from onward.models.families.llama import parse_common
from onward.models.tensor_names import Shape
from onward.proto.model import Experts, LayerKind, ModelConfig

_PARTIAL_ROTARY = 0.5
_SHARED = "mlp.shared_expert."


def _parse(fields: ConfigFields) -> dict[str, Any]:
    found = parse_common(fields, positions=131_072, eps=1e-5, partial=_PARTIAL_ROTARY)
    num_dense = fields.count("first_k_dense_replace", 1)
    size = fields.integer("moe_intermediate_size", 1408)
    if num_dense >= found["num_layers"]:
        raise fields.wrong("first_k_dense_replace", num_dense)
    kinds = tuple(LayerKind(is_dense=layer < num_dense) for layer in range(found["num_layers"]))
    fields.ignore("num_nextn_predict_layers", "num_mtp_layers")  # draft layers, which are not read
    return found | {
        "qkv_bias": fields.flag("attention_bias"),
        "qk_norm": fields.flag("use_qk_norm"),
        "layers": kinds if num_dense else (),
        "experts": Experts(
            num_experts=fields.integer("n_routed_experts", fields.integer("num_local_experts", 128)),
            top_k=fields.integer("num_experts_per_tok", 8),
            intermediate_size=size,
            renormalize=fields.flag("norm_topk_prob", True),
            shared_intermediate_size=size * fields.integer("n_shared_experts", 1),
            shared_is_gated=False,
            scores="sigmoid",
            selection_bias=True,
            num_groups=fields.integer("n_group", 1),
            top_groups=fields.integer("topk_group", 1),
            weight_multiplier=fields.number("routed_scaling_factor", 1.0),
        ),
    }


_NAMES = {"mlp.router.weight": "mlp.gate.weight", "mlp.router.selection_bias": "mlp.gate.e_score_correction_bias"}


def _locate(name: str, shape: Shape, config: ModelConfig) -> TensorSource:
    if name.startswith(_SHARED):
        return TensorSource(f"mlp.shared_experts.{name.removeprefix(_SHARED)}", shape)
    return TensorSource(_NAMES.get(name, name), shape)


def _locate_fused(name: str, shape: Shape, config: ModelConfig) -> TensorSource:
    return locate_in_fused(name, shape, config) if ".experts." in name else _locate(name, shape, config)


FAMILIES = [
    Family("glm4moe", "Glm4MoeForCausalLM", _parse, _locate, other_layouts=(_locate_fused,), has_draft_layers=True)
]
