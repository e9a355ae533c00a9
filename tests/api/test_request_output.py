"""Tokens in, pieces out, without any wire: also in bursts, which a slow connection or a draft brings."""

from hypothesis import given, settings
from hypothesis import strategies as st

from onward.api.engine_link.request_tracker import ABORTED, EngineOutput
from onward.api.lifecycle.choice_output import ChoiceOutput, ChoiceStart
from onward.api.lifecycle.choice_update import ChoiceUpdate, NullTextStream, join_updates
from onward.api.lifecycle.logprobs_json import TextOffsets
from onward.api.lifecycle.request_output import MAX_EVENT_TOKENS, RequestOutput
from onward.proto.engine import ErrorInfo
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import TokenLogprobs
from onward.text.text_stream import TextStream
from onward.text.token_table import TokenTable

BYTES = TokenTable([bytes([byte]) for byte in range(256)])


def choice(index: int = 0, stop: tuple[str, ...] = (), **sampling: int) -> ChoiceOutput:
    limits = SamplingParams(seed=1, choice_index=index, **sampling)
    return ChoiceOutput(index, f"r-{index}", limits, TextStream(BYTES, stop))


def news(data: bytes, reason: str | None = None, index: int = 0, error: ErrorInfo | None = None) -> EngineOutput:
    return EngineOutput(f"r-{index}", list(data), 2, reason, error)


def test_what_came_for_a_choice_becomes_one_piece() -> None:
    answer = RequestOutput([[1, 2, 3]], [choice()])
    progress = answer.apply([news(b"ab"), news(b"c")])
    assert progress.updates == [ChoiceUpdate(0, list(b"abc"), "abc")]
    assert not answer.is_finished


def test_no_piece_covers_a_token_behind_the_stop() -> None:
    answer = RequestOutput([[1, 2, 3]], [choice(stop=("two",))])
    progress = answer.apply([news(b"one two three"), news(b" four", "length")])
    assert progress.updates == [ChoiceUpdate(0, list(b"one two"), "one ", "stop", matched_stop="two")]
    assert answer.choices[0].position == len("one two")
    assert answer.is_finished


def test_the_engine_is_told_of_a_stop_only_if_it_does_not_know_the_end() -> None:
    going_on, ended = (RequestOutput([[1, 2, 3]], [choice(stop=("b",))]) for _ in range(2))
    assert [one.index for one in going_on.apply([news(b"abc")]).stopped] == [0]
    assert ended.apply([news(b"ab", "length")]).stopped == []


def test_nothing_is_said_after_the_end() -> None:
    answer = RequestOutput([[1, 2, 3]], [choice(stop=("b",))])
    answer.apply([news(b"ab")])
    assert answer.apply([news(b"cd")]).updates == []
    assert answer.usage().completion_tokens == 2


def test_pieces_that_came_before_an_error_are_still_said() -> None:
    error = ErrorInfo("crashed_worker", "x")
    answer = RequestOutput([[1, 2, 3]], [choice()])
    progress = answer.apply([news(b"ab"), news(b"", "error", error=error)])
    assert progress.updates == [ChoiceUpdate(0, list(b"ab"), "ab")]
    assert progress.error == error


GIVEN_UP = ErrorInfo("pd_preempted", "PD Error: x", 503, True)


def test_a_choice_that_is_given_up_shows_only_what_can_no_longer_change() -> None:
    answer = RequestOutput([[1, 2, 3]], [choice(stop=("stop",))])
    progress = answer.apply([news("né st".encode()), news("😀".encode()[:2], "pd_reschedule", error=GIVEN_UP)])
    output = list("né st".encode() + "😀".encode()[:2])
    ended = ChoiceUpdate(
        0, output, "né ", "pd_reschedule", completion_token_ids=output, num_text_tokens=4, error=GIVEN_UP
    )
    assert (progress.updates, progress.error, answer.is_finished) == ([ended], None, True)


def test_a_stop_string_in_the_last_tokens_wins_over_being_given_up() -> None:
    answer = RequestOutput([[1, 2, 3]], [choice(stop=("b",))])
    assert answer.apply([news(b"abc", "pd_reschedule", error=GIVEN_UP)]).updates == [
        ChoiceUpdate(0, list(b"ab"), "a", "stop", matched_stop="b")
    ]
    assert not answer.rescheduled


