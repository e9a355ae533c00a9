import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from onward.errors import InvalidRequest, StartupError
from onward.text.gguf_tokenizer import build_tokenizer
from onward.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def library(byte_level_metadata: dict[str, Any]) -> Library:
    return build_tokenizer(byte_level_metadata)


def with_bos(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(build_tokenizer(metadata | {"tokenizer.ggml.add_bos_token": True}).to_str())


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_text_comes_back_from_its_tokens(
    byte_level_tokenizer: Tokenizer, sentencepiece_tokenizer: Tokenizer, text: str
) -> None:
    text = text.replace("▁", "_")
    for tokenizer in (byte_level_tokenizer, sentencepiece_tokenizer):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_byte_level_tokens_decode_as_the_library_decodes_them(
    byte_level_tokenizer: Tokenizer, library: Library, data: st.DataObject
) -> None:
    token_ids = data.draw(st.lists(st.integers(0, byte_level_tokenizer.vocab_size - 1), max_size=30))
    assert byte_level_tokenizer.decode(token_ids) == library.decode(token_ids)


def test_the_bytes_of_a_token_are_raw(byte_level_tokenizer: Tokenizer, sentencepiece_tokenizer: Tokenizer) -> None:
    bytes_of_text = b"".join(map(byte_level_tokenizer.token_bytes, byte_level_tokenizer.encode(" 𝄞é\n")))
    assert bytes_of_text == " 𝄞é\n".encode()
    for token, expected in [("<0x9D>", b"\x9d"), ("▁the", b" the"), ("</s>", b"</s>")]:
        token_id = sentencepiece_tokenizer.token_id(token)
        assert token_id is not None
        assert sentencepiece_tokenizer.token_bytes(token_id) == expected


def test_special_tokens_are_shown_only_on_request(byte_level_tokenizer: Tokenizer) -> None:
    token_ids = byte_level_tokenizer.encode("fox<|end|><tool>")
    assert byte_level_tokenizer.decode(token_ids) == "fox<tool>"
    assert byte_level_tokenizer.decode(token_ids, skip_special_tokens=False) == "fox<|end|><tool>"


def test_a_bos_is_added_once(byte_level_metadata: dict[str, Any]) -> None:
    tokenizer = with_bos(byte_level_metadata)
    bos, fox = tokenizer.token_id("<|begin|>"), tokenizer.encode("fox", add_special_tokens=False)
    assert tokenizer.encode("fox") == [bos, *fox]
    assert tokenizer.encode("<|begin|>fox") == [bos, *fox]
    assert tokenizer.encode("<|begin|>fox", add_special_tokens=False) == [bos, *fox]
    assert tokenizer.encode("") == [bos]


def test_a_rendered_chat_gets_no_bos_but_its_own(byte_level_metadata: dict[str, Any]) -> None:
    tokenizer = with_bos(byte_level_metadata)
    bos, end, fox = (tokenizer.token_id("<|begin|>"), tokenizer.token_id("<|end|>"), tokenizer.encode_chat("fox"))
    assert bos not in fox
    assert tokenizer.encode_chat("<|begin|>fox<|end|>fox") == [bos, *fox, end, *fox]


def test_only_a_text_loses_the_space_that_sentencepiece_put_before_it(sentencepiece_tokenizer: Tokenizer) -> None:
    the = sentencepiece_tokenizer.token_id("▁the")
    assert the is not None
    assert sentencepiece_tokenizer.decode([the, the]) == "the the"


def test_ids_of_the_models_padding_stand_for_nothing(byte_level_tokenizer: Tokenizer) -> None:
    padding = byte_level_tokenizer.vocab_size + 7
    assert byte_level_tokenizer.token_bytes(padding) == b""
    assert byte_level_tokenizer.decode([padding]) == ""


def test_a_file_is_read_and_a_bad_one_named(byte_level_metadata: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(build_tokenizer(byte_level_metadata).to_str())
    tokens = byte_level_metadata["tokenizer.ggml.tokens"]
    assert Tokenizer.from_file(path).vocab_size == len(tokens)
    path.write_text("{")
    for bad in (path, tmp_path / "missing.json"):
        with pytest.raises(StartupError, match="tokenizer cannot be read"):
            Tokenizer.from_file(bad)


def test_a_decoder_that_nobody_knows_is_refused(byte_level_metadata: dict[str, Any]) -> None:
    spec = json.loads(build_tokenizer(byte_level_metadata).to_str())
    spec["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    with pytest.raises(StartupError, match="WordPiece"):
        Tokenizer(json.dumps(spec))


def test_padding_and_cutting_asked_for_by_the_file_are_ignored(byte_level_metadata: dict[str, Any]) -> None:
    library = build_tokenizer(byte_level_metadata)
    plain = library.encode("the fox jumps").ids
    library.enable_padding(length=64)
    library.enable_truncation(max_length=2)
    assert Tokenizer(library.to_str()).encode("the fox jumps") == plain


def test_half_a_surrogate_pair_is_the_clients_fault(byte_level_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        byte_level_tokenizer.encode("a\ud800b")


def test_tokenizers_of_published_folders_decode_too(byte_level_metadata: dict[str, Any]) -> None:
    """Metaspace is the other way to write a SentencePiece decoder."""
    spec = json.loads(build_tokenizer(byte_level_metadata).to_str())
    spec["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    spec["model"]["vocab"] = {"▁the": 0, "fox": 1}
    spec["model"]["merges"] = []
    spec["added_tokens"] = []
    spec["pre_tokenizer"] = None
    tokenizer = Tokenizer(json.dumps(spec))
    assert tokenizer.decode([0, 0, 1]) == "the thefox"
