"""Checkpoints in the quantized layouts of other projects stand for the weights that were written."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.errors import StartupError
from onward.kernels import numpy_reference
from onward.models.checkpoint_quantization import parse_scheme
from onward.models.loader.model_store import check_raw_config, prepare
from onward.models.loader.safetensors_file import Float8Bits, MappedTensors, write_file
from onward.models.loader.weights import open_weights
from tests.models import family_models
from tests.models.checkpoints import hf_json, random_tensors, tiny_config
from tests.models.published_checkpoints import (
    LAYOUTS,
    ROUNDED,
    Writer,
    Written,
    fp8,
    gptq,
    int8_channels,
    write_published,
)

CONFIG = tiny_config(hidden_size=128, intermediate_size=192, head_dim=32)
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_floats_of_a_published_checkpoint_are_those_that_its_layout_defines(tmp_path: Path, layout: str) -> None:
    expected = write_published(tmp_path / "m", CONFIG, layout)
    model = prepare(str(tmp_path / "m"), quantization="none", cache_dir=tmp_path / "cache")
    weights = open_weights(model)
    assert set(weights) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(np.asarray(weights[name]), array, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_integers_of_a_published_checkpoint_keep_their_bits(tmp_path: Path, layout: str) -> None:
    expected = write_published(tmp_path / "m", CONFIG, layout)
    model = prepare(str(tmp_path / "m"), cache_dir=tmp_path / "cache")
    assert (model.quantization, model.is_exact) == ("int8", True)
    assert LAYOUTS[layout][2] in model.weight_formats
    weights = open_weights(model)
    for layer in range(CONFIG.num_layers):
        down = numpy_reference.weights(np.asarray(weights[f"layers.{layer}.down"]))
        qkv = numpy_reference.weights(np.asarray(weights[f"layers.{layer}.qkv"]))
        prefix = f"model.layers.{layer}."
        wanted = [
            (down, expected[prefix + "mlp.down_proj.weight"]),
            (qkv, np.concatenate([expected[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkv"])),
        ]
        for found, want in wanted:
            if layout in ROUNDED:  # rounded to a 127th of the largest of 32
                groups = np.abs(found - want).reshape(len(want), -1, 32), np.abs(want).reshape(len(want), -1, 32)
                assert (groups[0] <= groups[1].max(-1, keepdims=True) / 127 * 0.501).all()
            else:
                np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize(
    ("layout", "write"),
    [
        ("gptq-4", gptq(4, symmetric=True, layout="gptq_v2")),
        ("gptq-v2-symmetric", gptq(4, symmetric=True, layout="gptq")),
        ("gptq-8", gptq(8, symmetric=True, layout="gptq_v2")),
    ],
    ids=["4 bits", "v2", "8 bits"],
)
def test_a_symmetric_gptq_checkpoint_has_its_zero_points_in_the_middle_whatever_its_layout_is_called(
    tmp_path: Path, layout: str, write: Writer
) -> None:
    """Producers differ in whether they store zero points less one. A bias of one level would shift every weight."""
    expected = write_published(tmp_path / "m", CONFIG, layout, write)
    for quantization in ("auto", "none"):
        model = prepare(str(tmp_path / "m"), quantization=quantization, cache_dir=tmp_path / "cache")
        weights = open_weights(model)
        if quantization == "none":
            np.testing.assert_array_equal(np.asarray(weights[DOWN]), expected[DOWN])
        else:
            np.testing.assert_array_equal(numpy_reference.weights(np.asarray(weights["layers.1.down"])), expected[DOWN])


def test_fp8_blocks_that_are_far_larger_than_the_matrix_take_no_memory_of_their_size(tmp_path: Path) -> None:
    def write(generator: np.random.Generator, outputs: int, inputs: int) -> Written:
        stored, weights = fp8("weight_scale_inv", None, "tensor")(generator, outputs, inputs)
        scale = stored["weight_scale_inv"]
        assert isinstance(scale, np.ndarray)
        stored["weight_scale_inv"] = scale.reshape(1, 1)
        return stored, weights

    expected = write_published(tmp_path / "m", CONFIG, "fp8-blocks", write)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [1 << 20, 1 << 20]
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    weights = open_weights(prepare(str(tmp_path / "m"), quantization="none", cache_dir=tmp_path / "cache"))
    np.testing.assert_array_equal(np.asarray(weights[DOWN]), expected[DOWN])


def test_a_reordered_checkpoint_without_an_order_is_refused(tmp_path: Path) -> None:
    write_published(tmp_path / "m", CONFIG, "gptq-reordered")
    file = tmp_path / "m" / "model.safetensors"
    name = DOWN.removesuffix("weight") + "g_idx"
    stored = {key: np.array(array) for key, array in MappedTensors([file]).items() if key != name}
    file.unlink()
    write_file(file, stored)
    with pytest.raises(StartupError, match=rf"lacks {name}, though the config says that inputs are reordered"):
        prepare(str(tmp_path / "m"), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"quantization_config \(method bitsandbytes\)"),
        ({"bits": 4}, r"quantization_config \(method unknown\)"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "awq", "bits": 3, "group_size": 64}, "bits 3"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 48}, "group_size 48"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": 1}, "desc_act"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "pack_dtype": "int16"}, "pack_dtype 'int16'"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"g": {}}}, "nvfp4"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}, "config_groups"),
        ({"quant_method": "mxfp4"}, r"method mxfp4"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)  # fmt: skip
def test_a_scheme_that_cannot_be_read_is_refused_by_name(
    tmp_path: Path, quantization: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_json(CONFIG, quantization_config=quantization)))
    with pytest.raises(StartupError, match=message):
        prepare(str(tmp_path), cache_dir=tmp_path / "cache")  # there are no weights


def test_a_quantized_checkpoint_is_refused_on_a_cuda_device_by_its_config() -> None:
    raw = hf_json(CONFIG, quantization_config=LAYOUTS["awq"][0])
    check_raw_config("m", raw, "cpu", "auto", None)
    with pytest.raises(StartupError, match=r"quantization_config \(awq, int4\) is not supported with --device cuda"):
        check_raw_config("m", raw, "cuda", "auto", None)


@pytest.mark.parametrize("part", ["qzeros", "scales"])
def test_a_missing_part_is_named(tmp_path: Path, part: str) -> None:
    config, name = CONFIG, DOWN.removesuffix("weight")
    write_published(tmp_path / "m", config, "awq")
    stored = dict(MappedTensors([tmp_path / "m" / "model.safetensors"]))
    del stored[name + part]
    (tmp_path / "less").mkdir()
    (tmp_path / "less" / "config.json").write_bytes((tmp_path / "m" / "config.json").read_bytes())
    write_file(tmp_path / "less" / "model.safetensors", stored)
    with pytest.raises(StartupError, match=rf"lacks {name}{part}"):
        prepare(str(tmp_path / "less"), cache_dir=tmp_path / "cache")


def test_fp8_without_a_scheme_is_refused(tmp_path: Path) -> None:
    tensors: dict[str, Any] = dict(random_tensors(CONFIG))
    tensors[DOWN] = Float8Bits(np.zeros(tensors[DOWN].shape, np.uint8))
    (tmp_path / "config.json").write_text(json.dumps(hf_json(CONFIG)))
    write_file(tmp_path / "model.safetensors", tensors)
    with pytest.raises(StartupError, match=rf"{DOWN} is stored in fp8, but config\.json has no quantization_config"):
        prepare(str(tmp_path), quantization="int8", cache_dir=tmp_path / "cache")


def test_a_config_without_quantization_has_no_scheme() -> None:
    assert parse_scheme({}) is None
    assert parse_scheme({"quantization_config": None}) is None


@pytest.mark.parametrize("family", ["phi3", "gpt2", "gptneox", "gemma3", "olmo2", "smollm3", "granite"])
def test_a_quantized_checkpoint_of_each_family_is_served_in_floats(tmp_path: Path, family: str) -> None:
    """Families store tensors joined, transposed or under other names. Converted files have none of that."""
    theirs = family_models.make(family).theirs
    theirs.save_pretrained(tmp_path / "floats")
    floats_file = tmp_path / "floats" / "model.safetensors"
    stored: dict[str, Any] = {}
    floats: dict[str, Any] = {}
    generator = np.random.default_rng(1)
    for name, array in MappedTensors([floats_file]).items():
        assert isinstance(array, np.ndarray)
        parts: dict[str, Any] = {"weight": np.array(array)}
        floats[name] = np.array(array)
        if array.ndim == 2 and ("layers." in name or ".h." in name):
            parts, floats[name] = int8_channels(generator, *array.shape)
        stem, _, last = name.rpartition(".")
        stored |= {f"{stem}.{part}" if part != "weight" else f"{stem}.{last}": value for part, value in parts.items()}
    floats_file.unlink()
    write_file(floats_file, floats)
    raw = json.loads((tmp_path / "floats" / "config.json").read_text())
    (tmp_path / "int8").mkdir()
    config = raw | {"quantization_config": LAYOUTS["compressed-int8"][0]}
    (tmp_path / "int8" / "config.json").write_text(json.dumps(config))
    write_file(tmp_path / "int8" / "model.safetensors", stored)
    expected = open_weights(prepare(str(tmp_path / "floats"), cache_dir=tmp_path / "cache"))
    found = open_weights(prepare(str(tmp_path / "int8"), quantization="none", cache_dir=tmp_path / "cache"))
    assert set(found) == set(expected)
    for name in expected:
        np.testing.assert_array_equal(np.asarray(found[name]), np.asarray(expected[name]), err_msg=name)
