"""GPT-2 and GPT-NeoX (Pythia): LayerNorm, biases, an MLP without a gate, q, k and v stored as one.

GPT-2 has learned positions and stores matrices with their inputs first. GPT-NeoX rotates a part of each head, and its
attention and MLP read the same stream.
"""

from typing import Any

from onward.models.families.common_fields import ACTIVATIONS, rope
from onward.models.families.config_fields import ConfigFields
from onward.models.families.family import Family, Pick, TensorSource
from onward.models.tensor_names import EMBED, FINAL_NORM, FINAL_NORM_BIAS, LM_HEAD, POSITIONS, Shape
from onward.proto.model import ModelConfig

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_BIASED = {"norm": "layer", "norm_bias": True, "gated_mlp": False, "mlp_bias": True}


def _parse_gpt2(fields: ConfigFields) -> dict[str, Any]:
    hidden, heads = fields.integer("n_embd"), fields.integer("n_head")
    fields.refuse("scale_attn_by_inverse_layer_idx", "add_cross_attention")
    fields.ignore("reorder_and_upcast_attn")  # another order of the same operations
    return _BIASED | {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("n_inner", 4 * hidden),
        "num_layers": fields.integer("n_layer"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": fields.integer("n_positions", 1024),
        "rms_norm_eps": fields.number("layer_norm_epsilon", 1e-5),
        "rope_theta": 10_000.0,
        "activation": fields.choice("activation_function", ACTIVATIONS, "gelu_new"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings", True),
        "learned_positions": True,
        "qkv_bias": True,
        "o_bias": True,
        "query_scale": None if fields.flag("scale_attn_weights", True) else 1.0,
    }


_GPT2_NAMES = {
    EMBED: "wte.weight",
    POSITIONS: "wpe.weight",
    FINAL_NORM: "ln_f.weight",
    FINAL_NORM_BIAS: "ln_f.bias",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}


def _locate_gpt2(name: str, shape: Shape, config: ModelConfig) -> TensorSource:
    if name in _GPT2_NAMES:
        return TensorSource(_GPT2_NAMES[name], shape)
    stem, _, kind = name.rpartition(".")
    if stem in _QKV:
        start, hidden = _QKV.index(stem) * config.hidden_size, config.hidden_size
        stored = f"attn.c_attn.{kind}"
        if kind == "bias":
            return TensorSource(stored, (3 * hidden,), lambda array: array[start : start + hidden])
        return TensorSource(stored, (hidden, 3 * hidden), lambda array: array[:, start : start + hidden].T)
    stored = f"{_GPT2_NAMES.get(stem, stem)}.{kind}"
    if len(shape) == 2 and stem in _GPT2_NAMES:
        return TensorSource(stored, shape[::-1], lambda array: array.T)
    return TensorSource(stored, shape)


def _parse_neox(fields: ConfigFields) -> dict[str, Any]:
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    has_bias = fields.flag("attention_bias", True)
    found = _BIASED | {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": fields.integer("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": fields.integer("max_position_embeddings", 2048),
        "rms_norm_eps": fields.number("layer_norm_eps", 1e-5),
        "activation": fields.choice("hidden_act", ACTIVATIONS, "gelu"),
        "tie_word_embeddings": fields.flag("tie_word_embeddings"),
        "parallel_block": fields.flag("use_parallel_residual", True),
        "qkv_bias": has_bias,
        "o_bias": has_bias,
    }
    theta, partial = fields.number("rotary_emb_base", 10_000.0), fields.number("rotary_pct", 0.25)
    return found | rope(fields, found, theta=theta, partial=partial)


_NEOX_NAMES = {
    EMBED: "gpt_neox.embed_in.weight",
    FINAL_NORM: "gpt_neox.final_layer_norm.weight",
    FINAL_NORM_BIAS: "gpt_neox.final_layer_norm.bias",
    LM_HEAD: "embed_out.weight",
    "self_attn.o_proj": "attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


def _locate_neox(name: str, shape: Shape, config: ModelConfig) -> TensorSource:
    """Locates tensors of GPT-NeoX. `query_key_value` has, head by head, the rows of q, of k and of v."""
    if name in _NEOX_NAMES:
        return TensorSource(_NEOX_NAMES[name], shape)
    stem, _, kind = name.rpartition(".")
    if stem in _QKV:
        pick = _part_of_heads(_QKV.index(stem), config)
        return TensorSource(f"attention.query_key_value.{kind}", (3 * shape[0], *shape[1:]), pick)
    return TensorSource(f"{_NEOX_NAMES.get(stem, stem)}.{kind}", shape)


def _part_of_heads(part: int, config: ModelConfig) -> Pick:
    def pick(array: Any) -> Any:
        by_head = array.reshape(config.num_heads, 3, config.head_dim, *array.shape[1:])
        return by_head[:, part].reshape(-1, *array.shape[1:])

    return pick


_MASKS = (".attn.bias", ".attn.masked_bias")
_NEOX_MASKS = (".attention.bias", ".attention.masked_bias")

FAMILIES = [
    Family("gpt2", "GPT2LMHeadModel", _parse_gpt2, _locate_gpt2, "h.", ("transformer.", ""), ignored=_MASKS),
    Family("gptneox", "GPTNeoXForCausalLM", _parse_neox, _locate_neox, "gpt_neox.layers.", ignored=_NEOX_MASKS),
]
