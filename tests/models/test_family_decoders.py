"""Every family against transformers in float32, and in int8 against float32."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from onward.models.loader.model_store import prepare
from onward.models.loader.weights import open_weights
from onward.models.rope_scaling import rope_factors
from onward.models.tensor_names import expected_tensors
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
from tests.models.checkpoints import int8_arrays
from tests.models.family_models import CASES, MAX_MODEL_LEN, ORIGINAL, WINDOW, FamilyModel
from tests.worker.driver import Driver, prepared

LENGTH = 90
"""Length of prompts: beyond every window and every original context."""
NUM_GREEDY = 64
PRECISIONS = ["float32", "int8"]


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest) -> FamilyModel:
    return family_models.make(request.param)


def driver(config: ModelConfig, tensors: Mapping[str, np.ndarray], precision: str, **settings: Any) -> Driver:
    settings = {"threads": 1, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": LENGTH} | settings
    if precision == "int8":
        return Driver(prepared(config, quantization="int8"), int8_arrays(config, tensors), **settings)
    return Driver(prepared(config, dtype=precision), tensors, **settings)


def of(model: FamilyModel, precision: str = "float32", **settings: Any) -> Driver:
    return driver(model.config, model.tensors, precision, **settings)


def tokens(model: FamilyModel, count: int = LENGTH) -> list[int]:
    return np.random.default_rng(3).integers(0, model.config.vocab_size, count).tolist()


def test_logits_are_those_of_transformers_in_any_chunks(model: FamilyModel) -> None:
    token_ids = tokens(model)
    expected = model.their_logits(token_ids)
    ours = of(model)
    for chunks in ([LENGTH], [7, 16, 1, 2, 64], [50] + [1] * 40):
        error = np.abs(ours.logits(1, token_ids, chunks) - expected).max() / np.abs(expected).max()
        assert error < 1e-4, chunks


def test_greedy_tokens_are_those_of_transformers(model: FamilyModel) -> None:
    ours = of(model)
    request = ours.assign(2, tokens(model), room=NUM_GREEDY)
    [output] = ours.generate([request], NUM_GREEDY)
    whole = list(request.token_ids) + output
    assert output == model.their_logits(whole)[LENGTH - 1 : -1].argmax(-1).tolist()


def test_hidden_states_are_those_of_transformers(model: FamilyModel) -> None:
    """The last norm's, which embeddings are made of."""
    import torch

    token_ids = tokens(model)
    padded = token_ids + [0] * (MAX_MODEL_LEN - LENGTH)
    with torch.inference_mode():
        expected = (
            model.theirs.base_model(torch.tensor([padded]), use_cache=False).last_hidden_state[0, :LENGTH].numpy()
        )
    for precision, limit in (("float32", 1e-4), ("int8", 0.25)):
        ours = of(model, precision)
        ours.logits(1, token_ids, [LENGTH])
        hidden = ours.runner.device._decoder.last_hidden_states()  # pyright: ignore[reportAttributeAccessIssue]
        error = np.abs(hidden - expected).mean() / expected.std()
        assert error < limit, precision


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_floats_stay_close_to_float32(model: FamilyModel, dtype: str) -> None:
    token_ids = tokens(model)
    exact = model.their_logits(token_ids)
    ours = of(model, dtype).logits(0, token_ids, [LENGTH])
    assert np.abs(ours - exact).mean() < (0.12 if model.config.experts else 0.06) * exact.std()


def test_int8_stays_close_to_float32(model: FamilyModel) -> None:
    """Where a rounded score chooses another expert, a row differs by more than rounding."""
    assert family_models.int8_error(model) < (0.18 if model.config.experts else 0.09)


def test_int8_logits_have_the_same_bits_in_any_chunking_and_on_several_threads(model: FamilyModel) -> None:
    token_ids = tokens(model)
    whole = of(model, "int8").logits(0, token_ids, [LENGTH])
    for chunks, threads in (([7, 16, 1, 2, 64], 1), ([50] + [1] * 40, 2)):
        again = of(model, "int8", threads=threads).logits(3, token_ids, chunks)
        np.testing.assert_array_equal(again, whole)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_tokens", [1, WINDOW, 30])
