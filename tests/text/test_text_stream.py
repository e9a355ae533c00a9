import codecs
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.text.text_stream import INTERRUPTED_REASONS, TextStream
from onward.text.token_table import TokenTable

PIECES = [
    b"a",
    b"b",
    b"ab",
    b"ba",
    b"c",
    b"\xc3",
    b"\xa9",
    "é".encode(),
    b"\xf0\x9f",
    b"\x91\x8d",
    b"a\xc3",
    b"\n",
    b"<eos>",
]
EOS = 12
TABLE = TokenTable(PIECES, [EOS])
tokens = st.lists(st.integers(0, EOS), max_size=20)


@dataclass(frozen=True)
class Options:
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    min_tokens: int

    def as_arguments(self) -> dict[str, Any]:
        return self.__dict__


options = st.builds(
    Options,
    stop=st.lists(st.sampled_from(["ab", "aba", "é", "b\n", "\ufffd", "cc", "👍", "<e"]), max_size=3).map(tuple),
    include_stop=st.booleans(),
    skip_special_tokens=st.booleans(),
    min_tokens=st.integers(0, 6),
)


def run(token_ids: list[int], chosen: Options, reason: str = "length") -> tuple[list[str], str, TextStream]:
    """Text per token, the rest, and the stream."""
    stream = TextStream(TABLE, **chosen.as_arguments())
    released: list[str] = []
    for token_id in token_ids:
        released.append(stream.push(token_id))
        if stream.stopped:
            break
    return released, stream.finish("stop" if stream.stopped else reason), stream


@settings(max_examples=500, deadline=None)
@given(tokens, options, st.integers(0, 20))
def test_cut_anywhere_replayed_and_continued_the_text_is_the_same(
    token_ids: list[int], chosen: Options, cut: int
) -> None:
    undisturbed, rest, _ = run(token_ids, chosen)
    stream, text = TextStream.replay(token_ids[:cut], TABLE, **chosen.as_arguments())
    assert text == "".join(undisturbed[:cut]), "what was delivered by then is a function of the tokens"
    for token_id in token_ids[cut:]:
        if stream.stopped:
            break
        text += stream.push(token_id)
    assert stream.num_tokens == len(undisturbed)
    assert text + stream.finish("length") == "".join(undisturbed) + rest


@settings(max_examples=500, deadline=None)
@given(tokens, options)
def test_the_text_is_that_of_the_tokens_up_to_the_stop_string(token_ids: list[int], chosen: Options) -> None:
    released, rest, stream = run(token_ids, chosen)
    taken = token_ids[: stream.num_tokens]
    shown = [PIECES[t] for t in taken if not (chosen.skip_special_tokens and t == EOS)]
    text = "".join(released) + rest
    whole = b"".join(shown).decode("utf-8", "replace")
    if not stream.stopped:
        assert taken == token_ids
        assert text == whole
        return
    assert stream.stop_string in chosen.stop
    assert whole.startswith(text)
    if chosen.include_stop:
        assert text.endswith(stream.stop_string)
    else:
        assert whole.startswith(text + stream.stop_string)


def test_the_token_that_completes_a_stop_string_is_counted() -> None:
    released, rest, stream = run([0, 4, 0, 3], Options(("cab",), False, True, 0))
    assert (released, rest) == (["a", "", "", ""], "")
    assert stream.stopped
    assert stream.num_tokens == 4


def test_a_stop_string_is_shown_when_asked_for_and_nothing_behind_it() -> None:
    released, rest, _ = run([0, 3], Options(("ab",), True, True, 0))
    assert "".join(released) + rest == "ab"


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_an_output_that_ended_shows_what_was_held_back(reason: str) -> None:
    released, rest, _ = run([4, 0, 8], Options(("ax",), False, True, 0), reason)
    assert (released, rest) == (["c", "", ""], "a\ufffd")


@pytest.mark.parametrize("reason", sorted(INTERRUPTED_REASONS))
def test_an_output_that_was_cut_keeps_what_was_held_back(reason: str) -> None:
    """It may go on elsewhere, where the rest of the character, or of the stop string, will come."""
    released, rest, _ = run([4, 0, 8], Options(("ax",), False, True, 0), reason)
    assert (released, rest) == (["c", "", ""], "")


def test_a_stop_string_before_min_tokens_is_text() -> None:
    stream = TextStream(TABLE, stop=("ab",), min_tokens=3)
    assert [stream.push(2), stream.push(0), stream.push(1)] == ["ab", "", ""]
    assert stream.stopped
    assert stream.num_tokens == 3


def test_the_end_token_has_no_text() -> None:
    stream = TextStream(TABLE, end_token_ids=[4])
    assert [stream.push(0), stream.push(4), stream.finish("stop")] == ["a", "", ""]
    assert TextStream(TABLE).push(EOS) == ""
    assert TextStream(TABLE, skip_special_tokens=False).push(EOS) == "<eos>"


def test_tokens_behind_a_stop_string_are_not_replayed() -> None:
    stream, text = TextStream.replay([4, 2, 4, 4], TABLE, stop=("ab",))
    assert (text, stream.stopped, stream.num_tokens) == ("c", True, 2)


def covered(token_ids: list[int], chosen: Options, shown: str) -> int:
    """From the bytes alone: the most tokens that end between two characters of the shown text."""
    decoder, text, most = codecs.getincrementaldecoder("utf-8")("replace"), "", 0
    for num_tokens, token_id in enumerate(token_ids, 1):
        is_hidden = token_id == EOS and chosen.skip_special_tokens
        text += decoder.decode(b"" if is_hidden else PIECES[token_id])
        if not decoder.getstate()[0] and len(text) <= len(shown):
            most = num_tokens
    return most


@settings(max_examples=400, deadline=None)
@given(tokens, options)
def test_the_tokens_that_the_text_covers_are_those_whose_text_is_all_shown(
    token_ids: list[int], chosen: Options
) -> None:
    released, _, stream = run(token_ids, chosen, "abort")
    if stream.stopped:
        assert stream.num_emitted_tokens(token_ids[: len(released)]) == len(released)
    else:
        assert stream.num_emitted_tokens(token_ids) == covered(token_ids, chosen, "".join(released))


def test_half_a_character_and_the_beginning_of_a_stop_string_are_not_covered() -> None:
    stream = TextStream(TABLE, stop=("ab",))
    assert [stream.push(one) for one in (4, 10)] == ["c", ""]
    assert stream.num_emitted_tokens([4, 10]) == 1, (
        "its first character may begin a stop string, its second is incomplete"
    )
