"""What each family's `config.json`, as transformers writes it, becomes; and what is refused."""

from typing import Any

import numpy as np
import pytest
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from onward.errors import StartupError
from onward.models.device_support import IMPLEMENTED, check_supported, needed_fields
from onward.models.loader.config_parser import from_hf
from onward.models.rope_scaling import length_choice, rope_factors
from onward.proto.model import DynamicRope, LayerKind, LinearRope, Llama3Rope, LongRope, ModelConfig, YarnRope
from tests.models import family_models
from tests.models.family_models import CASES, MAX_MODEL_LEN, ORIGINAL, WINDOW, hf_config

SLIDES, FULL, NO_ROPE = LayerKind(WINDOW), LayerKind(), LayerKind(WINDOW, "none")
LOCAL = LayerKind(WINDOW, "local")
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
    ],
)
def test_what_a_family_does_not_compute_is_refused_by_name(name: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        from_hf(raw_config(name) | change)


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
    assert optional - used == {"attention_sinks", "unpadded_head_dim", "local_rope_scaling"}


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_as_transformers_writes_it_has_all_tensors_of_the_model(name: str) -> None:
    model = family_models.make(name)
    assert sum(tensor.size for tensor in model.tensors.values()) == sum(
        parameter.numel() for parameter in model.theirs.parameters()
    )
