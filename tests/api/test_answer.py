"""Tokens in, pieces out, without any wire: also in bursts, which a slow connection or a draft brings."""

from hypothesis import given, settings
from hypothesis import strategies as st

from onward.api.answer import MAX_EVENT_TOKENS, Answer
from onward.api.choice import Choice, Start
from onward.api.ledger import ABORTED, Delivery
from onward.api.logprobs import TextOffsets
from onward.api.pieces import NoText, Piece, joined
from onward.proto.request import ErrorInfo
from onward.proto.sampling import Sampling
from onward.proto.step import TokenLogprobs
from onward.text.text_stream import TextStream
from onward.text.token_table import TokenTable

BYTES = TokenTable([bytes([byte]) for byte in range(256)])


def choice(index: int = 0, stop: tuple[str, ...] = (), **sampling: int) -> Choice:
    limits = Sampling(seed=1, choice=index, **sampling)
    return Choice(index, f"r-{index}", limits, TextStream(BYTES, stop))


def news(data: bytes, reason: str | None = None, index: int = 0, error: ErrorInfo | None = None) -> Delivery:
    return Delivery(f"r-{index}", list(data), 2, reason, error)


def test_what_came_for_a_choice_becomes_one_piece() -> None:
    answer = Answer([[1, 2, 3]], [choice()])
    progress = answer.take([news(b"ab"), news(b"c")])
    assert progress.pieces == [Piece(0, list(b"abc"), "abc")]
    assert not answer.finished


def test_no_piece_covers_a_token_behind_the_stop() -> None:
    answer = Answer([[1, 2, 3]], [choice(stop=("two",))])
    progress = answer.take([news(b"one two three"), news(b" four", "length")])
    assert progress.pieces == [Piece(0, list(b"one two"), "one ", "stop")]
    assert answer.choices[0].position == len("one two")
    assert answer.finished


def test_the_engine_is_told_of_a_stop_only_if_it_does_not_know_the_end() -> None:
    going_on, ended = (Answer([[1, 2, 3]], [choice(stop=("b",))]) for _ in range(2))
    assert [one.index for one in going_on.take([news(b"abc")]).stopped] == [0]
    assert ended.take([news(b"ab", "length")]).stopped == []


def test_nothing_is_said_after_the_end() -> None:
    answer = Answer([[1, 2, 3]], [choice(stop=("b",))])
    answer.take([news(b"ab")])
    assert answer.take([news(b"cd")]).pieces == []
    assert answer.usage().completion_tokens == 2


def test_pieces_that_came_before_an_error_are_still_said() -> None:
    error = ErrorInfo("crashed_worker", "x")
    answer = Answer([[1, 2, 3]], [choice()])
    progress = answer.take([news(b"ab"), news(b"", "error", error=error)])
    assert progress.pieces == [Piece(0, list(b"ab"), "ab")]
    assert progress.error == error


GIVEN_UP = ErrorInfo("pd_preempted", "PD Error: x", 503, True)


def test_a_choice_that_is_given_up_shows_only_what_can_no_longer_change() -> None:
    answer = Answer([[1, 2, 3]], [choice(stop=("stop",))])
    progress = answer.take([news("né st".encode()), news("😀".encode()[:2], "pd_reschedule", error=GIVEN_UP)])
    output = list("né st".encode() + "😀".encode()[:2])
    ended = Piece(0, output, "né ", "pd_reschedule", completion_token_ids=output, num_text_tokens=4, error=GIVEN_UP)
    assert (progress.pieces, progress.error, answer.finished) == ([ended], None, True)


def test_a_stop_string_in_the_last_tokens_wins_over_being_given_up() -> None:
    answer = Answer([[1, 2, 3]], [choice(stop=("b",))])
    assert answer.take([news(b"abc", "pd_reschedule", error=GIVEN_UP)]).pieces == [Piece(0, list(b"ab"), "a", "stop")]
    assert not answer.rescheduled


def test_other_choices_go_on_when_one_is_given_up_and_tell_their_tokens() -> None:
    answer = Answer([[1, 2, 3]], [choice(0), choice(1)])
    first = answer.take([news(b"", "pd_reschedule", error=GIVEN_UP)])
    assert (first.pieces[0].completion_token_ids, first.error, answer.finished) == ([], None, False)
    [piece] = answer.take([news(b"xy", "length", index=1)]).pieces
    assert (piece.completion_token_ids, piece.error) == (list(b"xy"), None)


