"""Files made to do harm: sizes, counts and places that cannot be, and content of another kind than agreed.

Every one is refused in one line that names the file or the field, and none takes memory or time for what it claims.
"""

import base64
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.errors import StartupError
from onward.models.loader import safetensors_header, text_metadata
from onward.models.loader.bounded_read import MAX_JSON_BYTES, MAX_TEMPLATE_BYTES, read_json
from onward.models.loader.config_parser import from_hf
from onward.models.loader.gguf_file import GgufFile
from onward.models.loader.gguf_header import read_header
from onward.models.loader.model_store import prepare
from onward.models.loader.tokenizer_files import prepare_tokenizer
from onward.text.gguf_tokenizer import build_tokenizer
from onward.text.tokenizer import Tokenizer
from tests.models.checkpoints import GPT2_TOKENIZER, hf_json, random_tensors, tiny_config, write_folder, write_gguf


def gguf_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf_head(fields: Sequence[bytes] = (), tensors: Sequence[bytes] = ()) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)) + b"".join([*fields, *tensors])


def sparse(path: Path, head: bytes, size: int) -> Path:
    """A file that claims to be large, and takes no room."""
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)
    return path


@pytest.mark.parametrize(
    ("head", "named"),
    [
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 30, 0), "1073741824 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 30), "1073741824 metadata fields"),
        (gguf_head([gguf_string(b"k") + struct.pack("<IIQ", 9, 0, 1 << 35)]), "metadata field k claims 34359738368"),
        (gguf_head([gguf_string(b"k") + struct.pack("<IIQ", 9, 8, 1 << 30)]), "metadata field k claims 1073741824"),
        (gguf_head([gguf_string(b"k") + struct.pack("<IQ", 8, 1 << 33)]), "metadata field k has a text of 8589934592"),
        (gguf_head([struct.pack("<Q", 1 << 33)]), "has a text of 8589934592"),
        (gguf_head([gguf_string(b"a\x1b[2Jb") + struct.pack("<II", 4, 1)]), "impossible name"),
        (gguf_head([gguf_string(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9]), "unknown type 9"),
        (gguf_head([], [gguf_string(b"t") + struct.pack("<I4QIQ", 4, *[1 << 63] * 4, 0, 0)]), "tensor t has the impo"),
        (gguf_head([], [gguf_string(b"t") + struct.pack("<IQIQ", 1, 8, 0, 1 << 62)]), "tensor t begins beyond"),
    ],
    ids=lambda value: value if isinstance(value, str) else "head",
)
def test_a_large_gguf_file_can_claim_no_more_than_a_model_has(tmp_path: Path, head: bytes, named: str) -> None:
    path = sparse(tmp_path / "model.gguf", head, 1 << 40)
    with pytest.raises(StartupError, match=named) as refused:
        read_header(path)
    assert str(path) in str(refused.value)


def damaged_gguf(path: Path, change: Callable[[bytearray], None]) -> Path:
    config = tiny_config()
    write_gguf(path, config, random_tensors(config), fields=GPT2_TOKENIZER)
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)
    return path


def _place_in_head(content: bytearray, tensor: bytes) -> int:
    """Where a two-dimensional tensor's offset stands."""
    return content.index(gguf_string(tensor)) + 8 + len(tensor) + 4 + 2 * 8 + 4


def test_two_gguf_tensors_in_one_place_are_refused(tmp_path: Path) -> None:
    def overlap(content: bytearray) -> None:
        first, second = (_place_in_head(content, f"blk.{i}.attn_q.weight".encode()) for i in (0, 1))
        content[second : second + 8] = content[first : first + 8]

    with pytest.raises(StartupError, match="overlaps another tensor"):
        GgufFile(damaged_gguf(tmp_path / "model.gguf", overlap))


def test_two_spellings_of_one_gguf_tensor_are_refused(tmp_path: Path) -> None:
    config = tiny_config()
    extra = {"blk.00.attn_q.weight": np.zeros((32, 32), dtype=np.float32)}
    path = write_gguf(tmp_path / "model.gguf", config, random_tensors(config), extra=extra)
    with pytest.raises(StartupError, match=r"blk\.00\.attn_q\.weight is .* a second time"):
        GgufFile(path)


def safetensors(path: Path, header: dict[str, Any], num_bytes: int = 16) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(num_bytes))
    return path


