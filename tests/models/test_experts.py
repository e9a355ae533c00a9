"""Mixtures of experts on every device: which experts a row gets, and what they give."""

from typing import Any

import msgspec
import numpy as np
import pytest

from onward.errors import StartupError
from onward.models.device_support import check_supported
from onward.models.tensor_names import expected_tensors
from onward.proto.model import ClampedSwiglu, Experts, LayerKind, ModelConfig
from tests.models.checkpoints import int8_arrays
from tests.models.int8_reference import reference_logits
from tests.worker.cuda.small_model import DeviceDriver
from tests.worker.driver import Driver, prepared

LENGTH = 40
EXPERTS = Experts(num_experts=6, top_k=2, intermediate_size=64, renormalize=True, router_bias=True)
CONFIG = ModelConfig(
    architecture="qwen3moe", vocab_size=199, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=32, max_position_embeddings=128, rms_norm_eps=1e-6, rope_theta=10_000.0, qk_norm=True,
    experts=EXPERTS,
)  # fmt: skip
SETTINGS: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": LENGTH, "num_kv_blocks": 16}
DEVICES = ["cpu float", "cpu int8", "torch"]
REFERENCES: dict[str, dict[str, Any]] = {
    "top-2": {},
    "softmax-over-all": {"renormalize": False},
    "no-bias": {"router_bias": False},
    "shared": {"shared_intermediate_size": 96, "renormalize": False},
    "one-of-five": {"num_experts": 5, "top_k": 1},
    "all-of-17": {"num_experts": 17, "top_k": 17},
    "sigmoid": {"scores": "sigmoid", "weight_multiplier": 1.5},
    "sigmoid-biased": {"scores": "sigmoid", "selection_bias": True, "renormalize": False},
    "groups": {"scores": "sigmoid", "selection_bias": True, "num_experts": 18, "num_groups": 6, "top_groups": 2},
    "shared-ungated": {"scores": "sigmoid", "shared_intermediate_size": 96, "shared_is_gated": False},
}


def tensors_of(config: ModelConfig) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(5)
    tensors: dict[str, np.ndarray] = {}
    for name, shape in expected_tensors(config).items():
        values = generator.standard_normal(shape, dtype=np.float32)
        is_norm, scale = name.endswith("norm.weight"), 4.0 if ".router." in name else 1.5
        tensors[name] = 1 + 0.2 * values if is_norm else values * np.float32(scale * shape[-1] ** -0.5)
    return tensors


def driver(config: ModelConfig, tensors: dict[str, np.ndarray], device: str) -> Driver:
    if device == "torch":
        return DeviceDriver(config, weights=tensors, **SETTINGS)
    if device == "cpu int8":
        arrays = int8_arrays(config, tensors)
        return Driver(prepared(config, quantization="int8"), arrays, threads=1, **SETTINGS)
    return Driver(prepared(config), tensors, threads=1, **SETTINGS)


def logits(config: ModelConfig, tensors: dict[str, np.ndarray], device: str) -> np.ndarray:
    token_ids = np.random.default_rng(3).integers(0, config.vocab_size, LENGTH).tolist()
    return driver(config, tensors, device).logits(0, token_ids, [LENGTH - 3, 1, 2])[:, : config.vocab_size]


def with_router(tensors: dict[str, np.ndarray], bias: list[float]) -> dict[str, np.ndarray]:
    """Every row's scores are these."""
    changed = dict(tensors)
    for name, array in tensors.items():
        if name.endswith("router.weight"):
            changed[name] = np.zeros_like(array)
        elif name.endswith("router.bias"):
            changed[name] = np.array(bias, np.float32)
    return changed


def with_other_experts(tensors: dict[str, np.ndarray], *indices: int) -> dict[str, np.ndarray]:
    """Other weights for these experts."""
    parts = [f".experts.{index}." for index in indices]
    return {name: -array if any(part in name for part in parts) else array for name, array in tensors.items()}


@pytest.mark.parametrize("name", REFERENCES)
def test_int8_experts_equal_a_plain_reference_of_the_scheme(name: str) -> None:
    config = msgspec.structs.replace(CONFIG, experts=msgspec.structs.replace(EXPERTS, **REFERENCES[name]))
    tensors = tensors_of(config)
    token_ids = np.random.default_rng(3).integers(0, config.vocab_size, LENGTH).tolist()
    expected = reference_logits(config, int8_arrays(config, tensors), token_ids)
    error = np.abs(logits(config, tensors, "cpu int8") - expected) / np.abs(expected).max()
    assert np.median(error) < 1e-3
    assert error.max() < 0.05


def test_int8_experts_with_biases_and_a_clamped_gate_equal_a_plain_reference() -> None:
    config = msgspec.structs.replace(CONFIG, mlp_bias=True, clamped_swiglu=ClampedSwiglu(1.7, 1.0))
    tensors = tensors_of(config)
    token_ids = np.random.default_rng(3).integers(0, config.vocab_size, LENGTH).tolist()
    expected = reference_logits(config, int8_arrays(config, tensors), token_ids)
    error = np.abs(logits(config, tensors, "cpu int8") - expected) / np.abs(expected).max()
    assert np.median(error) < 1e-3
    assert error.max() < 0.05


