"""Locates the tensors of experts in checkpoints: one by one, or all experts of a layer as one tensor."""

import re

from onward.models.families.family import TensorSource
from onward.models.tensor_names import Shape
from onward.proto.model import Experts, ModelConfig

_EXPERT = re.compile(r"mlp\.experts\.(?P<index>\d+)\.(?P<part>gate|up|down)_proj\.(?P<kind>weight|bias)")


def experts_of(config: ModelConfig) -> Experts:
    assert config.experts is not None, "a family of experts has them"
    return config.experts


def parse_expert_name(name: str) -> tuple[int, str, str] | None:
    """Returns the index, the part (`gate`, `up`, `down`) and the kind (`weight`, `bias`) of an expert's tensor; None
    for other tensors."""
    match = _EXPERT.fullmatch(name)
    return None if match is None else (int(match["index"]), match["part"], match["kind"])


def locate_in_fused(name: str, shape: Shape, config: ModelConfig) -> TensorSource:
    """Locates tensors in the layout of transformers 5: `gate_up_proj` [experts, gates then ups, hidden], and
    `down_proj`."""
    found, experts = parse_expert_name(name), experts_of(config)
    if found is None:
        return TensorSource({"mlp.router.weight": "mlp.gate.weight"}.get(name, name), shape)
    index, part, _ = found
    if part == "down":
        return TensorSource("mlp.experts.down_proj", (experts.num_experts, *shape), lambda array: array[index])
    start = shape[0] if part == "up" else 0
    return TensorSource(
        "mlp.experts.gate_up_proj",
        (experts.num_experts, 2 * shape[0], shape[1]),
        lambda array: array[index, start : start + shape[0]],
    )
