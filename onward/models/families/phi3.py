"""Phi-3 and Phi-4: a Llama with q, k, v and gate, up stored as one, with longrope, and with partial rope in Phi-4-mini."""

from typing import Any

from onward.models.families.common_fields import ACTIVATIONS, layer_kinds, rope, sizes
from onward.models.families.config_fields import ConfigFields
from onward.models.families.family import Family, TensorSource
from onward.models.tensor_names import Shape
from onward.proto.model import ModelConfig


def _parse(fields: ConfigFields) -> dict[str, Any]:
    found = sizes(fields, positions=4096, eps=1e-5)
    found |= rope(fields, found)
    window = fields.optional_integer("sliding_window")
    fields.refuse("attention_bias", "mlp_bias")
    return found | {
        "activation": fields.choice("hidden_act", ACTIVATIONS, "silu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings"),
        "layers": layer_kinds(
            fields, found["num_layers"], window, default=[window is not None] * found["num_layers"]
        ),
    }  # fmt: skip


def _locate(name: str, shape: Shape, config: ModelConfig) -> TensorSource:
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    starts = {
        "self_attn.q_proj.weight": ("self_attn.qkv_proj.weight", 0, q_size + 2 * kv_size),
        "self_attn.k_proj.weight": ("self_attn.qkv_proj.weight", q_size, q_size + 2 * kv_size),
        "self_attn.v_proj.weight": ("self_attn.qkv_proj.weight", q_size + kv_size, q_size + 2 * kv_size),
        "mlp.gate_proj.weight": ("mlp.gate_up_proj.weight", 0, 2 * inner),
        "mlp.up_proj.weight": ("mlp.gate_up_proj.weight", inner, 2 * inner),
    }
    if name not in starts:
        return TensorSource(name, shape)
    stored, start, num_rows = starts[name]
    return TensorSource(stored, (num_rows, shape[1]), lambda array: array[start : start + shape[0]])


FAMILIES = [Family("phi3", "Phi3ForCausalLM", _parse, _locate)]