def test_an_answer_of_no_token_at_all_that_is_given_up_is_an_error() -> None:
    answer = Answer([[1, 2, 3]], [choice(0), choice(1)])
    answer.take([news(b"", "pd_reschedule", error=GIVEN_UP)])
    progress = answer.take([news(b"", "pd_reschedule", index=1, error=GIVEN_UP)])
    assert (progress.pieces, progress.error) == ([], GIVEN_UP)


def test_an_abort_of_one_choice_is_the_end_of_an_answer_that_is_given_up() -> None:
    for deliveries in (
        [news(b"a", "pd_reschedule", error=GIVEN_UP), news(b"", "error", index=1, error=ABORTED)],
        [news(b"", "error", index=1, error=ABORTED), news(b"a", "pd_reschedule", error=GIVEN_UP)],
    ):
        assert Answer([[1, 2, 3]], [choice(0), choice(1)]).take(deliveries).error == ABORTED


def test_choices_go_their_own_ways() -> None:
    answer = Answer([[1, 2, 3]], [choice(0), choice(1)])
    progress = answer.take([news(b"a"), news(b"x", index=1), news(b"b", "stop")])
    assert progress.pieces == [Piece(0, list(b"ab"), "ab", "stop", ended_by_token=True), Piece(1, list(b"x"), "x")]
    usage = answer.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 3, 2)


def test_an_event_holds_a_bounded_number_of_tokens() -> None:
    answer = Answer([[1, 2, 3]], [choice()])
    pieces = answer.take([news(b"x" * 600) for _ in range(5)]).pieces
    assert max(len(piece.token_ids) for piece in pieces) <= MAX_EVENT_TOKENS
    assert sum(len(piece.token_ids) for piece in pieces) == 3000


@settings(deadline=None)
@given(
    output=st.text(alphabet="aé😀st op", max_size=30).map(str.encode),
    cut=st.integers(0, 100),
    burst=st.integers(1, 5),
)
def test_a_replayed_answer_goes_on_where_its_text_ended(output: bytes, cut: int, burst: int) -> None:
    """However the tokens are cut into attempts and bursts, the texts join to the same text and the same end."""
    limit = {"max_tokens": max(1, len(output))}
    whole, first, second = (choice(stop=("stop",), **limit) for _ in range(3))
    said = [whole.take(news(output, "length"))]
    before = output[: min(cut, len(output))]
    head = first.take(news(before))
    tail = [second.replay(Start(list(before)))]
    for start in range(len(before), len(output), burst):
        if second.finish_reason is not None:
            break
        part = output[start : start + burst]
        tail.append(second.take(news(part, "length" if start + burst >= len(output) else None)))
    if second.finish_reason is None:
        tail.append(second.take(news(b"", "length")))
    text = head.text + "".join(piece.text for piece in tail if piece is not None)
    assert (text, second.finish_reason, second.position) == (said[0].text, whole.finish_reason, whole.position)


def likely(*positions: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(-float(position), 1) for position in positions]


def measured(*positions: int, data: bytes, reason: str | None = None) -> Delivery:
    return Delivery("r-0", list(data), 2, reason, logprobs=likely(*positions))


def measured_choice(stop: tuple[str, ...] = ()) -> Choice:
    return Choice(
        0, "r-0", Sampling(seed=1, logprobs=0, prompt_logprobs=0), TextStream(BYTES, stop), TextOffsets(BYTES)
    )


def test_tokens_that_share_an_event_share_it_with_their_logprobs() -> None:
    answer = Answer([[1, 2, 3]], [measured_choice()])
    [piece] = answer.take([measured(0, 1, data=b"ab"), measured(2, data=b"c"), news(b"", "length")]).pieces
    assert (piece.token_ids, piece.logprobs, piece.text_offsets) == (list(b"abc"), likely(0, 1, 2), [0, 1, 2])


