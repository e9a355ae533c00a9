"""Mixtral: a Mistral with experts in every layer."""

from typing import Any

from onward.models.families.common_fields import layer_kinds
from onward.models.families.config_fields import ConfigFields
from onward.models.families.expert_tensors import locate_in_fused, parse_expert_name
from onward.models.families.family import Family, TensorSource
from onward.models.families.llama import parse_common
from onward.models.tensor_names import Shape
from onward.proto.model import Experts, ModelConfig


def _parse(fields: ConfigFields) -> dict[str, Any]:
    found = parse_common(fields, positions=131_072, theta=1_000_000.0, eps=1e-5)
    window = fields.optional_integer("sliding_window")
    fields.ignore("router_jitter_noise", "router_aux_loss_coef")  # used in training only
    return found | {
        "layers": layer_kinds(fields, found["num_layers"], window, default=[window is not None] * found["num_layers"]),
        "experts": Experts(
            num_experts=fields.integer("num_local_experts", fields.integer("num_experts", 8)),
            top_k=fields.integer("num_experts_per_tok", 2),
            intermediate_size=found["intermediate_size"],
            renormalize=True,
        ),
    }


_PARTS = {"gate": "w1", "up": "w3", "down": "w2"}


def _locate(name: str, shape: Shape, config: ModelConfig) -> TensorSource:
    if name == "mlp.router.weight":
        return TensorSource("block_sparse_moe.gate.weight", shape)
    if (found := parse_expert_name(name)) is None:
        return TensorSource(name, shape)
    index, part, kind = found
    return TensorSource(f"block_sparse_moe.experts.{index}.{_PARTS[part]}.{kind}", shape)


FAMILIES = [Family("mixtral", "MixtralForCausalLM", _parse, _locate, other_layouts=(locate_in_fused,))]
