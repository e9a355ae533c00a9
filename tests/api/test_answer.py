"""Tokens in, pieces out, without any wire: also in bursts, which a slow connection or a draft brings."""

from hypothesis import given
from hypothesis import strategies as st

from onward.api.answer import MAX_EVENT_TOKENS, Answer, Choice, Piece
from onward.api.ledger import Delivery
from onward.proto.request import ErrorInfo
from onward.proto.sampling import Sampling
from onward.text.text_stream import TextStream
from onward.text.token_table import TokenTable

BYTES = TokenTable([bytes([byte]) for byte in range(256)])


def choice(index: int = 0, stop: tuple[str, ...] = (), **sampling: int) -> Choice:
    limits = Sampling(seed=1, choice=index, **sampling)
    return Choice(index, f"r-{index}", limits, TextStream(BYTES, stop))


def news(data: bytes, reason: str | None = None, index: int = 0, error: ErrorInfo | None = None) -> Delivery:
    return Delivery(f"r-{index}", list(data), 2, reason, error)


def test_what_came_for_a_choice_becomes_one_piece() -> None:
    answer = Answer(3, [choice()])
    progress = answer.take([news(b"ab"), news(b"c")])
    assert progress.pieces == [Piece(0, list(b"abc"), "abc")]
    assert not answer.finished


def test_no_piece_covers_a_token_behind_the_stop() -> None:
    answer = Answer(3, [choice(stop=("two",))])
    progress = answer.take([news(b"one two three"), news(b" four", "length")])
    assert progress.pieces == [Piece(0, list(b"one two"), "one ", "stop")]
    assert answer.choices[0].position == len("one two")
    assert answer.finished


def test_the_engine_is_told_of_a_stop_only_if_it_does_not_know_the_end() -> None:
    going_on, ended = (Answer(3, [choice(stop=("b",))]) for _ in range(2))
    assert [one.index for one in going_on.take([news(b"abc")]).stopped] == [0]
    assert ended.take([news(b"ab", "length")]).stopped == []


def test_nothing_is_said_after_the_end() -> None:
    answer = Answer(3, [choice(stop=("b",))])
    answer.take([news(b"ab")])
    assert answer.take([news(b"cd")]).pieces == []
    assert answer.usage().completion_tokens == 2


def test_pieces_that_came_before_an_error_are_still_said() -> None:
    error = ErrorInfo("crashed_worker", "x")
    answer = Answer(3, [choice()])
    progress = answer.take([news(b"ab"), news(b"", "error", error=error)])
    assert progress.pieces == [Piece(0, list(b"ab"), "ab")]
    assert progress.error == error


def test_choices_go_their_own_ways() -> None:
    answer = Answer(3, [choice(0), choice(1)])
    progress = answer.take([news(b"a"), news(b"x", index=1), news(b"b", "stop")])
    assert progress.pieces == [Piece(0, list(b"ab"), "ab", "stop"), Piece(1, list(b"x"), "x")]
    usage = answer.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 3, 2)


def test_an_event_holds_a_bounded_number_of_tokens() -> None:
    answer = Answer(3, [choice()])
    pieces = answer.take([news(b"x" * 600) for _ in range(5)]).pieces
    assert max(len(piece.token_ids) for piece in pieces) <= MAX_EVENT_TOKENS
    assert sum(len(piece.token_ids) for piece in pieces) == 3000


@given(
    output=st.text(alphabet="aé😀st op", max_size=30).map(str.encode),
    cut=st.integers(0, 100),
    burst=st.integers(1, 5),
)
def test_a_replayed_answer_goes_on_where_its_text_ended(output: bytes, cut: int, burst: int) -> None:
    """However the tokens are cut into attempts and bursts, the texts join to the same text and the same end."""
    limit = {"max_tokens": max(1, len(output))}
    whole, first, second = (choice(stop=("stop",), **limit) for _ in range(3))
    said = [whole.take(list(output), "length")]
    before = list(output[: min(cut, len(output))])
    head = first.take(before, None)
    tail = [second.replay(before)]
    for start in range(len(before), len(output), burst):
        if second.finish_reason is not None:
            break
        part = list(output[start : start + burst])
        tail.append(second.take(part, "length" if start + burst >= len(output) else None))
    if second.finish_reason is None:
        tail.append(second.take([], "length"))
    text = head.text + "".join(piece.text for piece in tail if piece is not None)
    assert (text, second.finish_reason, second.position) == (said[0].text, whole.finish_reason, whole.position)
