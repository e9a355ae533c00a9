from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.errors import StartupError
from onward.models.loader.gguf_header import GgufHeader, read_header
from tests.models.checkpoints import GPT2_TOKENIZER, random_tensors, tiny_config, write_gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config()
    fields = GPT2_TOKENIZER | {
        "some.floats": [1.5, -2.5],
        "some.flag": True,
        "some.text": "naïve 日本",
        "general.alignment": 64,
    }
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return write_gguf(path, config, random_tensors(config), fields=fields)


def test_metadata_equal_those_of_the_gguf_package(file: Path) -> None:
    theirs = {
        name: field.contents() for name, field in gguf.GGUFReader(file).fields.items() if not name.startswith("GGUF.")
    }
    assert read_header(file).metadata == theirs


def test_tensors_lie_where_the_gguf_package_finds_them(file: Path) -> None:
    ours = read_header(file).tensors
    theirs = gguf.GGUFReader(file).tensors
    assert list(ours) == [tensor.name for tensor in theirs]
    for tensor in theirs:
        info = ours[tensor.name]
        assert info.offset == tensor.data_offset
        assert info.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert info.type_id == tensor.tensor_type.value


def test_big_endian_and_unknown_versions_are_refused(file: Path, tmp_path: Path) -> None:
    data = bytearray(file.read_bytes())
    data[4:8] = (3).to_bytes(4, "big")
    damaged = tmp_path / "big.gguf"
    damaged.write_bytes(data)
    with pytest.raises(StartupError, match="little-endian"):
        read_header(damaged)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "model.gguf"
    other.write_bytes(b"PK\x03\x04 a zip file, renamed")
    with pytest.raises(StartupError, match="letters GGUF"):
        read_header(other)


@pytest.mark.parametrize("content", [b"", b"GG"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    empty = tmp_path / "model.gguf"
    empty.write_bytes(content)
    with pytest.raises(StartupError, match=r"model\.gguf"):
        read_header(empty)


def test_a_count_beyond_the_files_size_is_refused_at_once(tmp_path: Path) -> None:
    huge = (1 << 60).to_bytes(8, "little")
    array_of_bytes = (9).to_bytes(4, "little") + (0).to_bytes(4, "little") + huge
    key = (1).to_bytes(8, "little") + b"k"
    head = b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little")
    for content in (head + key + array_of_bytes, head[:8] + huge + huge, head + huge):
        path = tmp_path / "model.gguf"
        path.write_bytes(content + bytes(64))
        with pytest.raises(StartupError, match=r"claims|ends at byte|has a text of"):
            read_header(path)


def test_a_head_cut_short_anywhere_is_refused(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    head_bytes = min(info.offset for info in read_header(file).tensors.values()) - 64
    cut = tmp_path / "cut.gguf"
    for length in range(0, head_bytes, 97):
        cut.write_bytes(data[:length])
        with pytest.raises(StartupError):
            read_header(cut)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_head_is_read_or_refused_but_never_anything_else(
    file: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = np.frombuffer(file.read_bytes(), dtype=np.uint8).copy()
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, 3000))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content.tobytes())
    try:
        header = read_header(path)
    except StartupError as refused:
        assert "\n" not in str(refused)
    else:
        assert isinstance(header, GgufHeader)