def entry(begin: int, end: int, shape: list[Any] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "named"),
    [
        ({"a": entry(0, 16), "b": entry(8, 16)}, "b overlaps"),
        ({"a": entry(0, 4), "b": entry(8, 16)}, "b lies behind a gap"),
        ({"a": entry(0, 8)}, "8 bytes behind the last tensor"),
        ({"a": entry(0, 16, [-4, -4])}, "a: .*shape"),
        ({"a": entry(0, 16, [1 << 62] * 8)}, "a: .*shape"),
        ({"a": entry(0, 16, [2] * 1000)}, "a: .*shape"),
        ({"a": entry(-16, 0)}, "a: .*data_offsets"),
        ({"a": entry(0, 32)}, "a lies beyond"),
        ({"a\n": entry(0, 16)}, "impossible name"),
        ({"a" * 600: entry(0, 16)}, "impossible name"),
        ({"a": entry(0, 16, dtype="F4\x1b")}, "type 'F4.x1b'"),
        ({f"t{i}": {} for i in range((1 << 18) + 1)}, "262145 tensors"),
    ],
)
def test_a_safetensors_head_that_cannot_be_is_refused_by_name(
    tmp_path: Path, header: dict[str, Any], named: str
) -> None:
    path = safetensors(tmp_path / "model.safetensors", header)
    with pytest.raises(StartupError, match=named) as refused:
        safetensors_header.read_header(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_deeply_nested_head_is_refused(tmp_path: Path) -> None:
    text = b'{"a":' + b"[" * 100_000
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(StartupError):
        safetensors_header.read_header(path)


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a": "\xff"}', b'{"\xff": 1}', b"{", b"[]", b"null", b""])
def test_json_that_is_none_is_refused_by_the_files_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(StartupError, match=r"config\.json"):
        read_json(path)


def test_files_of_text_have_a_largest_size(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="larger than"):
        read_json(sparse(tmp_path / "config.json", b"{", MAX_JSON_BYTES + 1))
    (tmp_path / "config.json").unlink()
    sparse(tmp_path / "chat_template.jinja", b"x", MAX_TEMPLATE_BYTES + 1)
    with pytest.raises(StartupError, match=r"chat_template\.jinja is larger"):
        text_metadata.read_folder_text_metadata(tmp_path)
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json"):
        sparse(tmp_path / name, b"{", 1 << 40)
        (tmp_path / "merges.txt").touch()
        with pytest.raises(StartupError, match=rf"{name} is larger"):
            prepare_tokenizer(tmp_path, tmp_path / "cache")
        (tmp_path / name).unlink()


def spm_field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2, len(data)]) + data


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "no pieces"),
        (b"\x0a\xff\xff\xff\xff\x0f", "longer than the file"),
        (b"\x0a", "ends within a number"),
        (b"\x08" + b"\xff" * 11, "too long"),
        (b"\x0f", "wire type 7"),
        (spm_field(1, spm_field(1, b"\xff")), "not UTF-8"),
        (spm_field(1, spm_field(1, b"a")) * 2 + spm_field(3, b"\x20\x00"), "twice"),
        (spm_field(1, spm_field(1, b"a")) + spm_field(3, b"\x20\x00") + spm_field(2, b"\xc0\x02\x07"), "unk_id is 7"),
        (spm_field(1, spm_field(1, b"a")) + spm_field(2, b"\x18\x03"), "model_type WORD"),
        (spm_field(1, spm_field(1, b"a")) + spm_field(2, b"\xc0\x01\x01"), "treat_whitespace_as_suffix"),
        (spm_field(1, spm_field(1, b"a")), "remove_extra_whitespaces"),
        (spm_field(1, spm_field(1, b"a")) + spm_field(3, b"\x12\x01x"), "precompiled_charsmap"),
        (b"AA== 0\nAB== x\n", "entry 2"),
        (b"AA== 0\nAA== 1\n", "twice"),
        (b"AA== 0\nAQ== 0\n", "twice"),
        (b"AA== 9999999\n", "below 4194304"),
        (b"AA== 0\n", "no token for the byte 0x01"),
    ],
)
def test_a_tokenizer_model_that_cannot_be_followed_is_refused_by_name(
    tmp_path: Path, content: bytes, named: str
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(StartupError, match=named) as refused:
        prepare_tokenizer(tmp_path, tmp_path / "cache")
    assert "(tokenizer.model)" in refused.value.message


TEKKEN: dict[str, Any] = {
    "config": {"pattern": "x+", "default_vocab_size": 257, "default_num_special_tokens": 1},
    "vocab": [{"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode()} for byte in range(256)],
    "special_tokens": [{"rank": 0, "token_str": "<s>"}],
}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"config": {}}, "pattern"),
        ({"vocab": [{"rank": 0}]}, "token_bytes"),
        ({"special_tokens": None}, "special_tokens"),
        ({"special_tokens": [{"rank": 1, "token_str": "<s>"}]}, "special_tokens: .*not below 1"),
        ({"special_tokens": [{"rank": 0, "token_str": "<s>"}] * 2}, "special_tokens: .*twice"),
        ({"vocab": TEKKEN["vocab"][:-1]}, "default_vocab_size is 257"),
        ({"config": TEKKEN["config"] | {"default_vocab_size": 10**12}}, "default_vocab_size"),
        ({"vocab": TEKKEN["vocab"][:-1] * 2}, "twice"),
        ({"vocab": [{"rank": 0, "token_bytes": "?"}, *TEKKEN["vocab"][1:]]}, "rank 0 is not in base64"),
        ({"config": TEKKEN["config"] | {"pattern": "("}}, "pattern"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_tekken_file_that_cannot_be_followed_is_refused_by_field(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps(TEKKEN | changes))
    with pytest.raises(StartupError, match=named) as refused:
        prepare_tokenizer(tmp_path, tmp_path / "cache")
    assert "tekken.json" in refused.value.message
    (tmp_path / "tekken.json").write_text(json.dumps(TEKKEN))
    assert prepare_tokenizer(tmp_path, tmp_path / "cache") is not None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"added_tokens_decoder": []}, None),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder: must be an object"),
        ({"added_tokens_decoder": {"x": "y"}}, "added_tokens_decoder: 'x' is not a token id"),
        ({"added_tokens_decoder": {"99999999": "y"}}, "added_tokens_decoder: '99999999' is not a token id"),
        ({"added_tokens_decoder": {"0": {"content": 7}}}, "added_tokens_decoder: .*content"),
        ({"added_tokens_decoder": {"0": "<|im_end|>"}}, "'<|im_end|>' has the id 0 there, but 2"),
        ({"extra_special_tokens": 7}, "extra_special_tokens: must be a list"),
        ({"legacy": "yes"}, "legacy: must be a bool"),
        ({"bos_token": 7}, "bos_token"),
    ],
)
def test_a_tokenizer_config_that_is_wrong_is_refused_by_field(
    tmp_path: Path, config: dict[str, Any], named: str | None
) -> None:
    (tmp_path / "tokenizer.json").write_text(build_tokenizer(GPT2_TOKENIZER).to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if named is None:
        assert prepare_tokenizer(tmp_path, tmp_path / "cache") == "tokenizer.json"
        return
    with pytest.raises(StartupError, match=named.replace("|", r"\|")):
        prepare_tokenizer(tmp_path, tmp_path / "cache")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"vocab_size": 10**12},
        {"head_dim": 10**9},
        {"hidden_size": 10**400},
        {"rope_theta": 10**400},
        {"num_attention_heads": 10**6},
        {"architectures": [[], {}, None]},
        {"architectures": "LlamaForCausalLM"},
        {"quantization_config": [1]},
        {"rope_scaling": [1]},
        {"rope_parameters": "x"},
        {"layer_types": 7},
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": []},
        {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 1,
                          "original_max_position_embeddings": 8192}},
    ],
)  # fmt: skip
def test_a_config_that_asks_for_everything_is_refused_by_field(changes: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match=r"config|architecture"):
        from_hf(hf_json(tiny_config()) | changes)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ["gpt2"]),
        ("pre", [1]),
        ("tokens", 7),
        ("tokens", [1, 2]),
        ("tokens", ["a", "a"]),
        ("tokens", ["x" * 10_000]),
        ("token_type", 3),
        ("token_type", ["a"] * 30),
        ("merges", [1]),
        ("merges", ["a zz"]),
        ("bos_token_id", "a"),
        ("bos_token_id", -1),
    ],
)
def test_a_gguf_vocabulary_of_another_kind_is_refused_by_field(field: str, value: Any) -> None:
    metadata = GPT2_TOKENIZER | {"tokenizer.ggml.add_bos_token": True, f"tokenizer.ggml.{field}": value}
    with pytest.raises(StartupError, match=r"tokenizer\.ggml"):
        build_tokenizer(metadata)


@pytest.mark.parametrize(
    "change",
    [
        {"added_tokens": [{"id": 10**12, "content": "x", "special": True}]},
        {"added_tokens": [{"id": -1, "content": "x", "special": True}]},
        {"added_tokens": [7]},
        {"added_tokens": {"a": 1}},
        {"model": None},
        {"model": {"type": "BPE", "vocab": {"a": 10**12}, "merges": []}},
        {"decoder": {"type": "Sequence", "decoders": [[[]]]}},
    ],
)
def test_a_tokenizer_of_another_kind_is_refused(change: dict[str, Any]) -> None:
    spec = json.loads(build_tokenizer(GPT2_TOKENIZER).to_str()) | change
    with pytest.raises(StartupError, match="tokenizer"):
        Tokenizer(json.dumps(spec))


def test_a_hostile_checkpoint_is_refused_before_it_is_mapped(tmp_path: Path) -> None:
    config = tiny_config()
    folder = write_folder(tmp_path / "model", config, random_tensors(config))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(StartupError, match=r"model\.safetensors .*4 bytes behind"):
        prepare(str(folder), cache_dir=tmp_path / "cache")
