"""What each family's `config.json`, as transformers writes it, becomes; and what is refused."""

from typing import Any

import numpy as np
import pytest
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from onward.errors import StartupError
from onward.models.device_support import IMPLEMENTED, check_supported, needed_fields
from onward.models.families.registry import is_ignored
from onward.models.loader.config_parser import from_hf
from onward.models.loader.model_store import check_raw_config
from onward.models.rope_scaling import length_choice, rope_factors
from onward.proto.model import (
    ClampedSwiglu,
    DynamicRope,
    Experts,
    LayerKind,
    LinearRope,
    Llama3Rope,
    LongRope,
    ModelConfig,
    YarnRope,
)
from tests.models import family_models
from tests.models.family_models import CASES, MAX_MODEL_LEN, ORIGINAL, WINDOW, hf_config

SLIDES, FULL, NO_ROPE = LayerKind(WINDOW), LayerKind(), LayerKind(WINDOW, "none")
LOCAL, DENSE = LayerKind(WINDOW, "local"), LayerKind(is_dense=True)
FACTORS = (tuple(1.0 + 0.05 * i for i in range(12)), tuple(1.5 + 0.4 * i for i in range(12)))
GPT2 = {"norm": "layer", "norm_bias": True, "gated_mlp": False, "mlp_bias": True, "qkv_bias": True, "o_bias": True}
GEMMA = {
    "tie_word_embeddings": True, "norm_weight_offset": 1.0, "activation": "gelu_tanh",
    "embedding_multiplier": 96**0.5,
}  # fmt: skip
EXPECTED: dict[str, dict[str, Any]] = {
    "llama": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "llama-linear": {"rope_scaling": LinearRope(4.0)},
    "llama-dynamic": {"rope_scaling": DynamicRope(4.0, ORIGINAL)},
    "llama-llama3": {"rope_scaling": Llama3Rope(8.0, 1.0, 4.0, ORIGINAL)},
    "llama-yarn": {"rope_scaling": YarnRope(4.0, ORIGINAL, 32.0, 1.0, 0.1 * np.log(4.0) + 1, True)},
    "llama-odd-head": {},
    "mistral": {"layers": (SLIDES,) * 3},
    "qwen2": {"qkv_bias": True, "layers": (FULL, SLIDES, SLIDES)},
    "qwen3": {"qkv_bias": True, "o_bias": True, "qk_norm": True, "layers": (SLIDES, FULL, SLIDES)},
    "gemma": GEMMA,
    "gemma2": GEMMA | {
        "post_norm": True, "query_scale": 24**-0.5, "layers": (SLIDES, FULL, SLIDES), "attention_softcap": 5.0,
        "logit_softcap": 8.0,
    },
    "gemma3": GEMMA | {
        "post_norm": True, "query_scale": 24**-0.5, "qk_norm": True, "layers": (LOCAL, FULL, LOCAL),
        "rope_scaling": LinearRope(4.0), "local_rope_theta": 1_000.0,
    },
    "phi3": {
        "rotary_dim": 24, "layers": (SLIDES,) * 3,
        "rope_scaling": LongRope(*FACTORS, ORIGINAL, (1 + np.log(MAX_MODEL_LEN / ORIGINAL) / np.log(ORIGINAL)) ** 0.5),
    },
    "olmo2": {"qk_norm": True, "qk_norm_is_whole": True, "pre_norm": False, "post_norm": True},
    "granite": {
        "query_scale": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_multiplier": 0.2,
    },
    "smollm3": {"layers": (FULL, NO_ROPE, FULL)},
    "gpt2": GPT2 | {"learned_positions": True, "activation": "gelu_tanh"},
    "gptneox": GPT2 | {"parallel_block": True, "activation": "gelu", "rotary_dim": 8},
    "mixtral": {"layers": (SLIDES,) * 3, "experts": Experts(6, 2, 160, renormalize=True)},
    "qwen2moe": {
        "qkv_bias": True, "layers": (SLIDES, DENSE, FULL), "experts": Experts(10, 3, 64, shared_intermediate_size=96),
    },
    "qwen3moe": {
        "qkv_bias": True, "o_bias": True, "qk_norm": True, "layers": (DENSE, FULL, FULL),
        "experts": Experts(10, 3, 64, renormalize=True),
    },
    "qwen3moe-step": {
        "qk_norm": True, "layers": (LayerKind(WINDOW, is_dense=True), SLIDES, LayerKind(WINDOW, is_dense=True)),
        "experts": Experts(10, 3, 64),
    },
    "gptoss": {
        "rope_scaling": YarnRope(4.0, ORIGINAL, 32.0, 1.0, 0.1 * np.log(4.0) + 1, False), "qkv_bias": True,
        "o_bias": True, "mlp_bias": True, "attention_sinks": True, "layers": (SLIDES, FULL, SLIDES),
        "clamped_swiglu": ClampedSwiglu(1.3, 1.5), "experts": Experts(6, 3, 160, renormalize=True, router_bias=True),
    },
    "glm4moe": {
        "rotary_dim": 16, "qkv_bias": True, "qk_norm": True, "layers": (DENSE, FULL, FULL),
        "experts": Experts(12, 3, 64, renormalize=True, shared_intermediate_size=128, shared_is_gated=False,
                           scores="sigmoid", selection_bias=True, num_groups=4, top_groups=2, weight_multiplier=1.5),
    },
    "glm4moe-plain": {
        "rotary_dim": 16,
        "experts": Experts(10, 3, 64, shared_intermediate_size=64, shared_is_gated=False, scores="sigmoid",
                           selection_bias=True),
    },
}  # fmt: skip
ARCHITECTURES = {"Gemma3": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}


