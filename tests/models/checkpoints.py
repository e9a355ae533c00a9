"""Small random checkpoints in every form that the loaders read."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from onward.kernels.quantize import quantize_model
from onward.models.head_padding import PaddedTensors, padded_config
from onward.models.tensor_names import expected_tensors
from onward.proto.model import Experts, ModelConfig, YarnRope

HF_NAMES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}  # fmt: skip
VARIANTS = [(architecture, tied) for architecture in ("llama", "qwen2", "qwen3") for tied in (True, False)]


def tiny_config(architecture: str = "llama", **changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16 if architecture == "qwen3" else 8,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "qkv_bias": architecture == "qwen2",
        "qk_norm": architecture == "qwen3",
    }
    return ModelConfig(**(values | changes))


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {
        name: generator.standard_normal(shape, dtype=np.float32) for name, shape in expected_tensors(config).items()
    }


def int8_arrays(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As a converted folder has them: heads are padded for the kernels."""
    padded = padded_config(config, 32)
    return dict(quantize_model(padded, PaddedTensors(tensors, config, padded.head_dim)))


def hf_json(config: ModelConfig, **more: Any) -> dict[str, Any]:
    """In the oldest spelling, by hand: what reads it is not to be tested with what writes it elsewhere in Onward."""
    return {
        "architectures": [HF_NAMES[config.architecture]],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": 2,
        **({} if config.experts is None else _hf_experts(config.experts)),
        **more,
    }


def _hf_experts(experts: Experts) -> dict[str, Any]:
    return {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.renormalize,
    }


def write_folder(folder: Path, config: ModelConfig, tensors: Mapping[str, np.ndarray], num_shards: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_json(config)))
    if num_shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[shard::num_shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


GGUF_ARCHITECTURES = {"mixtral": "llama", "gptoss": "gpt-oss"}
"""Where GGUF has another name."""


def gguf_name(name: str, architecture: str = "llama") -> str:
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "mlp.router": "ffn_gate_inp",
        "mlp.experts.gate_proj": "ffn_gate_exps",
        "mlp.experts.up_proj": "ffn_up_exps",
        "mlp.experts.down_proj": "ffn_down_exps",
        "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
        "mlp.shared_expert.up_proj": "ffn_up_shexp",
        "mlp.shared_expert.down_proj": "ffn_down_shexp",
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    }
    if architecture == "gptoss":
        parts["post_attention_layernorm"] = "post_attention_norm"
    if name.endswith(".sinks"):
        return f"blk.{name.split('.')[2]}.attn_sinks.weight"
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{parts[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{parts[part]}.{kind}"


def gguf_tensor(name: str, array: np.ndarray, config: ModelConfig) -> np.ndarray:
    """The array as a converter to GGUF lays it out: `llama` interleaves the halves of q's and k's heads."""
    for part, num_heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
        if config.architecture in ("llama", "mixtral") and f".{part}." in name:
            halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
            return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
    return array


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    *,
    quantized: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    raw: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    fields: Mapping[str, Any] | None = None,
) -> Path:
    """`quantized` names tensors to be stored in another type than float32; `raw` gives the blocks themselves."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, GGUF_ARCHITECTURES.get(config.architecture, config.architecture))
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_eos_token_id(2)
    for key, value in (fields or {}).items():
        _add_field(writer, key, value)
    if config.experts is not None:
        _add_expert_fields(writer, config)
    stored: dict[str, tuple[list[np.ndarray], gguf.GGMLQuantizationType | None]] = {}
    for name, array in tensors.items():
        array = gguf_tensor(name, array, config)
        kind = (quantized or {}).get(name)
        if name in (raw or {}):
            array, kind = (raw or {})[name]
        elif kind is not None:
            array = gguf.quantize(array, kind)
        fused = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        stored.setdefault(gguf_name(fused, config.architecture), ([], kind))[0].append(array)
    for name, (arrays, kind) in stored.items():
        array = np.stack(arrays) if "_exps." in name else arrays[0]
        writer.add_tensor(name, array[0] if "gate_inp_shexp" in name else array, raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_expert_fields(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    assert config.experts is not None
    writer.add_expert_count(config.experts.num_experts)
    writer.add_expert_used_count(config.experts.top_k)
    if config.architecture == "gptoss":
        window, scaling = config.layer(0).window, config.rope_scaling
        assert window is not None and isinstance(scaling, YarnRope)
        writer.add_sliding_window(window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling.factor)
        writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position_embeddings)


def _add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


GPT2_TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghijklmnopqrstuvwxyz", "ab"],
    "tokenizer.ggml.token_type": [3, 3, 3, *([1] * 27)],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.chat_template": "{{ messages[0].content }}",
}