def test_other_choices_go_on_when_one_is_given_up_and_tell_their_tokens() -> None:
    answer = RequestOutput([[1, 2, 3]], [choice(0), choice(1)])
    first = answer.apply([news(b"", "pd_reschedule", error=GIVEN_UP)])
    assert (first.updates[0].completion_token_ids, first.error, answer.is_finished) == ([], None, False)
    [piece] = answer.apply([news(b"xy", "length", index=1)]).updates
    assert (piece.completion_token_ids, piece.error) == (list(b"xy"), None)


def test_an_answer_of_no_token_at_all_that_is_given_up_is_an_error() -> None:
    answer = RequestOutput([[1, 2, 3]], [choice(0), choice(1)])
    answer.apply([news(b"", "pd_reschedule", error=GIVEN_UP)])
    progress = answer.apply([news(b"", "pd_reschedule", index=1, error=GIVEN_UP)])
    assert (progress.updates, progress.error) == ([], GIVEN_UP)


def test_an_abort_of_one_choice_is_the_end_of_an_answer_that_is_given_up() -> None:
    for deliveries in (
        [news(b"a", "pd_reschedule", error=GIVEN_UP), news(b"", "error", index=1, error=ABORTED)],
        [news(b"", "error", index=1, error=ABORTED), news(b"a", "pd_reschedule", error=GIVEN_UP)],
    ):
        assert RequestOutput([[1, 2, 3]], [choice(0), choice(1)]).apply(deliveries).error == ABORTED


def test_choices_go_their_own_ways() -> None:
    answer = RequestOutput([[1, 2, 3]], [choice(0), choice(1)])
    progress = answer.apply([news(b"a"), news(b"x", index=1), news(b"b", "stop")])
    assert progress.updates == [
        ChoiceUpdate(0, list(b"ab"), "ab", "stop", ends_with_stop_token=True),
        ChoiceUpdate(1, list(b"x"), "x"),
    ]
    usage = answer.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 3, 2)


def test_an_event_holds_a_bounded_number_of_tokens() -> None:
    answer = RequestOutput([[1, 2, 3]], [choice()])
    pieces = answer.apply([news(b"x" * 600) for _ in range(5)]).updates
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
    said = [whole.apply(news(output, "length"))]
    before = output[: min(cut, len(output))]
    head = first.apply(news(before))
    tail = [second.replay(ChoiceStart(list(before)))]
    for start in range(len(before), len(output), burst):
        if second.finish_reason is not None:
            break
        part = output[start : start + burst]
        tail.append(second.apply(news(part, "length" if start + burst >= len(output) else None)))
    if second.finish_reason is None:
        tail.append(second.apply(news(b"", "length")))
    text = head.text + "".join(piece.text for piece in tail if piece is not None)
    assert (text, second.finish_reason, second.position) == (said[0].text, whole.finish_reason, whole.position)


def likely(*positions: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(-float(position), 1) for position in positions]


def measured(*positions: int, data: bytes, reason: str | None = None) -> EngineOutput:
    return EngineOutput("r-0", list(data), 2, reason, logprobs=likely(*positions))


def measured_choice(stop: tuple[str, ...] = ()) -> ChoiceOutput:
    return ChoiceOutput(
        0, "r-0", SamplingParams(seed=1, logprobs=0, prompt_logprobs=0), TextStream(BYTES, stop), TextOffsets(BYTES)
    )


def test_tokens_that_share_an_event_share_it_with_their_logprobs() -> None:
    answer = RequestOutput([[1, 2, 3]], [measured_choice()])
    [piece] = answer.apply([measured(0, 1, data=b"ab"), measured(2, data=b"c"), news(b"", "length")]).updates
    assert (piece.token_ids, piece.logprobs, piece.text_offsets) == (list(b"abc"), likely(0, 1, 2), [0, 1, 2])


def test_logprobs_do_not_wait_for_text_that_is_held_back() -> None:
    answer = RequestOutput([[1, 2, 3]], [measured_choice(stop=("stop",))])
    pieces = [answer.apply([measured(at, data=bytes([byte]))]).updates[0] for at, byte in enumerate("é st".encode())]
    assert [piece.text for piece in pieces] == ["", "é", " ", "", ""]
    assert [piece.logprobs for piece in pieces] == [likely(at) for at in range(5)]
    assert [piece.text_offsets for piece in pieces] == [[0], [0], [1], [2], [3]]