def raw_config(name: str, **changes: Any) -> dict[str, Any]:
    prefix = CASES[name][0]
    raw = hf_config(name, **changes).to_dict()
    return raw | {"architectures": [ARCHITECTURES.get(prefix, f"{prefix}ForCausalLM")]}


@pytest.mark.parametrize("name", CASES)
def test_a_config_becomes_the_data_that_its_family_stands_for(name: str) -> None:
    config = from_hf(raw_config(name))
    expected = EXPECTED[name]
    assert set(needed_fields(config)) == set(expected)
    for field, value in expected.items():
        actual = getattr(config, field)
        if isinstance(value, (YarnRope, LongRope)):
            assert actual.attention_factor == pytest.approx(value.attention_factor, rel=1e-12)
            actual, value = (_without_factor(scaling) for scaling in (actual, value))
        assert actual == (pytest.approx(value) if isinstance(value, float) else value), field
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (199, 96, 3)
    assert config.max_position_embeddings == MAX_MODEL_LEN


def _without_factor(scaling: Any) -> dict[str, Any]:
    return {name: getattr(scaling, name) for name in scaling.__struct_fields__ if name != "attention_factor"}


@pytest.mark.parametrize("name", CASES)
def test_a_field_that_no_family_knows_is_refused_by_its_name(name: str) -> None:
    raw = raw_config(name)
    from_hf(raw | {"a_dropout_of_training": 0.3, "_kept_by": "a tool", "use_mirror": False, "mirror": None})
    with pytest.raises(StartupError, match="mirror_strength"):
        from_hf(raw | {"mirror_strength": 0.5})


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ("gemma3", {"sliding_window": None}, "sliding_window"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("mistral", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3", {"max_window_layers": "two", "layer_types": None}, "max_window_layers"),
        ("phi3", {"mlp_bias": True}, "mlp_bias"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gemma2", {"query_pre_attn_scalar": 1e-320}, "query_scale"),
        ("llama-yarn", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}}, "rope"),
        ("phi3", {"original_max_position_embeddings": 1}, "rope"),
        ("gptneox", {"rotary_pct": 0.001, "rope_parameters": None}, "partial_rotary_factor"),
        ("mixtral", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ("mixtral", {"num_local_experts": 1 << 20}, "num_experts"),
        ("qwen2moe", {"shared_expert_intermediate_size": 1 << 30}, "moe_intermediate_size"),
        ("qwen3moe", {"n_group": 4}, "n_group"),
        ("qwen3moe", {"routed_scaling_factor": 2.5}, "routed_scaling_factor"),
        ("qwen3moe", {"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ("qwen3moe", {"use_qk_norm": False}, "use_qk_norm"),
        ("qwen3moe", {"qkv_bias": True}, "qkv_bias"),
        ("qwen3moe", {"shared_expert_intermediate_size": 96}, "shared_expert_intermediate_size"),
        ("qwen3moe", {"mlp_only_layers": [7]}, "mlp_only_layers"),
        ("qwen3moe", {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ("qwen2moe", {"decoder_sparse_step": 9}, "decoder_sparse_step"),
        ("qwen2moe", {"max_window_layers": "two"}, "max_window_layers"),
        ("glm4moe", {"n_group": 5}, "n_group"),
        ("glm4moe", {"n_group": 12}, "n_group"),
        ("glm4moe", {"topk_group": 5}, "topk_group"),
        ("glm4moe", {"num_experts_per_tok": 7}, "topk_group"),
        ("glm4moe", {"first_k_dense_replace": True}, "first_k_dense_replace"),
        ("glm4moe", {"first_k_dense_replace": 3}, "first_k_dense_replace"),
        ("glm4moe", {"scoring_func": "softmax"}, "scoring_func"),
        ("gptoss", {"hidden_act": "gelu"}, "hidden_act"),
        ("gptoss", {"experts_per_token": 2}, "experts_per_token"),
        ("gptoss", {"initial_context_length": 17}, "initial_context_length"),
        ("gptoss", {"rope_parameters": None}, "rope_scaling"),
        ("gptoss", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq.*it has mxfp4"),
    ],
)
def test_what_a_family_does_not_compute_is_refused_by_name(name: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        from_hf(raw_config(name) | change)


@pytest.mark.parametrize("prefix", ["DeepseekV2", "DeepseekV3"])
def test_a_model_with_latent_attention_is_refused_by_its_name_from_its_config_alone(prefix: str) -> None:
    raw = getattr(transformers, f"{prefix}Config")().to_dict() | {"architectures": [f"{prefix}ForCausalLM"]}
    with pytest.raises(StartupError, match=f"architecture is not supported: {prefix}ForCausalLM"):
        check_raw_config("m", raw, "cpu", "auto", None)


def test_layers_that_predict_several_tokens_are_not_read() -> None:
    model = family_models.make("glm4moe")
    assert is_ignored("model.layers.3.eh_proj.weight", model.config)
    assert not is_ignored("model.layers.2.eh_proj.weight", model.config)
    assert not is_ignored("model.layers.30.eh_proj.weight", model.config)


def test_fields_of_published_qwen3_moe_configs_mean_nothing_more() -> None:
    raw = raw_config("qwen3moe")
    published = {
        "use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0, "max_window_layers": 28,
        "router_aux_loss_coef": 0.0, "output_router_logits": False, "rope_scaling": None, "torch_dtype": "bfloat16",
    }  # fmt: skip
    assert from_hf(raw | published) == from_hf(raw)


def test_older_spellings_mean_the_same() -> None:
    gemma3 = raw_config("gemma3")
    old = {key: value for key, value in gemma3.items() if key not in ("rope_parameters", "layer_types")} | {
        "rope_theta": 50_000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_local_base_freq": 1_000.0, "sliding_window_pattern": 2,
    }  # fmt: skip
    assert from_hf(old) == from_hf(gemma3)
    phi3 = raw_config("phi3")
    rope = phi3.pop("rope_parameters")
    scaling = {"type": "su", "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
    old_phi3 = {"rope_scaling": scaling, "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}
    assert from_hf(phi3 | old_phi3) == from_hf(raw_config("phi3"))
    neox = raw_config("gptneox")
    neox.pop("rope_parameters")
    assert from_hf(neox | {"rotary_pct": 0.25, "rotary_emb_base": 10_000}) == from_hf(raw_config("gptneox"))


@pytest.mark.parametrize("max_model_len", [ORIGINAL - 8, ORIGINAL, ORIGINAL + 1, MAX_MODEL_LEN])
@pytest.mark.parametrize("name", ["llama-linear", "llama-dynamic", "llama-llama3", "llama-yarn", "phi3"])
def test_rope_factors_are_those_of_transformers_for_a_text_of_the_longest_length(name: str, max_model_len: int) -> None:
    theirs, config = hf_config(name), from_hf(raw_config(name))
    scaled, attention_factor = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](
        theirs, device="cpu", seq_len=max_model_len
    )
    factors = rope_factors(config.rope_scaling, config.rope_theta, config.rotated_dim, max_model_len)
    plain = factors.theta ** (-np.arange(0, config.rotated_dim, 2) / config.rotated_dim)
    divisors = np.ones(len(plain)) if factors.divisors is None else np.asarray(factors.divisors)
    np.testing.assert_allclose(plain / divisors, scaled.numpy(), rtol=2e-6)
    assert factors.attention_factor == pytest.approx(attention_factor, rel=1e-12)


def test_the_length_decides_about_keys_only_where_the_scaling_says_so() -> None:
    configs = {name: from_hf(raw_config(name)) for name in ("llama-linear", "llama-yarn", "llama-dynamic", "phi3")}

    def differs(name: str, a: int, b: int) -> bool:
        scaling = configs[name].rope_scaling
        same_factors = rope_factors(scaling, 1e4, configs[name].rotated_dim, a) == rope_factors(
            scaling, 1e4, configs[name].rotated_dim, b
        )
        assert same_factors == (length_choice(scaling, a) == length_choice(scaling, b))
        return not same_factors

    assert not differs("llama-linear", 10, 1000)
    assert not differs("llama-yarn", 10, 1000)
    assert not differs("llama-dynamic", 10, ORIGINAL)
    assert differs("llama-dynamic", ORIGINAL + 1, ORIGINAL + 2)
    assert not differs("phi3", ORIGINAL + 1, 1000)
    assert differs("phi3", ORIGINAL, ORIGINAL + 1)


@pytest.mark.parametrize("kind", IMPLEMENTED)
@pytest.mark.parametrize("name", CASES)
def test_a_device_refuses_each_field_that_it_does_not_implement(name: str, kind: str) -> None:
    config = from_hf(raw_config(name, head_dim=32) if name == "llama-odd-head" else raw_config(name))
    missing = [field for field in needed_fields(config) if field not in IMPLEMENTED[kind]]
    if not missing:
        check_supported(config, kind)
        return
    with pytest.raises(StartupError, match=f"model's {missing[0]} .* not supported on {kind}"):
        check_supported(config, kind)


def test_a_draft_layer_of_another_kind_is_refused_by_the_name_of_the_field() -> None:
    with pytest.raises(StartupError, match="norm_weight_offset"):
        check_supported(from_hf(raw_config("gemma2")), "eagle")


def test_every_field_with_a_default_can_be_refused() -> None:
    """A new field of `ModelConfig` is refused everywhere until a device names it."""
    defaults = len(ModelConfig.__struct_defaults__)
    optional = set(ModelConfig.__struct_fields__[-defaults:])
    assert all(fields <= optional for fields in IMPLEMENTED.values())
    used = {field for name in CASES for field in needed_fields(from_hf(raw_config(name)))}
    assert optional - used == {"unpadded_head_dim", "local_rope_scaling"}


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_as_transformers_writes_it_has_all_tensors_of_the_model(name: str) -> None:
    model = family_models.make(name)
    stored = {
        tensor.data_ptr(): tensor.numel() for tensor in model.theirs.state_dict().values()
    }  # tied ones count once
    assert sum(tensor.size for tensor in model.tensors.values()) == sum(stored.values())