def test_a_worker_that_comes_after_a_killed_one_goes_on_with_the_same_tokens(
    model: FamilyModel, precision: str, num_tokens: int
) -> None:
    """It gets the tokens so far, and computes all of them again in other chunks."""
    first = of(model, precision)
    request = first.assign(0, tokens(model), room=40)
    [undisturbed] = first.generate([request], 40)
    second = of(model, precision, max_num_batched_tokens=17, max_num_seqs=17)
    known = list(request.token_ids) + undisturbed[:num_tokens]
    again = second.assign(1, known, room=40, num_prompt=LENGTH)
    second.step(assign=[again])
    [rest] = second_outputs(second, again, 40 - num_tokens)
    assert undisturbed[:num_tokens] + rest == undisturbed


def second_outputs(runner: Driver, request: Any, count: int) -> list[list[int]]:
    from onward.proto.step import RunSlot, SlotTokens

    left = len(request.token_ids)
    while left > 1:
        chunk = min(left - 1, 17)
        runner.step(run=[RunSlot(request.slot, request.slot_epoch, chunk)])
        left -= chunk
    output: list[int] = []
    for _ in range(count):
        [event] = runner.step(run=[RunSlot(request.slot, request.slot_epoch, 1)])
        assert isinstance(event, SlotTokens)
        output += event.token_ids
    return [output]


def test_the_text_part_of_a_gemma_3_for_images_is_served(tmp_path: Path) -> None:
    import torch
    import transformers

    text = family_models.make("gemma3")
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    theirs = transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(text_config=text.theirs.config.to_dict(), vision_config=vision, mm_tokens_per_image=1)
    ).float()
    theirs.model.language_model.load_state_dict(text.theirs.model.state_dict())
    theirs.save_pretrained(tmp_path)
    model = prepare(str(tmp_path), cache_dir=tmp_path / "cache")
    assert model.config == text.config
    weights = open_weights(model)
    assert set(weights) == set(text.tensors)
    for name, tensor in text.tensors.items():
        np.testing.assert_array_equal(np.asarray(torch.as_tensor(weights[name])), tensor)


def test_kv_passes_only_between_instances_that_chose_the_same_rope_factors() -> None:
    def layout(name: str, max_model_len: int) -> str:
        device = of(family_models.make(name), max_model_len=max_model_len).runner.device
        assert device.kv_memory is not None
        return device.kv_memory.layout.name

    assert layout("phi3", ORIGINAL) != layout("phi3", ORIGINAL + 1) == layout("phi3", MAX_MODEL_LEN)
    assert layout("llama-dynamic", ORIGINAL + 1) != layout("llama-dynamic", ORIGINAL + 2)
    assert layout("llama-yarn", ORIGINAL) == layout("llama-yarn", MAX_MODEL_LEN)


