"""Mixtures of experts in GGUF files: every architecture is read, and experts keep their bits."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from onward.errors import StartupError
from onward.kernels import numpy_reference
from onward.kernels.quantize import interleave_gate_up
from onward.kernels.weight_formats import BLOCK_FORMATS
from onward.models.loader.gguf_file import GgufFile
from onward.models.loader.model_store import prepare
from onward.models.loader.weights import open_weights
from onward.proto.model import Experts, ModelConfig
from tests.models.checkpoints import write_gguf
from tests.models.gguf_expert_models import CONFIGS, tensors_of, write
from tests.models.int8_reference import reference_logits
from tests.worker.driver import Driver

LENGTH = 40


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_and_field_of_each_architecture_comes_back(tmp_path: Path, name: str) -> None:
    config = CONFIGS[name]
    tensors = tensors_of(config)
    file = GgufFile(write_gguf(tmp_path / "model.gguf", config, tensors))
    assert file.config == config
    assert set(file) == set(tensors)
    for tensor, array in tensors.items():
        np.testing.assert_array_equal(file[tensor], array, err_msg=tensor)


@pytest.mark.parametrize("format_name", BLOCK_FORMATS)
def test_experts_keep_the_bits_of_every_format(tmp_path: Path, format_name: str) -> None:
    config = CONFIGS["qwen3moe"]
    expected = write(tmp_path / "model.gguf", config, format_name)
    model = prepare(str(tmp_path / "model.gguf"), cache_dir=tmp_path / "cache")
    assert (model.quantization, model.weight_formats[0]) == ("int8", format_name)
    weights = open_weights(model)
    for layer in range(config.num_layers):
        for expert in range(6):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}."
            gate, up, down = (expected[f"{prefix}{part}_proj.weight"] for part in ("gate", "up", "down"))
            found = f"layers.{layer}.experts.{expert}."
            np.testing.assert_array_equal(_unpacked(weights, found + "down"), down)
            np.testing.assert_array_equal(_unpacked(weights, found + "gate_up"), interleave_gate_up(gate, up))


def _unpacked(weights: Any, name: str) -> np.ndarray:
    return numpy_reference.weights(np.asarray(weights[name]))


def _logits(config: ModelConfig, path: Path, cache: Path, quantization: str) -> np.ndarray:
    model = prepare(str(path), quantization=quantization, cache_dir=cache)
    driver = Driver(model, open_weights(model), threads=1, max_model_len=64, max_num_seqs=LENGTH, num_kv_blocks=16)
    return driver.logits(0, _token_ids(config), [LENGTH - 3, 1, 2])[:, : config.vocab_size]


def _token_ids(config: ModelConfig) -> list[int]:
    return np.random.default_rng(3).integers(0, config.vocab_size, LENGTH).tolist()


@pytest.mark.parametrize("format_name", ["Q4_0", "Q4_K", "Q6_K", "MXFP4"])
def test_logits_equal_a_plain_reference_of_the_scheme(tmp_path: Path, format_name: str) -> None:
    config, path = CONFIGS["qwen3moe"], tmp_path / "model.gguf"
    write(path, config, format_name)
    ours = _logits(config, path, tmp_path / "cache", "int8")
    arrays = dict(open_weights(prepare(str(path), cache_dir=tmp_path / "cache")))
    expected = reference_logits(config, {name: np.asarray(array) for name, array in arrays.items()}, _token_ids(config))
    error = np.abs(ours - expected) / np.abs(expected).max()
    assert np.median(error) < 1e-3
    assert error.max() < 0.05


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_stay_close_to_those_of_the_dequantized_file(tmp_path: Path, name: str) -> None:
    config, path = CONFIGS[name], tmp_path / "model.gguf"
    write(path, config, "MXFP4" if name == "gptoss" else "Q4_K")
    exact = _logits(config, path, tmp_path / "cache", "none")
    ours = _logits(config, path, tmp_path / "cache", "int8")
    assert np.abs(ours - exact).mean() < 0.12 * exact.std()


@pytest.mark.parametrize(
    ("name", "fields", "named"),
    [
        ("qwen3moe", {"qwen3moe.expert_gating_func": 2}, "expert_gating_func 2"),
        ("gptoss", {"gpt-oss.expert_gating_func": 1}, "expert_gating_func 1"),
        ("qwen3moe", {"qwen3moe.expert_weights_scale": 2.5}, "expert_weights_scale 2.5"),
        ("qwen3moe", {"qwen3moe.expert_group_count": 4}, "expert_group_count"),
        ("qwen2moe", {"qwen2moe.leading_dense_block_count": 1}, "leading_dense_block_count"),
        ("mixtral", {"llama.interleave_moe_layer_step": 2}, "interleave_moe_layer_step"),
        ("gptoss", {"gpt-oss.rope.scaling.attn_factor": 0.5}, r"rope\.scaling\.attn_factor"),
        ("gptoss", {"gpt-oss.attention.sliding_window_pattern": 4}, "sliding_window_pattern"),
    ],
)
def test_what_a_file_says_about_experts_and_is_not_computed_is_refused_by_name(
    tmp_path: Path, name: str, fields: dict[str, Any], named: str
) -> None:
    path = write_gguf(tmp_path / "model.gguf", CONFIGS[name], tensors_of(CONFIGS[name]), fields=fields)
    with pytest.raises(StartupError, match=named):
        GgufFile(path)


def test_fields_that_say_what_is_usual_change_nothing(tmp_path: Path) -> None:
    usual = {
        "qwen3moe.expert_gating_func": 1, "qwen3moe.expert_weights_norm": True, "qwen3moe.expert_weights_scale": 1.0,
        "qwen3moe.expert_feed_forward_length": 256, "qwen3moe.expert_group_count": 0,
    }  # fmt: skip
    config = CONFIGS["qwen3moe"]
    assert GgufFile(write_gguf(tmp_path / "m.gguf", config, tensors_of(config), fields=usual)).config == config


def test_a_file_whose_weights_of_experts_are_not_normalized_says_so(tmp_path: Path) -> None:
    config = CONFIGS["qwen3moe"]
    fields = {"qwen3moe.expert_weights_norm": False}
    file = GgufFile(write_gguf(tmp_path / "m.gguf", config, tensors_of(config), fields=fields))
    assert file.config.experts is not None
    assert not file.config.experts.renormalize


def test_a_tensor_with_another_number_of_experts_is_named(tmp_path: Path) -> None:
    config = CONFIGS["qwen3moe"]
    fewer = tensors_of(msgspec.structs.replace(config, experts=Experts(5, 3, 256, renormalize=True)))
    path = write_gguf(tmp_path / "model.gguf", config, fewer)
    with pytest.raises(StartupError, match=r"ffn_gate_exps\.weight has the shape \[5, 256, 256\], expected 6 experts"):
        GgufFile(path)


def test_a_file_of_experts_without_their_number_is_refused(tmp_path: Path) -> None:
    dense = msgspec.structs.replace(CONFIGS["qwen3moe"], experts=None)
    path = write_gguf(tmp_path / "model.gguf", dense, tensors_of(dense))
    with pytest.raises(StartupError, match="lacks `expert_count`"):
        GgufFile(path)
