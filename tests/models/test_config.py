from typing import Any

import pytest
import transformers

from onward.errors import StartupError
from onward.models.loader.config_parser import from_gguf, from_hf
from onward.proto.model import Experts, Llama3Rope, ModelConfig
from tests.models.checkpoints import HF_NAMES, hf_json, tiny_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


EXPERTS = Experts(num_experts=4, top_k=2, intermediate_size=16, renormalize=True)


def config_of(architecture: str, **changes: Any) -> ModelConfig:
    if architecture == "qwen3moe":
        changes |= {"qk_norm": True, "experts": EXPERTS}
    return tiny_config(architecture, **changes)


@pytest.mark.parametrize("architecture", HF_NAMES)
def test_config_of_each_architecture_is_read(architecture: str) -> None:
    config = config_of(architecture)
    assert from_hf(hf_json(config)) == config


@pytest.mark.parametrize("architecture", HF_NAMES)
def test_config_as_transformers_writes_it_is_read(architecture: str) -> None:
    config = config_of(architecture, rope_theta=50000.0, tie_word_embeddings=False)
    raw = hf_json(config)
    kind: Any = getattr(transformers, HF_NAMES[architecture].replace("ForCausalLM", "Config"))
    written = kind(**{key: value for key, value in raw.items() if key != "rope_theta"}, rope_theta=50000.0)
    assert from_hf(written.to_dict()) == config


def test_rope_scaling_is_read_in_the_old_spelling_and_in_the_new() -> None:
    scaling = Llama3Rope(8.0, 1.0, 4.0, 64)
    expected = tiny_config(rope_theta=500000.0, rope_scaling=scaling)
    old = hf_json(tiny_config()) | {"rope_theta": 500000.0, "rope_scaling": LLAMA3}
    new = hf_json(tiny_config()) | {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}}
    del new["rope_theta"]
    assert from_hf(old) == expected
    assert from_hf(new) == expected


def test_absent_values_have_the_defaults_of_the_family() -> None:
    raw = hf_json(tiny_config())
    for key in ("num_key_value_heads", "head_dim", "rope_theta", "tie_word_embeddings", "rms_norm_eps"):
        del raw[key]
    config = from_hf(raw)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 8, 10000.0)
    assert (config.tie_word_embeddings, config.rms_norm_eps) == (False, 1e-6)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None, "model_type": "bert"}, "bert"),
        ({"rope_scaling": {"type": "spiral", "factor": 4.0}}, "spiral"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters.factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "twist": 3}}, "rope_parameters.twist"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0]}}, "short_factor"),
        ({"partial_rotary_factor": 0.1}, "partial_rotary_factor"),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"hidden_act": "mish"}, "mish"),
        ({"quantization_config": {"quant_method": "eetq"}}, "eetq"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"head_dim": 7}, "head_dim"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        from_hf(hf_json(tiny_config()) | changes)


def test_sliding_window_that_is_switched_off_is_no_obstacle() -> None:
    config = tiny_config("qwen2")
    raw = hf_json(config) | {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1}
    assert from_hf(raw) == config


GGUF_FIELDS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.rope.freq_base": 10000.0,
}
GGUF_SHAPES = {"token_embd.weight": (48, 32)}


def test_gguf_metadata_is_read_and_float32_noise_is_removed() -> None:
    config = from_gguf(GGUF_FIELDS, GGUF_SHAPES)
    assert config == tiny_config()
    assert config.rms_norm_eps == 1e-5


def test_gguf_tensors_tell_of_biases_and_of_untied_embeddings() -> None:
    config = from_gguf(GGUF_FIELDS, GGUF_SHAPES | {"output.weight": (48, 32), "blk.0.attn_q.bias": (32,)})
    assert (config.tie_word_embeddings, config.qkv_bias) == (False, True)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general.architecture": "falcon"}, "falcon"),
        ({"llama.expert_count": 8}, "expert_used_count"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 2}, r"blk\.0\.ffn_up_exps\.weight"),
        ({"llama.attention.sliding_window": 64}, "sliding window"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count"),
        ({"llama.attention.value_length": 16}, "value_length"),
        ({"llama.block_count": None}, "block_count"),
        ({"llama.attention.head_count": 0}, "head_count"),
    ],
)
def test_gguf_features_that_are_not_supported_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        from_gguf(GGUF_FIELDS | changes, GGUF_SHAPES)


def test_gguf_without_embeddings_is_refused() -> None:
    with pytest.raises(StartupError, match="token_embd"):
        from_gguf(GGUF_FIELDS, {})
