"""One stream across its attempts, without sockets: whatever happens, the client's side has no seam."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.proto.cursor import ChoiceCursor, Cursor, parse_cursor
from onward.proto.engine import ErrorInfo
from onward.proto.router import Attempt, PromptUsage, StreamProgress
from onward.router.client_stream import MAX_HELD_CHUNKS, ClientRequest, ClientStream, FailureCause, resume_at_cursor
from onward.router.upstream_events import EventSplitter, TokenEvent, parse_event
from tests.router.harness import Received, assert_seamless, expected_text
from tests.router.stand_in_instance import Behaviour, events_of, token

SEED, LENGTH = 11, 5
PREEMPTED = {"code": "pd_preempted", "message": "PD Error: no blocks", "retryable": True, "stage": "decode"}


def new_stream(*, n: int = 1, streams: bool = True, usage: bool = False, retry_limit: int = 3) -> ClientStream:
    body = {"n": n, "stream": streams, "max_tokens": LENGTH, "stream_options": {"include_usage": usage}}
    origin = ClientRequest(
        request_id="r" * 32,
        seed=SEED,
        created_s=1000,
        arrived_at_s=1000.5,
        path="/v1/chat/completions",
        body=msgspec.json.encode(body),
        is_streaming=streams,
        wants_usage=usage,
    )
    return ClientStream(origin, retry_limit)


def wire_events(attempt: Attempt, behaviour: Behaviour | None = None) -> list[bytes]:
    return EventSplitter().feed(b"".join(events_of(attempt, behaviour or Behaviour())))


def begin(stream: ClientStream, now_s: float = 0.0) -> Attempt:
    stream.begin_attempt("a", now_s)
    return stream.build_attempt(now_s, [])


def play(stream: ClientStream, events: list[bytes], now_s: float = 0.0) -> list[bytes]:
    """What the client gets of them."""
    out = []
    for raw in events:
        event = parse_event(raw)
        if event is not None and (piece := stream.on_event(event, now_s)) is not None:
            out.append(piece)
        if stream.failure is not None or stream.is_complete:
            break
    return out


def received(pieces: list[bytes]) -> Received:
    done = b"data: [DONE]\n\n"
    return Received.of(b"".join(piece + b"\n\n" for piece in pieces) + done)


def run_with_cuts(stream: ClientStream, cuts: list[int]) -> list[bytes]:
    """Each attempt breaks after so many events; the last one does not."""
    out: list[bytes] = []
    for cut in [*cuts, None]:
        if stream.is_complete or stream.lacks_only_end_marker:
            break
        out += play(stream, wire_events(begin(stream))[:cut])
        stream.fail_lost(FailureCause.LOST, "cut")
        stream.end_attempt()
    return out


def test_an_attempt_says_whether_an_instance_has_let_the_request_in_before() -> None:
    stream = new_stream()
    assert not begin(stream).was_accepted
    stream.end_attempt()
    assert not begin(stream).was_accepted, "the first one has turned it away"
    stream.on_accepted(0.0)
    stream.end_attempt()
    assert begin(stream).was_accepted


@settings(deadline=None)
@given(st.lists(st.integers(0, 14), max_size=6), st.integers(1, 3), st.booleans())
def test_wherever_attempts_break_the_client_sees_one_stream(cuts: list[int], n: int, usage: bool) -> None:
    stream = new_stream(n=n, usage=usage)
    got = received(run_with_cuts(stream, cuts))
    assert_seamless(got, SEED, LENGTH, n)
    assert [one["completion_tokens"] for one in got.usages()] == ([n * LENGTH] if usage else [])


def test_each_cut_of_a_stream_with_usage_leaves_no_seam() -> None:
    total = len(wire_events(begin(new_stream(n=2, usage=True))))
    for cut in range(total):
        got = received(run_with_cuts(new_stream(n=2, usage=True), [cut]))
        assert_seamless(got, SEED, LENGTH, 2)
        assert len(got.usages()) == 1


@settings(deadline=None)
@given(st.data())
def test_events_told_twice_or_by_an_older_attempt_are_never_forwarded(data: st.DataObject) -> None:
    stream = new_stream(n=2)
    old = wire_events(begin(stream))
    cut = data.draw(st.integers(0, len(old) - 2))
    out = play(stream, old[:cut])
    stream.fail_lost(FailureCause.LOST, "cut")
    stream.end_attempt()
    late = [raw for raw in old if raw.startswith(b"id: ")]
    events: list[bytes] = []
    for raw in wire_events(begin(stream)):
        events += data.draw(st.lists(st.sampled_from(late), max_size=2))
        events += [raw] * (data.draw(st.integers(1, 2)) if raw.startswith(b"id: ") else 1)
    assert_seamless(received(out + play(stream, events)), SEED, LENGTH, 2)
    assert stream.is_complete


def test_usage_is_told_once() -> None:
    stream = new_stream(usage=True)
    events = wire_events(begin(stream))
    got = received(play(stream, [*events[:-1], events[-2], events[-1]]))
    assert len(got.usages()) == 1 and stream.is_complete


def test_an_answer_that_is_not_streamed_is_resumed_from_the_tokens_so_far() -> None:
    stream = new_stream(streams=False, n=2)
    assert play(stream, wire_events(begin(stream))[:4]) == []
    stream.fail_lost(FailureCause.LOST, "cut")
    stream.end_attempt()
    attempt = begin(stream)
    assert [len(choice.token_ids) for choice in attempt.choices] == [2, 1]
    assert play(stream, wire_events(attempt)) == []
    assert stream.is_complete and stream.response_body is not None
    whole = msgspec.json.decode(stream.response_body)
    assert [choice["message"]["content"] for choice in whole["choices"]] == [
        expected_text(SEED, LENGTH, i) for i in (0, 1)
    ]


def test_readers_see_the_end_of_a_whole_answer_when_its_body_has_arrived() -> None:
    """The body says when a response was completed. A reader that saw the end earlier would find no time."""
    stream = new_stream(streams=False)
    *before, body, _ = wire_events(begin(stream))
    play(stream, before)
    assert [len(choice.token_ids) for choice in stream.build_attempt(0.0, []).choices] == [LENGTH]
    [choice] = stream.readable_choices()
    assert (len(choice.token_ids), choice.finish_reason) == (LENGTH - 1, None)
    play(stream, [body])
    [choice] = stream.readable_choices()
    assert (len(choice.token_ids), choice.finish_reason) == (LENGTH, "length")


def test_an_answer_whose_body_is_lost_is_completed_when_its_stream_ends() -> None:
    stream = new_stream(streams=False)
    events = wire_events(begin(stream))
    play(stream, events[:-3])
    stream.note_completion(2000.9)
    assert stream.completed_s is None, "the last token is missing"
    play(stream, events[-3:-2])
    stream.note_completion(2001.9)
    stream.note_completion(2002.9)
    assert begin_again(stream).completed_s == 2001


def begin_again(stream: ClientStream) -> Attempt:
    stream.fail_lost(FailureCause.LOST, "cut")
    stream.end_attempt()
    return begin(stream)


def test_readers_see_the_end_of_a_stream_with_its_last_token() -> None:
    stream = new_stream()
    play(stream, wire_events(begin(stream))[:-1])
    [choice] = stream.readable_choices()
    assert (len(choice.token_ids), choice.finish_reason) == (LENGTH, "length")


def test_an_attempt_repeats_all_that_was_fixed_and_only_the_epoch_grows() -> None:
    stream = new_stream()
    first = begin(stream)
    play(stream, wire_events(first)[:3])
    stream.fail_lost(FailureCause.LOST, "cut")
    stream.end_attempt()
    second = begin(stream)
    assert (first.attempt_epoch, second.attempt_epoch) == (1, 2)
    for name in ("path", "body", "request_id", "seed", "created_s"):
        assert getattr(first, name) == getattr(second, name)
    assert (first.choices, first.num_cached_tokens) == ([], None)
    assert second.num_cached_tokens == 2
    assert [choice.token_ids for choice in second.choices] == [[token(SEED, 0, 0)]]


def test_every_attempt_cuts_the_prompt_as_the_first_one_has_cut_it() -> None:
    stream = new_stream()
    assert begin(stream).max_prompt_tokens is None
    stream.on_event(PromptUsage(5, 2, 1, max_prompt_tokens=5), 0.0)
    stream.fail_lost(FailureCause.LOST, "cut")
    stream.end_attempt()
    assert begin(stream).max_prompt_tokens == 5
    stream.on_event(PromptUsage(4, 2, 1, max_prompt_tokens=4), 0.0)
    stream.fail_lost(FailureCause.LOST, "cut")
    stream.end_attempt()
    assert begin(stream).max_prompt_tokens == 5


def test_the_cached_tokens_of_the_first_admission_stay() -> None:
    stream = new_stream()
    begin(stream)
    stream.on_event(PromptUsage(5, 2, 1), 0.0)
    stream.fail_lost(FailureCause.LOST, "cut")
    stream.end_attempt()
    begin(stream)
    stream.on_event(PromptUsage(5, 5, 1), 0.0)
    assert stream.num_cached_tokens == 2


def test_openings_wait_for_the_first_token() -> None:
    stream = new_stream(n=2)
    events = wire_events(begin(stream))
    assert play(stream, events[:3]) == []
    assert not stream.has_progress


def test_an_instance_that_ends_too_early_has_failed() -> None:
    stream = new_stream()
    events = wire_events(begin(stream))
    play(stream, [*events[:4], b"data: [DONE]"])
    assert stream.failure is not None and stream.failure.cause is FailureCause.LOST
    assert not stream.is_complete


def test_tokens_that_are_missing_are_a_fault_and_reach_nobody() -> None:
    stream = new_stream()
    events = wire_events(begin(stream))
    out = play(stream, [*events[:3], *events[4:]])
    assert len(out) == 1
    assert stream.failure is not None and stream.failure.cause is FailureCause.PROTOCOL


def test_a_choice_cannot_go_on_after_its_end_and_its_reason_is_decided_once() -> None:
    stream = new_stream(n=2)
    begin(stream)
    place = [ChoiceCursor(1, "stop"), ChoiceCursor(0)]
    stream.on_event(TokenEvent(b"x", Cursor("r" * 32, SEED, 1, place, {0: [5]}), True), 0.0)
    later = [ChoiceCursor(1, "abort"), ChoiceCursor(1)]
    stream.on_event(TokenEvent(b"y", Cursor("r" * 32, SEED, 1, later, {1: [6]}), True), 0.0)
    assert [choice.finish_reason for choice in stream.choices] == ["stop", None]
    stream.on_event(
        TokenEvent(b"z", Cursor("r" * 32, SEED, 1, [ChoiceCursor(2), ChoiceCursor(1)], {0: [7]}), True), 0.0
    )
    assert stream.failure is not None and stream.failure.cause is FailureCause.PROTOCOL


def test_attempts_are_counted_since_the_last_token() -> None:
    stream = new_stream(retry_limit=2)
    for expected in (1, 2):
        begin(stream)
        stream.fail_lost(FailureCause.LOST, "cut")
        stream.end_attempt()
        assert stream.num_failures == expected
    assert begin(stream).is_final
    play(stream, wire_events(stream.build_attempt(0.0, []))[:3])
    assert stream.num_failures == 0
    stream.fail_lost(FailureCause.LOST, "cut")
    stream.end_attempt()
    assert stream.num_failures == 1 and not begin(stream).is_final


def test_drains_and_refusals_are_not_counted() -> None:
    stream = new_stream()
    for cause in (
        FailureCause.DRAIN,
        FailureCause.REFUSED,
        FailureCause.UNREACHABLE,
        FailureCause.OVERLOADED,
        FailureCause.REJECTED,
    ):
        begin(stream)
        stream.fail_lost(cause, "no attempt")
        stream.end_attempt()
    assert stream.num_failures == 0


def test_without_retries_the_first_attempt_is_final_and_a_give_up_is_the_answer() -> None:
    stream = new_stream(retry_limit=0)
    attempt = begin(stream)
    assert attempt.is_final
    out = play(stream, wire_events(attempt, Behaviour(fails_after=2, error=PREEMPTED)))
    assert stream.is_complete
    assert received(out).finish_reasons() == ["pd_reschedule"]


def test_a_give_up_in_the_clients_form_is_carried_on_while_attempts_are_left() -> None:
    stream = new_stream(retry_limit=1)
    begin(stream)
    stream.fail_lost(FailureCause.LOST, "cut")
    stream.end_attempt()
    attempt = begin(stream)
    assert attempt.is_final
    out = play(stream, wire_events(attempt, Behaviour(fails_after=2, error=PREEMPTED)))
    assert stream.failure is not None and stream.failure.error.code == "pd_preempted"
    stream.end_attempt()
    out += play(stream, wire_events(begin(stream)))
    assert_seamless(received(out), SEED, LENGTH)


def test_only_what_moves_counts_as_movement() -> None:
    stream = new_stream()
    begin(stream, now_s=0.0)
    for now_s, progress, moved_s in [
        (1.0, StreamProgress("e", 1, 0, 3), 1.0),
        (2.0, StreamProgress("e", 1, 0, 3), 1.0),
        (3.0, StreamProgress("e", 1, 0, 2), 3.0),
        (4.0, StreamProgress("e", 2, 0, 2), 4.0),
        (5.0, StreamProgress("e", 2, 64, 2), 5.0),
        (6.0, StreamProgress("-", 2, 64, 2), 6.0),
    ]:
        stream.on_event(progress, now_s)
        assert stream.last_progress_at_s == moved_s
    assert stream.reports_restart


def test_tokens_that_the_client_brought_are_not_told_again() -> None:
    stream = new_stream()
    stream.request = ClientRequest(
        request_id="r" * 32,
        seed=SEED,
        created_s=1,
        arrived_at_s=1.0,
        path="/v1/chat/completions",
        body=msgspec.json.encode({"stream": True, "max_tokens": LENGTH, "generated_token_ids": [1, 2]}),
        is_streaming=True,
        generated_token_ids=([1, 2],),
    )
    play(stream, wire_events(begin(stream))[:3])
    assert stream.choices[0].token_ids[:2] == [1, 2] and len(stream.choices[0].token_ids) == 3
    stream.fail_lost(FailureCause.LOST, "cut")
    stream.end_attempt()
    assert len(begin(stream).choices[0].token_ids) == 3


def test_a_client_that_comes_back_continues_from_each_place_it_can_name() -> None:
    whole = new_stream(usage=True)
    pieces = play(whole, wire_events(begin(whole)))
    for count in range(1, LENGTH + 1):
        place = parse_cursor(received(pieces[:count]).last_id)
        again = resume_at_cursor(whole, place, 3, None)
        assert again is not None
        attempt = begin(again)
        assert attempt.attempt_epoch == 2
        rest = play(again, wire_events(attempt))
        assert_seamless(received(pieces[:count] + rest), SEED, LENGTH)


def test_a_place_where_the_stream_never_was_is_refused() -> None:
    whole = new_stream()
    play(whole, wire_events(begin(whole))[:4])
    base = Cursor("r" * 32, SEED, 1, [ChoiceCursor(2)])
    assert resume_at_cursor(whole, base, 3, None) is not None
    assert resume_at_cursor(whole, msgspec.structs.replace(base, choices=[ChoiceCursor(3)]), 3, None) is None
    assert resume_at_cursor(whole, msgspec.structs.replace(base, seed=SEED + 1), 3, None) is None
    assert resume_at_cursor(whole, msgspec.structs.replace(base, choices=base.choices * 2), 3, None) is None


def test_a_failure_is_decided_once() -> None:
    stream = new_stream()
    begin(stream)
    stream.fail(FailureCause.ERROR, ErrorInfo("aborted", "the request was aborted", 409))
    stream.fail_lost(FailureCause.STALL, "later")
    assert stream.failure is not None and stream.failure.error.code == "aborted"


def held(text: str) -> bytes:
    return b": held\nevent: e\ndata: " + text.encode()


def placed(position: int, text: str | None, token_id: int) -> bytes:
    """The event of one token; without a text it is for the router alone."""
    line = f"id: 1;{'r' * 32};1000;{SEED};1;{position};0:{token_id}\n"
    return (line + ("data:" if text is None else f"event: e\ndata: {text}")).encode()


def test_events_that_are_held_go_with_the_next_that_has_a_place() -> None:
    stream = new_stream()
    begin(stream)
    assert play(stream, [held("a"), held("b")]) == []
    assert play(stream, [placed(1, "c", 7)]) == [b"event: e\ndata: a\n\nevent: e\ndata: b\n\n" + placed(1, "c", 7)]
    assert play(stream, [held("d"), placed(2, None, 8)]) == [b"event: e\ndata: d"], "its token counts as delivered"
    assert [choice.token_ids for choice in stream.choices] == [[7, 8]]


def test_events_that_are_held_when_an_attempt_ends_are_told_by_the_next() -> None:
    stream = new_stream()
    begin(stream)
    assert play(stream, [placed(1, "a", 7), held("b")]) == [placed(1, "a", 7)]
    stream.fail_lost(FailureCause.LOST, "cut")
    stream.end_attempt()
    begin(stream)
    again = placed(2, "c", 8).replace(b";1;2;", b";2;2;")
    assert play(stream, [held("b"), again]) == [b"event: e\ndata: b\n\n" + again]


def test_an_instance_that_holds_without_end_breaks_the_protocol() -> None:
    stream = new_stream()
    begin(stream)
    play(stream, [held("x")] * (MAX_HELD_CHUNKS + 1))
    assert stream.failure is not None and stream.failure.cause is FailureCause.PROTOCOL