@pytest.mark.parametrize("device", DEVICES)
def test_every_expert_counts(device: str) -> None:
    tensors = tensors_of(CONFIG)
    before = logits(CONFIG, tensors, device)
    for index in range(EXPERTS.num_experts):
        assert np.abs(logits(CONFIG, with_other_experts(tensors, index), device) - before).max() > 1e-3, index


@pytest.mark.parametrize("device", DEVICES)
def test_of_equal_scores_the_experts_with_the_lowest_index_are_chosen_and_the_others_do_not_count(device: str) -> None:
    """The others have no rows at all."""
    for bias, chosen in (([0.0] * 6, (0, 1)), ([0.0, 1.0, 0.0, 1.0, 1.0, -1.0], (1, 3)), ([0.0] * 5 + [1.0], (0, 5))):
        tensors = with_router(tensors_of(CONFIG), bias)
        before = logits(CONFIG, tensors, device)
        others = [index for index in range(EXPERTS.num_experts) if index not in chosen]
        np.testing.assert_array_equal(logits(CONFIG, with_other_experts(tensors, *others), device), before)
        for index in chosen:
            assert np.abs(logits(CONFIG, with_other_experts(tensors, index), device) - before).max() > 1e-3


@pytest.mark.parametrize("device", DEVICES)
def test_experts_come_from_the_group_with_the_two_best_and_of_equal_groups_from_the_first(device: str) -> None:
    grouped = msgspec.structs.replace(EXPERTS, scores="sigmoid", selection_bias=True, num_groups=3, top_groups=1)
    config = msgspec.structs.replace(CONFIG, experts=grouped)
    cases = (([0.0] * 6, (0, 1)), ([0.5, 0.0, 0.3, 0.3, 0.0, 0.0], (2, 3)), ([0.5, 0.0, 0.0, 0.5, 0.25, 0.25], (0, 1)))
    for bias, chosen in cases:
        tensors = with_router(tensors_of(config), [0.0] * 6)
        tensors |= {name: np.array(bias, np.float32) for name in tensors if name.endswith("selection_bias")}
        before = logits(config, tensors, device)
        others = [index for index in range(6) if index not in chosen]
        np.testing.assert_array_equal(logits(config, with_other_experts(tensors, *others), device), before)
        for index in chosen:
            assert np.abs(logits(config, with_other_experts(tensors, index), device) - before).max() > 1e-3


@pytest.mark.parametrize("device", DEVICES)
def test_one_expert_for_all_rows_is_an_mlp(device: str) -> None:
    config = msgspec.structs.replace(CONFIG, experts=msgspec.structs.replace(EXPERTS, top_k=1))
    tensors = with_router(tensors_of(config), [0.0, 0.0, 9.0, 0.0, 0.0, 0.0])
    dense = msgspec.structs.replace(config, experts=None, intermediate_size=EXPERTS.intermediate_size)
    own = {
        name: tensors[name.replace("mlp.", "mlp.experts.2.")] if ".mlp." in name else tensors[name]
        for name in expected_tensors(dense)
    }
    expected = logits(dense, own, device)
    assert np.abs(logits(config, tensors, device) - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("device", DEVICES)
def test_a_router_whose_scores_are_no_numbers_gives_no_logits(device: str) -> None:
    """A fault must show, and no expert beyond the last is read."""
    tensors = tensors_of(CONFIG)
    broken = tensors | {"model.layers.0.mlp.router.weight": np.full((6, CONFIG.hidden_size), np.nan, np.float32)}
    assert np.isnan(logits(CONFIG, broken, device)).all()


def test_layers_may_be_dense() -> None:
    dense = LayerKind(is_dense=True)
    config = msgspec.structs.replace(CONFIG, layers=(dense, LayerKind()))
    assert config.layer_experts(0) is None
    assert config.layer_experts(1) == EXPERTS
    assert "model.layers.0.mlp.gate_proj.weight" in expected_tensors(config)
    assert "model.layers.1.mlp.gate_proj.weight" not in expected_tensors(config)


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        ("cuda", {}, "experts"),
        ("cuda", {"experts": None, "clamped_swiglu": ClampedSwiglu(1.0, 1.0)}, "clamped_swiglu"),
        ("cpu float", {"parallel_block": True}, "parallel_block"),
        ("torch", {"gated_mlp": False}, "gated_mlp"),
        ("cpu int8", {"experts": msgspec.structs.replace(EXPERTS, num_groups=2)}, "num_groups"),
        ("cpu int8", {"experts": msgspec.structs.replace(EXPERTS, intermediate_size=40)}, "experts.intermediate_size"),
        (
            "cpu int8",
            {"experts": msgspec.structs.replace(EXPERTS, shared_intermediate_size=40)},
            "experts.shared_intermediate_size",
        ),
    ],
)
def test_what_a_device_does_not_compute_is_refused_by_name(kind: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        check_supported(msgspec.structs.replace(CONFIG, **change), kind)
