"""A llama GGUF file as a transformers model, without any of our code: only the gguf package and the format's own rules.

(transformers has a GGUF loader of its own, but it wants the accelerate package.)
"""

from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def transformers_model(path: Path) -> Any:
    reader = gguf.GGUFReader(path)

    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads = field("attention.head_count"), field("attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=field("vocab_size"), hidden_size=field("embedding_length"), num_hidden_layers=field("block_count"),
        intermediate_size=field("feed_forward_length"), num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=field("context_length"), rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")}, tie_word_embeddings=True,
    )  # fmt: skip
    weights = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        if "attn_q" in tensor.name or "attn_k" in tensor.name:
            weight = _pairs_to_halves(weight, heads if "attn_q" in tensor.name else kv_heads)
        weights[_their_name(tensor.name)] = weight
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model


def _their_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight"


def _pairs_to_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The format rotates neighbours, transformers rotates the two halves of a head."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