def test_logprobs_do_not_wait_for_text_that_is_held_back() -> None:
    answer = Answer([[1, 2, 3]], [measured_choice(stop=("stop",))])
    pieces = [answer.take([measured(at, data=bytes([byte]))]).pieces[0] for at, byte in enumerate("é st".encode())]
    assert [piece.text for piece in pieces] == ["", "é", " ", "", ""]
    assert [piece.logprobs for piece in pieces] == [likely(at) for at in range(5)]
    assert [piece.text_offsets for piece in pieces] == [[0], [0], [1], [2], [3]]


def test_logprobs_behind_a_stop_string_are_cut_with_their_tokens() -> None:
    answer = Answer([[1, 2, 3]], [measured_choice(stop=("b",))])
    [piece] = answer.take([measured(0, 1, 2, data=b"abc")]).pieces
    assert (piece.token_ids, piece.logprobs, piece.text_offsets) == (list(b"ab"), likely(0, 1), [0, 1])


def test_offsets_go_on_behind_the_text_of_an_earlier_attempt() -> None:
    going_on = measured_choice()
    going_on.replay(Start(list("né".encode())))
    assert going_on.take(measured(0, data=b"e")).text_offsets == [2]


def test_tokens_that_are_scored_again_come_first_and_bring_no_text() -> None:
    going_on = measured_choice()
    going_on.replay(Start(list("né ".encode()), rescore_from=1))
    answer = Answer([[1, 2, 3]], [going_on])
    first = Delivery("r-0", [101], 2, logprobs=likely(4), rescored=likely(1, 2, 3))
    [piece] = answer.take([first, measured(5, data=b"s")]).pieces
    assert (piece.token_ids, piece.text, piece.scored_token_ids) == (list(b"es"), "es", list("é es".encode()))
    assert (piece.logprobs, piece.text_offsets) == (likely(1, 2, 3, 4, 5), [1, 1, 2, 3, 4])
    assert joined([piece, answer.take([measured(6, data=b"t")]).pieces[0]]).scored_token_ids == list("é est".encode())


def test_the_prompts_logprobs_are_told_with_their_tokens() -> None:
    answer = Answer([[7, 8, 9]], [measured_choice()])
    first = Delivery("r-0", [97], 2, logprobs=likely(0), prompt_logprobs=likely(1, 2))
    [piece] = answer.take([first, measured(1, data=b"b")]).pieces
    assert piece.prompt_logprobs == list(zip([8, 9], likely(1, 2), strict=True))
    [later] = answer.take([measured(2, data=b"c")]).pieces
    assert joined([piece, later]).prompt_logprobs == piece.prompt_logprobs
    assert joined([piece, later]).logprobs == likely(0, 1, 2)


def test_only_a_token_that_ended_the_output_is_said_to_have_ended_it() -> None:
    def last(data: bytes, reason: str | None, stop: tuple[str, ...] = ()) -> bool:
        return Answer([[1]], [choice(stop=stop)]).take([news(data, reason)]).pieces[0].ended_by_token

    assert last(b"ab", "stop")
    assert not last(b"ab", "length")
    assert not last(b"ab", None)
    assert not last(b"ab", "stop", stop=("b",))
    assert not last(b"", "stop")


def test_without_text_tokens_pass_and_only_they_end_an_output() -> None:
    answer = Answer([[1]], [Choice(0, "r-0", Sampling(seed=1), NoText())])
    assert answer.take([news(b"ab", "length")]).pieces == [Piece(0, list(b"ab"), "", "length")]


def test_the_cached_part_of_a_prompt_is_told_by_the_first_choice_that_ran() -> None:
    ended, running = choice(0, max_tokens=1), choice(1)
    ended.replay(Start([97]))
    answer = Answer([[1, 2, 3]], [ended, running])
    assert answer.usage().cached_tokens == 0
    answer.take([news(b"x", index=1)])
    assert answer.usage().cached_tokens == 2
    answer.take([Delivery("r-1", [], None, "error", ErrorInfo("x", "y"))])
    assert answer.usage().cached_tokens == 2


def test_a_prompt_of_one_token_has_no_logprobs_to_tell_and_says_so() -> None:
    asking = Choice(0, "r-0", Sampling(seed=1, prompt_logprobs=3), NoText())
    answer = Answer([[7]], [asking])
    assert [answer.take([news(b"a")]).pieces[0].prompt_logprobs for _ in range(2)] == [[], None]
