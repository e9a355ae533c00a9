"""OLMo2: norms of the sublayers' outputs instead of their inputs, and norms of q and k over all heads together."""

from typing import Any

from onward.models.families.config_fields import ConfigFields
from onward.models.families.family import Family, TensorSource
from onward.models.families.llama import parse_llama
from onward.models.tensor_names import Shape
from onward.proto.model import ModelConfig

_NAMES = {
    "attention_output_norm.weight": "post_attention_layernorm.weight",
    "mlp_output_norm.weight": "post_feedforward_layernorm.weight",
}


def _parse(fields: ConfigFields) -> dict[str, Any]:
    found = parse_llama(fields) | {"pre_norm": False, "post_norm": True, "qk_norm": True, "qk_norm_is_whole": True}
    return found | {"rms_norm_eps": fields.number("rms_norm_eps", 1e-5)}


def _locate(name: str, shape: Shape, config: ModelConfig) -> TensorSource:
    return TensorSource(_NAMES.get(name, name), shape)


FAMILIES = [Family("olmo2", "Olmo2ForCausalLM", _parse, _locate)]
