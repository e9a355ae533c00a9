"""Quantized checkpoints whose tensors contradict each other, or have contents that no weights stand for.

Every one is refused in one line that names the file and the tensor, before its weights are converted.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from onward.errors import StartupError
from onward.models.loader.model_store import prepare
from onward.models.loader.safetensors_file import Array, BFloat16Bits, Float8Bits, MappedTensors, write_file
from tests.models.checkpoints import tiny_config
from tests.models.published_checkpoints import write_published

CONFIG = tiny_config(hidden_size=128, intermediate_size=192, head_dim=32)
DOWN = "model.layers.1.mlp.down_proj."
"""[128 outputs, 192 inputs]."""
NORM = "model.layers.0.input_layernorm.weight"
Stored = dict[str, Array]
Change = Callable[[Stored], None]


def write_changed(tmp_path: Path, layout: str, change: Change) -> Path:
    folder = tmp_path / "m"
    tmp_path.mkdir(exist_ok=True)
    write_published(folder, CONFIG, layout)
    file = folder / "model.safetensors"
    stored: Stored = {
        name: array.copy() if isinstance(array, np.ndarray) else type(array)(array.bits.copy())
        for name, array in MappedTensors([file]).items()
    }
    change(stored)
    file.unlink()
    write_file(file, stored)
    return folder


def put(part: str, make: Callable[[np.ndarray], Array], base: str = DOWN) -> Change:
    """Replaces a tensor by one that is made from it."""

    def change(stored: Stored) -> None:
        array = stored[base + part]
        stored[base + part] = make(array if isinstance(array, np.ndarray) else array.to_float32())

    return change


def add(name: str, array: Array) -> Change:
    return lambda stored: stored.update({name: array})


def remove(name: str) -> Change:
    def change(stored: Stored) -> None:
        del stored[name]

    return change


def as_type(kind: type) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: array.astype(kind)


def half_rows(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array[: len(array) // 2])


def half_columns(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array[:, : array.shape[1] // 2])


def flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1)


def with_first(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def make(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array.reshape(-1)[0] = value
        return array

    return make


FLOATS = np.ones((128, 192), np.float32)
DAMAGES: dict[str, tuple[str, Change, str]] = {
    "awq: the float matrix beside the integers": ("awq", add(DOWN + "weight", FLOATS), "weight stands for the same"),
    "awq: fewer outputs": ("awq", put("qweight", half_columns), r"scales has the shape \[3, 128\], expected \[3, 64\]"),
    "awq: fewer inputs": ("awq", put("qweight", half_rows), "qweight has 96 inputs, not a multiple of .* 64"),
    "awq: integers of 16 bits": ("awq", put("qweight", as_type(np.int16)), "qweight has the type I16, expected I32"),
    "awq: integers of 64 bits": ("awq", put("qweight", as_type(np.int64)), "qweight has the type I64, expected I32"),
    "awq: one dimension": ("awq", put("qweight", flat), r"qweight has the shape \[3072\]"),
    "awq: zero points as floats": ("awq", put("qzeros", as_type(np.float32)), "qzeros has the type F32, expected I32"),
    "awq: too few zero points": ("awq", put("qzeros", half_columns), r"qzeros has the shape \[3, 8\], expected \[3, 16\]"),
    "awq: scales as integers": ("awq", put("scales", as_type(np.int32)), "scales has the type I32, expected F16"),
    "awq: infinite scale": ("awq", put("scales", with_first(np.inf)), "scales has a scale that is not a finite"),
    "awq: scale that is no number": ("awq", put("scales", with_first(np.nan)), "scales has a scale that is not a finite"),
    "awq: scales of no matrix": ("awq", remove(DOWN + "qweight"), "belongs to .*qweight, which the checkpoint lacks"),
    "awq: no zero points": ("awq", remove(DOWN + "qzeros"), "qweight lacks .*qzeros"),
    "gptq: the float matrix beside the integers": ("gptq-4", add(DOWN + "weight", FLOATS), "stands for the same"),
    "gptq: order as floats": ("gptq-4", put("g_idx", as_type(np.float32)), "g_idx has the type F32, expected I32"),
    "gptq: order of fewer inputs": ("gptq-4", put("g_idx", half_rows), r"g_idx has the shape \[96\], expected \[192\]"),
    "gptq: group that is not there": ("gptq-4", put("g_idx", with_first(3)), "g_idx has groups from 0 to 3, .* are 3"),
    "gptq: group below zero": ("gptq-4", put("g_idx", with_first(-1)), "g_idx has groups from -1 to 2"),
    "gptq-8: integers of 8 bits": ("gptq-8", put("qweight", as_type(np.uint8)), "qweight has the type U8, expected I32"),
    "int4: other matrix beside it": ("compressed-int4", add(DOWN + "weight", FLOATS), "weight stands for the same"),
    "int4: fewer outputs": ("compressed-int4", put("weight_packed", half_rows), r"weight_scale .* expected \[64, 3\]"),
    "int4: unsigned words": ("compressed-int4", put("weight_packed", as_type(np.uint64)), "the type U64, expected I32"),
    "int4: other shape": ("compressed-int4", put("weight_shape", with_first(99)), r"weight_shape says \[99, 192\]"),
    "int4: too few scales": ("compressed-int4", put("weight_scale", half_rows), r"\[64, 3\], expected \[128, 3"),
    "int4: zero points": ("compressed-int4-asymmetric", put("weight_zero_point", half_rows), "zero_point has the shape"),
    "int8: integers of 16 bits": ("compressed-int8", put("weight", as_type(np.int16)), "the type I16, expected I8"),
    "int8: two scales": ("compressed-int8", put("weight_scale", lambda a: a[:2]), r"weight_scale has the shape \[2, 1\]"),
    "int8: no scale": ("compressed-int8", remove(DOWN + "weight_scale"), "weight has the type I8, expected F16"),
    "fp8: bytes": ("fp8-blocks", lambda stored: stored.update({DOWN + "weight": np.ones((128, 192), np.uint8)}),
                   "weight has the type U8, expected F8_E4M3"),
    "fp8: no scale": ("fp8-blocks", remove(DOWN + "weight_scale_inv"), "weight has the type F8_E4M3, expected F16"),
    "fp8: two kinds of scales": ("fp8-blocks", add(DOWN + "weight_scale", np.ones((3, 6), np.float32)), "same scales as"),
    "fp8: too few scales": ("fp8-blocks", put("weight_scale_inv", half_columns), r"weight_scale_inv .* expected \[3, 6\]"),
    "fp8: infinite scale": ("fp8-tensor", put("weight_scale", lambda a: np.asarray(a + np.inf)), "weight_scale has a sc"),
    "fp8: weight that is no number": (
        "fp8-tensor", lambda stored: stored.update({DOWN + "weight": Float8Bits(np.full((128, 192), 127, np.uint8))}),
        "down_proj.weight has a value that is not a finite number",
    ),
    "norm as integers": ("awq", put(NORM, as_type(np.int32), base=""), "input_layernorm.weight has the type I32"),
    "norm that is no number": ("awq", put(NORM, lambda a: BFloat16Bits.of(a * np.nan), base=""), "not a finite number"),
}  # fmt: skip


@pytest.mark.parametrize("quantization", ["auto", "none"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_tensors_that_do_not_fit_each_other_are_refused_by_file_and_name(
    tmp_path: Path, damage: str, quantization: str
) -> None:
    layout, change, message = DAMAGES[damage]
    folder = write_changed(tmp_path, layout, change)
    with pytest.raises(StartupError, match=message) as refused:
        prepare(str(folder), quantization=quantization, cache_dir=tmp_path / "cache")
    assert str(folder) in refused.value.message
    assert "\n" not in refused.value.message


def test_a_matrix_without_damage_is_served(tmp_path: Path) -> None:
    """What the damages above begin with."""
    for layout in {layout for layout, _, _ in DAMAGES.values()}:
        folder = write_changed(tmp_path / layout, layout, lambda stored: None)
        assert prepare(str(folder), cache_dir=tmp_path / "cache").weights
