"""The canonical names of tensors in GGUF files. All experts of a layer are one tensor there, with the experts first."""

import re
from collections.abc import Iterator
from dataclasses import replace

from onward.errors import StartupError
from onward.models.loader.gguf_header import TensorInfo

_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",  # in gpt-oss
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_EXPERT_NAMES = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")


def canonical_name(name: str) -> str:
    """Returns the canonical name of a GGUF tensor: `blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`.
    Unknown names are returned as they are, and reported by the caller."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, part, kind = match["layer"], match["part"], match["kind"]
    if layer is None:
        return f"{_GLOBAL_NAMES[part]}.{kind}" if part in _GLOBAL_NAMES else name
    if (part, kind) == ("attn_sinks", "weight"):
        return f"model.layers.{int(layer)}.self_attn.sinks"
    return f"model.layers.{int(layer)}.{_LAYER_NAMES[part]}.{kind}" if part in _LAYER_NAMES else name


def canonical_tensors(info: TensorInfo, num_bytes: int, num_experts: int) -> Iterator[tuple[str, TensorInfo]]:
    """Yields the canonical tensors that a stored tensor contains, with their locations: itself, or one for each expert.
    Raises `StartupError` if it has not the model's number of experts."""
    match = _NAME.fullmatch(info.name)
    if match is None or match["layer"] is None or match["part"] not in _EXPERT_NAMES:
        canonical = canonical_name(info.name)
        # A factor of one output: a vector in the file, a matrix of one row here.
        is_vector = canonical.endswith("shared_expert_gate.weight") and len(info.shape) == 1
        yield canonical, replace(info, shape=(1, *info.shape)) if is_vector else info
        return
    if len(info.shape) < 2 or info.shape[0] != num_experts:
        raise StartupError(f"the tensor {info.name} has the shape {list(info.shape)}, expected {num_experts} experts")
    prefix, part, size = f"model.layers.{int(match['layer'])}.mlp.experts.", match["part"], num_bytes // num_experts
    for expert in range(num_experts):
        location = replace(info, shape=info.shape[1:], offset=info.offset + expert * size)
        yield f"{prefix}{expert}.{_EXPERT_NAMES[part]}.{match['kind']}", location
