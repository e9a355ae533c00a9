from hypothesis import example, given, settings
from hypothesis import strategies as st

from onward.text.detokenizer import Detokenizer
from onward.text.token_table import TokenTable
from onward.text.tokenizer import Tokenizer

EMOJI = "👍🏽".encode()
# Ids 0 to 255 are the bytes; then some whole characters, a piece that ends in half of one, and a special token.
TABLE = TokenTable(
    [*(bytes([b]) for b in range(256)), "é".encode(), b"the", "日本".encode(), b"x" + EMOJI[:2], b"<s>"], [260]
)
SPECIAL = 260
token_lists = st.lists(
    st.one_of(
        st.integers(0, 260),
        st.sampled_from([0x80, 0xBF, 0xC3, 0xE0, 0xE2, 0xED, 0xA0, 0xF0, 0x9F, 0xF4, 0x90, 0xFF, 259, SPECIAL]),
    ),
    max_size=24,
)


def whole(token_ids: list[int], skip: bool = True) -> str:
    pieces = [TABLE.token_bytes_list[i] for i in token_ids if not (skip and i == SPECIAL)]
    return b"".join(pieces).decode("utf-8", "replace")


@settings(max_examples=500, deadline=None)
@given(token_lists, st.booleans())
@example([0xF0, SPECIAL, 0x9F, 0x91, 0x8D], True)
@example([0xE0, 0x80, 0xED, 0xA0, 0x80, 0xF4, 0x90], True)
def test_the_pieces_add_up_to_decoding_everything_at_once(token_ids: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(TABLE, skip_special_tokens=skip)
    text = "".join(map(detokenizer.push, token_ids))
    assert text + detokenizer.flush() == whole(token_ids, skip)
    assert detokenizer.pending == b""


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20))
def test_no_piece_of_valid_text_holds_a_replacement_character(text: str) -> None:
    text = text.replace("\ufffd", "")
    detokenizer = Detokenizer(TABLE)
    pieces = [detokenizer.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text
    assert all(len(piece) <= 1 for piece in pieces)


def test_a_character_appears_with_the_token_that_completes_it() -> None:
    detokenizer = Detokenizer(TABLE)
    assert [detokenizer.push(byte) for byte in "a👍b".encode()] == ["a", "", "", "", "👍", "b"]


def test_a_byte_that_cannot_go_on_is_replaced_at_once() -> None:
    detokenizer = Detokenizer(TABLE)
    assert [detokenizer.push(t) for t in (0xF0, 0x9F, 257)] == ["", "", "\ufffdthe"]
    assert [detokenizer.push(t) for t in (0xFF, 0x80)] == ["\ufffd", "\ufffd"]


def test_the_incomplete_rest_is_kept_apart_until_it_is_flushed() -> None:
    detokenizer = Detokenizer(TABLE)
    assert detokenizer.push(259) == "x"
    assert detokenizer.pending == EMOJI[:2]
    assert detokenizer.flush() == "\ufffd"


def test_ids_of_the_models_padding_are_silent() -> None:
    detokenizer = Detokenizer(TABLE)
    assert [detokenizer.push(t) for t in (0xC3, 10**6, 0xA9)] == ["", "", "é"]


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30), st.data())
def test_an_output_continues_its_prompt_to_the_letter(
    sentencepiece_tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    """A SentencePiece output whose first token has a leading space keeps it: the prompt is before it."""
    token_ids = sentencepiece_tokenizer.encode("so " + text.replace("▁", "_"))
    cut = data.draw(st.integers(2, len(token_ids)))
    prompt = b"".join(map(sentencepiece_tokenizer.token_bytes, token_ids[1:cut]))
    detokenizer = Detokenizer(sentencepiece_tokenizer.table)
    output = "".join(map(detokenizer.push, token_ids[cut:])) + detokenizer.flush()
    rest = sentencepiece_tokenizer.decode(token_ids).encode()[len(prompt) - 1 :]
    assert output == rest.decode("utf-8", "replace")