def test_logprobs_behind_a_stop_string_are_cut_with_their_tokens() -> None:
    answer = RequestOutput([[1, 2, 3]], [measured_choice(stop=("b",))])
    [piece] = answer.apply([measured(0, 1, 2, data=b"abc")]).updates
    assert (piece.token_ids, piece.logprobs, piece.text_offsets) == (list(b"ab"), likely(0, 1), [0, 1])


def test_offsets_go_on_behind_the_text_of_an_earlier_attempt() -> None:
    going_on = measured_choice()
    going_on.replay(ChoiceStart(list("né".encode())))
    assert going_on.apply(measured(0, data=b"e")).text_offsets == [2]


def test_tokens_that_are_scored_again_come_first_and_bring_no_text() -> None:
    going_on = measured_choice()
    going_on.replay(ChoiceStart(list("né ".encode()), rescore_from=1))
    answer = RequestOutput([[1, 2, 3]], [going_on])
    first = EngineOutput("r-0", [101], 2, logprobs=likely(4), rescored_logprobs=likely(1, 2, 3))
    [piece] = answer.apply([first, measured(5, data=b"s")]).updates
    assert (piece.token_ids, piece.text, piece.scored_token_ids) == (list(b"es"), "es", list("é es".encode()))
    assert (piece.logprobs, piece.text_offsets) == (likely(1, 2, 3, 4, 5), [1, 1, 2, 3, 4])
    assert join_updates([piece, answer.apply([measured(6, data=b"t")]).updates[0]]).scored_token_ids == list(
        "é est".encode()
    )


def test_the_prompts_logprobs_are_told_with_their_tokens() -> None:
    answer = RequestOutput([[7, 8, 9]], [measured_choice()])
    first = EngineOutput("r-0", [97], 2, logprobs=likely(0), prompt_logprobs=likely(1, 2))
    [piece] = answer.apply([first, measured(1, data=b"b")]).updates
    assert piece.prompt_logprobs == list(zip([8, 9], likely(1, 2), strict=True))
    [later] = answer.apply([measured(2, data=b"c")]).updates
    assert join_updates([piece, later]).prompt_logprobs == piece.prompt_logprobs
    assert join_updates([piece, later]).logprobs == likely(0, 1, 2)


def test_only_a_token_that_ended_the_output_is_said_to_have_ended_it() -> None:
    def last(data: bytes, reason: str | None, stop: tuple[str, ...] = ()) -> bool:
        return RequestOutput([[1]], [choice(stop=stop)]).apply([news(data, reason)]).updates[0].ends_with_stop_token

    assert last(b"ab", "stop")
    assert not last(b"ab", "length")
    assert not last(b"ab", None)
    assert not last(b"ab", "stop", stop=("b",))
    assert not last(b"", "stop")


def test_without_text_tokens_pass_and_only_they_end_an_output() -> None:
    answer = RequestOutput([[1]], [ChoiceOutput(0, "r-0", SamplingParams(seed=1), NullTextStream())])
    assert answer.apply([news(b"ab", "length")]).updates == [ChoiceUpdate(0, list(b"ab"), "", "length")]


def test_the_cached_part_of_a_prompt_is_told_by_the_first_choice_that_ran() -> None:
    ended, running = choice(0, max_tokens=1), choice(1)
    ended.replay(ChoiceStart([97]))
    answer = RequestOutput([[1, 2, 3]], [ended, running])
    assert answer.usage().cached_tokens == 0
    answer.apply([news(b"x", index=1)])
    assert answer.usage().cached_tokens == 2
    answer.apply([EngineOutput("r-1", [], None, "error", ErrorInfo("x", "y"))])
    assert answer.usage().cached_tokens == 2


def test_a_prompt_of_one_token_has_no_logprobs_to_tell_and_says_so() -> None:
    asking = ChoiceOutput(0, "r-0", SamplingParams(seed=1, prompt_logprobs=3), NullTextStream())
    answer = RequestOutput([[7]], [asking])
    assert [answer.apply([news(b"a")]).updates[0].prompt_logprobs for _ in range(2)] == [[], None]