SLIDES, FULL = LayerKind(WINDOW), LayerKind()
LONG = (tuple(1.0 + 0.05 * i for i in range(12)), tuple(1.5 + 0.4 * i for i in range(12)))
GLM = Experts(
    12, 3, 64, renormalize=True, shared_intermediate_size=128, shared_is_gated=False, scores="sigmoid",
    selection_bias=True, num_groups=4, top_groups=2, weight_multiplier=1.5,
)  # fmt: skip
CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_theta": 300.0}),
    ("llama", {"rms_norm_eps": 0.1}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"qkv_bias": False}),
    ("llama", {"o_bias": False}),
    ("llama", {"mlp_bias": False}),
    ("llama", {"activation": "gelu"}),
    ("llama", {"activation": "gelu_tanh"}),
    ("llama", {"activation": "relu"}),
    ("gptneox", {"activation": "gelu_tanh"}),
    ("llama", {"gated_mlp": False}),
    ("llama", {"query_scale": 0.4}),
    ("llama", {"rotary_dim": 16}),
    ("llama", {"attention_softcap": 3.0}),
    ("llama", {"attention_sinks": True}),
    ("llama", {"residual_multiplier": 0.7}),
    ("llama", {"learned_positions": True}),
    ("llama", {"rope_scaling": LinearRope(3.0)}),
    ("llama-linear", {"rope_scaling": LinearRope(3.9)}),
    ("llama-dynamic", {"rope_scaling": DynamicRope(3.0, ORIGINAL)}),
    ("llama-dynamic", {"rope_scaling": DynamicRope(4.0, ORIGINAL + 9)}),
    ("llama-llama3", {"rope_scaling": Llama3Rope(7.0, 1.0, 4.0, ORIGINAL)}),
    ("llama-llama3", {"rope_scaling": Llama3Rope(8.0, 2.0, 4.0, ORIGINAL)}),
    ("llama-llama3", {"rope_scaling": Llama3Rope(8.0, 1.0, 8.0, ORIGINAL)}),
    ("llama-llama3", {"rope_scaling": Llama3Rope(8.0, 1.0, 4.0, ORIGINAL + 9)}),
    ("llama-yarn", {"rope_scaling": YarnRope(3.0, ORIGINAL, 32.0, 1.0, 1.14, True)}),
    ("llama-yarn", {"rope_scaling": YarnRope(4.0, ORIGINAL + 300, 32.0, 1.0, 1.14, True)}),
    ("llama-yarn", {"rope_scaling": YarnRope(4.0, ORIGINAL, 1.5, 1.0, 1.14, True)}),
    ("llama-yarn", {"rope_scaling": YarnRope(4.0, ORIGINAL, 32.0, 0.01, 1.14, True)}),
    ("llama-yarn", {"rope_scaling": YarnRope(4.0, ORIGINAL, 32.0, 1.0, 1.3, True)}),
    ("llama-yarn", {"rope_scaling": YarnRope(4.0, ORIGINAL, 32.0, 1.0, 1.14, False)}),
    ("phi3", {"rope_scaling": LongRope(LONG[0], LONG[0], ORIGINAL, 1.17)}),
    ("phi3", {"rope_scaling": LongRope(*LONG, MAX_MODEL_LEN, 1.17)}),
    ("phi3", {"rope_scaling": LongRope(*LONG, ORIGINAL, 1.0)}),
    ("llama-odd-head", {"unpadded_head_dim": 18, "head_dim": 20}),
    ("mistral", {"layers": (FULL, SLIDES, SLIDES)}),
    ("mistral", {"layers": (LayerKind(WINDOW + 1), SLIDES, SLIDES)}),
    ("mistral", {"layers": (SLIDES, SLIDES, LayerKind(WINDOW, "none"))}),
    ("qwen3", {"qk_norm": False}),
    ("gemma", {"norm_weight_offset": 0.5}),
    ("gemma", {"embedding_multiplier": 1.0}),
    ("gemma2", {"pre_norm": False}),
    ("gemma2", {"post_norm": False}),
    ("gemma2", {"attention_softcap": None}),
    ("gemma2", {"logit_softcap": None}),
    ("gemma2", {"residual_multiplier": 0.7}),
    ("gemma3", {"local_rope_theta": 20.0}),
    ("gemma3", {"local_rope_scaling": LinearRope(2.0)}),
    ("gemma3", {"layers": (SLIDES, FULL, LayerKind(WINDOW, "local"))}),
    ("olmo2", {"qk_norm_is_whole": False}),
    ("granite", {"logits_multiplier": 0.3}),
    ("granite", {"residual_multiplier": 1.0}),
    ("gpt2", {"norm": "rms"}),
    ("gpt2", {"norm_bias": False}),
    ("gpt2", {"learned_positions": False}),
    ("gptneox", {"parallel_block": False}),
    ("mixtral", {"experts": Experts(6, 1, 160, renormalize=True)}),
    ("qwen2moe", {"experts": Experts(10, 3, 64)}),
    ("qwen2moe", {"experts": Experts(10, 3, 64, shared_intermediate_size=64)}),
    ("qwen3moe", {"experts": None}),
    ("qwen3moe", {"experts": Experts(9, 3, 64, renormalize=True)}),
    ("qwen3moe", {"experts": Experts(10, 2, 64, renormalize=True)}),
    ("qwen3moe", {"experts": Experts(10, 3, 32, renormalize=True)}),
    ("qwen3moe", {"experts": Experts(10, 3, 64)}),
    ("qwen3moe", {"experts": Experts(10, 3, 64, renormalize=True, router_bias=True)}),
    ("qwen3moe", {"experts": Experts(10, 3, 64, renormalize=True, shared_intermediate_size=96)}),
    ("qwen3moe", {"layers": (FULL, FULL, FULL)}),
    ("qwen3moe", {"layers": (LayerKind(is_dense=True), LayerKind(is_dense=True), FULL)}),
    ("gptoss", {"clamped_swiglu": None}),
    ("gptoss", {"clamped_swiglu": ClampedSwiglu(1.2, 1.5)}),
    ("gptoss", {"clamped_swiglu": ClampedSwiglu(1.3, 1.4)}),
    ("gptoss", {"mlp_bias": False}),
    ("gptoss", {"attention_sinks": False}),
    ("gptoss", {"experts": Experts(6, 3, 160, renormalize=True)}),
    *[
        ("glm4moe", {"experts": msgspec.structs.replace(GLM, **change)})
        for change in (
            {"shared_is_gated": True},
            {"scores": "softmax", "selection_bias": False, "num_groups": 1, "top_groups": 1},
            {"selection_bias": False},
            {"num_groups": 3},
            {"top_groups": 3},
            {"weight_multiplier": 1.0},
            {"renormalize": False},
            {"top_k": 2},
        )
    ],
]


