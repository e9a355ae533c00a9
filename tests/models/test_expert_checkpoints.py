"""Every layout in which checkpoints of mixtures of experts are published, against transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from onward.bench.model_shapes import stored_shapes
from onward.errors import StartupError
from onward.kernels import numpy_reference
from onward.kernels.quantize import interleave_gate_up
from onward.kernels.weight_formats import format_of_record
from onward.models.families.mxfp4 import dequantize
from onward.models.families.registry import tensor_sources
from onward.models.loader.checkpoint import check_checkpoint, weight_files
from onward.models.loader.config_parser import from_hf
from onward.models.loader.model_store import prepare
from onward.models.loader.safetensors_file import CanonicalTensors, MappedTensors, write_file
from onward.models.loader.weights import open_weights
from onward.models.tensor_names import expected_tensors
from tests.models import family_models
from tests.models.family_models import MAX_MODEL_LEN, FamilyModel
from tests.models.published_checkpoints import LAYOUTS, ROUNDED
from tests.worker.driver import Driver

FUSED = ["mixtral", "qwen2moe", "qwen3moe"]


def state_of(model: FamilyModel) -> dict[str, np.ndarray]:
    """As transformers 5 holds it: experts are fused."""
    state = {name: tensor.numpy() for name, tensor in model.theirs.state_dict().items()}
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in state)
    return state


@pytest.mark.parametrize("name", FUSED)
def test_checkpoints_are_published_with_one_tensor_for_each_expert(name: str, tmp_path: Path) -> None:
    """And `family_models.make` reads them."""
    family_models.make(name).theirs.save_pretrained(tmp_path)
    stored = MappedTensors(weight_files(tmp_path))
    assert not any(stored_name.endswith("experts.gate_up_proj") for stored_name in stored)


@pytest.mark.parametrize("name", FUSED)
def test_fused_experts_are_the_same_model(name: str, tmp_path: Path) -> None:
    model = family_models.make(name)
    save_file(state_of(model), tmp_path / "model.safetensors")
    check_checkpoint(weight_files(tmp_path), model.config, name)
    tensors = CanonicalTensors(MappedTensors(weight_files(tmp_path)), model.config)
    assert set(tensors) == set(model.tensors)
    for tensor, expected in model.tensors.items():
        np.testing.assert_array_equal(tensors[tensor], expected)


@pytest.mark.parametrize("name", [*FUSED, "gptoss"])
def test_an_expert_tensor_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    model = family_models.make(name)
    state = state_of(model)
    del state["model.layers.2.mlp.experts.down_proj"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=rf"{name} lacks .*layers\.2\..*experts\."):
        check_checkpoint(weight_files(tmp_path), model.config, name)


def packed(shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random blocks and scales of a tensor [experts, outputs, inputs]."""
    generator = np.random.default_rng(seed)
    experts, outputs, inputs = shape
    blocks = generator.integers(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
    return blocks, generator.integers(121, 125, (experts, outputs, inputs // 32)).astype(np.uint8)


def write_mxfp4(folder: Path, model: FamilyModel) -> dict[str, Any]:
    """A checkpoint as OpenAI publishes it; returns what transformers makes of its experts."""
    state, theirs = state_of(model), {}
    for name in [name for name in state if name.endswith(("gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = state.pop(name).shape
        blocks, scales = packed((experts, outputs, inputs), len(theirs))
        state[f"{name}_blocks"], state[f"{name}_scales"] = blocks, scales
        theirs[name] = convert_moe_packed_tensors(
            torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
        )
    save_file(state, folder / "model.safetensors")
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(model.raw | {"quantization_config": quantization}))
    return theirs


def test_mxfp4_values_are_those_of_transformers() -> None:
    blocks, scales = packed((3, 8, 96), 1)
    expected = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
    np.testing.assert_array_equal(dequantize(blocks, scales), expected.numpy().swapaxes(1, 2))


def test_a_checkpoint_in_mxfp4_has_the_logits_of_transformers(tmp_path: Path) -> None:
    model = family_models.make("gptoss")
    before = {name: tensor.clone() for name, tensor in model.theirs.state_dict().items()}
    experts = write_mxfp4(tmp_path, model)
    token_ids = np.random.default_rng(3).integers(0, model.config.vocab_size, 90).tolist()
    try:
        model.theirs.load_state_dict(before | experts)
        expected = model.their_logits(token_ids)
    finally:
        model.theirs.load_state_dict(before)
    prepared = prepare(str(tmp_path), quantization="none", cache_dir=tmp_path / "cache")
    assert prepared.config == model.config
    settings: dict[str, Any] = {"threads": 1, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 90}
    ours = Driver(prepared, open_weights(prepared), **settings).logits(0, token_ids, [50, 1, 39])
    assert np.abs(ours - expected).max() < 1e-4 * np.abs(expected).max()


def test_experts_in_mxfp4_keep_their_bits_on_the_cpu(tmp_path: Path) -> None:
    """Gate and up alternate in the stored rows, so they are picked row by row and no weight is rounded."""
    model = family_models.make("gptoss")
    experts = write_mxfp4(tmp_path, model)
    prepared = prepare(str(tmp_path), cache_dir=tmp_path / "cache")
    assert (prepared.quantization, prepared.is_exact) == ("int8", True)
    assert "MXFP4" in prepared.weight_formats
    weights = open_weights(prepared)
    for layer in range(model.config.num_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        for expert in range(6):
            down, both = (experts[f"{prefix}{part}_proj"][expert].numpy().T for part in ("down", "gate_up"))
            arrays = [np.asarray(weights[f"layers.{layer}.experts.{expert}.{part}"]) for part in ("down", "gate_up")]
            assert [format_of_record(array.shape[-1]).name for array in arrays] == ["MXFP4", "MXFP4"]
            np.testing.assert_array_equal(numpy_reference.weights(arrays[0]), down)
            expected = interleave_gate_up(np.ascontiguousarray(both[0::2]), np.ascontiguousarray(both[1::2]))
            np.testing.assert_array_equal(numpy_reference.weights(arrays[1]), expected)


QUANTIZED = {"mixtral": "w2", "qwen2moe": "down_proj", "qwen3moe": "down_proj"}
"""By family: the name of an expert's second matrix in published checkpoints."""


@pytest.mark.parametrize("layout", ["awq", "gptq-4", "compressed-int4", "compressed-int8", "fp8-blocks"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_experts_are_read_one_by_one(name: str, layout: str, tmp_path: Path) -> None:
    raw, expected = write_quantized_experts(tmp_path, name, layout)
    floats = open_weights(prepare(str(tmp_path), quantization="none", cache_dir=tmp_path / "cache"))
    for tensor, array in expected.items():
        np.testing.assert_array_equal(np.asarray(floats[tensor]), array, err_msg=tensor)
    model = prepare(str(tmp_path), cache_dir=tmp_path / "cache")
    assert model.quantization == "int8"
    assert LAYOUTS[layout][2] in model.weight_formats
    weights = open_weights(model)
    for tensor, array in expected.items():
        if ".experts." in tensor and tensor.endswith("down_proj.weight") and layout not in ROUNDED:
            layer, expert = tensor.split(".")[2], tensor.split(".")[5]
            found = numpy_reference.weights(np.asarray(weights[f"layers.{layer}.experts.{expert}.down"]))
            np.testing.assert_array_equal(found, array, err_msg=tensor)
    assert any(QUANTIZED[name] in stored for stored in raw)


def write_quantized_experts(folder: Path, name: str, layout: str) -> tuple[set[str], dict[str, np.ndarray]]:
    """Writes a checkpoint whose matrices of experts are quantized, under the names of published ones. Returns the stored
    names, and the model's tensors by canonical name."""
    quantization, write, _ = LAYOUTS[layout]
    config = from_hf(quantized_config(name))
    generator, stored, expected = np.random.default_rng(5), {}, {}
    sources = tensor_sources(config, ())
    for tensor, shape in expected_tensors(config).items():
        array: Any = generator.standard_normal(shape, dtype=np.float32)
        source = sources[tensor].name
        if ".experts." in tensor:
            parts, array = write(generator, *shape)
            stored |= {source.removesuffix("weight") + part: value for part, value in parts.items()}
        else:
            stored[source] = array
        expected[tensor] = array
    write_file(folder / "model.safetensors", stored)
    raw = quantized_config(name) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(raw))
    return set(stored), expected


def quantized_config(name: str) -> dict[str, Any]:
    """Sizes that groups of 64 divide."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "moe_intermediate_size": 128, "mlp_only_layers": [],
             "shared_expert_intermediate_size": 128}  # fmt: skip
    return {key: sizes.get(key, value) for key, value in family_models.make(name).raw.items()}


def test_a_tensor_of_scales_that_is_missing_is_named(tmp_path: Path) -> None:
    model = family_models.make("gptoss")
    write_mxfp4(tmp_path, model)
    stored = {name: np.asarray(array) for name, array in MappedTensors(weight_files(tmp_path)).items()}
    missing = "model.layers.1.mlp.experts.down_proj_scales"
    save_file({name: array for name, array in stored.items() if name != missing}, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=missing):
        check_checkpoint(weight_files(tmp_path), model.config, "gptoss")


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_scale_that_is_not_a_number_is_refused_by_file_and_name(tmp_path: Path, quantization: str) -> None:
    model = family_models.make("gptoss")
    write_mxfp4(tmp_path, model)
    stored = {name: np.array(array) for name, array in MappedTensors(weight_files(tmp_path)).items()}
    stored["model.layers.1.mlp.experts.down_proj_scales"][2, 3, 1] = 255
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=r"model\.safetensors: .*down_proj_blocks has a scale that is not a number"):
        dict(open_weights(prepare(str(tmp_path), quantization=quantization, cache_dir=tmp_path / "cache")))


def test_the_shape_of_qwen3_30b_has_the_tensors_of_its_checkpoints() -> None:
    shapes = stored_shapes("qwen3-30b-a3b")
    assert shapes["model.layers.47.mlp.gate.weight"] == (128, 2048)
    assert shapes["model.layers.47.mlp.experts.127.down_proj.weight"] == (2048, 768)
    assert 30.4e9 < sum(map(np.prod, shapes.values())) < 30.6e9
