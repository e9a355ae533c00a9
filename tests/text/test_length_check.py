"""Texts that cannot fit are refused at a cost that does not depend on their length; those that fit never are."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from onward.errors import InvalidRequest
from onward.proto.model import TokenizerFiles
from onward.text.gguf_tokenizer import build_tokenizer
from onward.text.length_check import PIECE_CHARS, check_text_length, kept_text
from onward.text.prompt_tokenizer import ChatMessage, PromptTokenizer
from onward.text.tokenizer import Tokenizer
from onward.text.truncation import Side, Truncation

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


class Counted:
    """How many characters were tokenized."""

    def __init__(self, tokens_per_piece: int) -> None:
        self.num_chars = 0
        self._num_tokens = tokens_per_piece

    def __call__(self, piece: str) -> int:
        self.num_chars += len(piece)
        return self._num_tokens


def test_a_text_of_more_characters_than_could_fit_is_not_tokenized_at_all() -> None:
    count = Counted(1)
    check_text_length("x" * 800, 100, 8, count)
    with pytest.raises(InvalidRequest, match=r"801 characters.*800.*100 tokens") as refused:
        check_text_length("x" * 801, 100, 8, count)
    assert refused.value.code == "context_length_exceeded"
    assert count.num_chars == 0


def test_a_long_text_is_tokenized_only_until_it_is_certain_that_it_does_not_fit() -> None:
    for num_pieces in (5, 50):
        count = Counted(PIECE_CHARS)
        with pytest.raises(InvalidRequest, match="tokens") as refused:
            check_text_length("1" * (num_pieces * PIECE_CHARS), PIECE_CHARS, 128, count)
        assert refused.value.code == "context_length_exceeded"
        assert count.num_chars == 3 * PIECE_CHARS


def test_a_long_text_of_long_tokens_is_not_refused() -> None:
    count = Counted(PIECE_CHARS // 32)
    check_text_length("x" * (32 * PIECE_CHARS), PIECE_CHARS, 32, count)
    assert count.num_chars == 32 * PIECE_CHARS


@settings(deadline=None)
@given(text=st.text(max_size=200), times=st.integers(1, 400))
def test_whatever_fits_is_tokenized(byte_level_tokenizer: Tokenizer, text: str, times: int) -> None:
    token_ids = byte_level_tokenizer.encode(text * times)
    assert byte_level_tokenizer.encode(text * times, max_tokens=max(1, len(token_ids))) == token_ids


def test_a_chats_prompt_is_refused_while_it_is_rendered(byte_level_metadata: dict[str, Any]) -> None:
    tokens = PromptTokenizer(TokenizerFiles(build_tokenizer(byte_level_metadata).to_str(), TEMPLATE, None, None))
    assert tokens.tokenizer is not None
    most = 10 * tokens.tokenizer.max_bytes_per_token
    tokens.tokenize_chat([ChatMessage("user", "x" * most)], 0, max_tokens=10)
    with pytest.raises(InvalidRequest) as refused:
        tokens.tokenize_chat([ChatMessage("user", "x" * most), ChatMessage("user", "x")], 0, max_tokens=10)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(InvalidRequest) as refused:
        tokens.tokenize_text("x" * (most + 1), 10)
    assert refused.value.code == "context_length_exceeded"


def test_a_text_that_a_normalizer_makes_shorter_is_not_refused(byte_level_metadata: dict[str, Any]) -> None:
    plain = build_tokenizer(byte_level_metadata)
    plain.normalizer = normalizers.NFKC()
    tokenizer = Tokenizer(plain.to_str())
    text = "\N{MATHEMATICAL BOLD CAPITAL A}" * 400
    fitting = Tokenizer(build_tokenizer(byte_level_metadata).to_str()).max_bytes_per_token
    assert tokenizer.max_bytes_per_token == 4 * fitting
    assert tokenizer.encode(text, max_tokens=400) == tokenizer.encode("A" * 400)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_side_of_a_long_text_costs_no_more_than_the_tokens_that_are_kept(side: Side) -> None:
    for num_pieces in (5, 50):
        count = Counted(PIECE_CHARS)
        text = "2" + "1" * (num_pieces * PIECE_CHARS) + "3"
        kept = kept_text(text, Truncation(PIECE_CHARS, side), count)
        assert count.num_chars == len(kept) == 3 * PIECE_CHARS
        assert kept.endswith("13") if side == "left" else kept.startswith("21")


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_part_of_a_text_that_is_tokenized_does_not_depend_on_the_context(
    byte_level_tokenizer: Tokenizer, side: Side
) -> None:
    """An instance with another context, or a router that knows none, makes the same tokens."""
    text, truncation = "one two " * 50_000, Truncation(10, side)
    contexts = (10, 1_000, 1_000_000, None)
    sizes = {len(byte_level_tokenizer.encode(text, max_tokens=size, truncation=truncation)) for size in contexts}
    assert len(sizes) == 1 and max(sizes) < PIECE_CHARS


@settings(max_examples=20, deadline=None)
@given(st.text(min_size=1, max_size=40), st.integers(1, 300), st.sampled_from(["left", "right"]))
def test_the_kept_tokens_of_a_text_do_not_depend_on_where_it_was_cut(
    byte_level_tokenizer: Tokenizer, text: str, num_tokens: int, side: Side
) -> None:
    long, truncation = text * (200_000 // len(text)), Truncation(num_tokens, side)
    expected = truncation.cut(byte_level_tokenizer.encode(long))
    assert truncation.cut(byte_level_tokenizer.encode(long, max_tokens=300, truncation=truncation)) == expected