def changed_tensors(model: FamilyModel, config: ModelConfig) -> dict[str, np.ndarray]:
    """The model's own where it has them, random ones where the changed config needs more."""
    tensors: dict[str, np.ndarray] = {}
    for name, shape in expected_tensors(config).items():
        old = model.tensors.get(name)
        is_known = old is not None and old.shape == shape
        tensors[name] = old if is_known else np.random.default_rng(1).standard_normal(shape, dtype=np.float32)
    return tensors


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("name", "change"), CHANGES, ids=str)
def test_a_change_of_any_field_changes_the_logits(name: str, change: dict[str, Any], precision: str) -> None:
    model = family_models.make(name)
    token_ids = tokens(model)
    config = msgspec.structs.replace(model.config, **change)
    if isinstance(config.rope_scaling, (LongRope, YarnRope)):
        assert rope_factors(config.rope_scaling, 1e4, config.rotated_dim, MAX_MODEL_LEN)
    before = family_models.logits_of(name, precision)
    after = driver(config, changed_tensors(model, config), precision).logits(0, token_ids, [LENGTH])
    assert np.abs(after - before).max() > 1e-4 * np.abs(before).max()


def test_every_field_is_among_those_that_are_changed() -> None:
    defaults = len(ModelConfig.__struct_defaults__)
    optional = set(ModelConfig.__struct_fields__[-defaults:]) | {"rope_theta", "rms_norm_eps"}
    assert {field for _, change in CHANGES for field in change} - {"head_dim"} == optional


def test_every_field_of_experts_is_among_those_that_are_changed() -> None:
    changed = {
        field
        for name, change in CHANGES
        if (experts := change.get("experts")) is not None
        for field in Experts.__struct_fields__
        if getattr(experts, field) != getattr(family_models.make(name).config.experts, field)
    }
    assert changed == set(Experts.__struct_fields__)
