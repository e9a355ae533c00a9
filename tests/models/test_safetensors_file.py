from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from onward.errors import StartupError
from onward.models.loader.safetensors_file import ALIGNMENT, BFloat16Bits, MappedTensors, write_file
from onward.models.loader.safetensors_header import read_header


def sample() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        "odd": generator.standard_normal(5, dtype=np.float32),
        "int8": generator.integers(-127, 128, (64, 32), dtype=np.int8),
        "half": generator.standard_normal((3, 7)).astype(np.float16),
        "float": generator.standard_normal((16, 16), dtype=np.float32),
        "int32": np.arange(16, dtype=np.int32),
    }


def test_what_is_written_is_read_by_the_safetensors_package(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", sample())
    with safe_open(tmp_path / "a.safetensors", framework="np") as file:
        assert set(file.keys()) == set(sample())
        for name, array in sample().items():
            np.testing.assert_array_equal(file.get_tensor(name), array)


def test_what_the_safetensors_package_writes_is_mapped(tmp_path: Path) -> None:
    save_file(sample(), tmp_path / "a.safetensors")
    mapped = MappedTensors([tmp_path / "a.safetensors"])
    assert set(mapped) == set(sample())
    for name, array in sample().items():
        np.testing.assert_array_equal(mapped[name], array)


def test_arrays_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", sample())
    mapped = MappedTensors([tmp_path / "a.safetensors"])
    first, second = mapped["float"], mapped["float"]
    assert isinstance(first, np.ndarray)
    assert isinstance(second, np.ndarray)
    assert np.shares_memory(first, second)
    first[:] = 0
    again = MappedTensors([tmp_path / "a.safetensors"])["float"]
    np.testing.assert_array_equal(again, sample()["float"], err_msg="the file itself must not change")


def test_arrays_of_whole_cache_lines_begin_at_one(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", sample())
    places = read_header(tmp_path / "a.safetensors")
    for name in ("int8", "float", "int32"):
        assert places[name].begin % ALIGNMENT == 0


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_bfloat16_is_rounded_as_torch_rounds(values: list[float]) -> None:
    array = np.asarray(values, dtype=np.float32)
    expected = torch.from_numpy(array.copy()).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(BFloat16Bits.of(array).to_float32(), expected)


def test_bfloat16_ties_go_to_the_even_neighbour() -> None:
    halfway = (np.arange(64, dtype=np.uint32) + 0x3F80 << 16 | 0x8000).view(np.float32)
    expected = torch.from_numpy(halfway.copy()).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(BFloat16Bits.of(halfway).to_float32(), expected)


def damaged(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(content)
    return path


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", sample())
    content = (tmp_path / "a.safetensors").read_bytes()
    for length in (0, 4, 50, len(content) - 1):
        with pytest.raises(StartupError, match=r"damaged\.safetensors"):
            read_header(damaged(tmp_path, content[:length]))


@pytest.mark.parametrize(
    "header",
    [
        b"{not json",
        b"[]",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}',
        b'{"a": {"dtype": "F4", "shape": [8], "data_offsets": [0, 8]}}',
    ],
)
def test_a_wrong_head_is_refused(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(StartupError, match=r"damaged\.safetensors"):
        read_header(damaged(tmp_path, len(header).to_bytes(8, "little") + header + bytes(8)))
