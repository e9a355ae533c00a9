"""The client's decisions, without connections: each event once and in order wherever they break, and when it fails."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.client.failures import ConnectionFailure, StreamFailed, refusal, response_failure
from onward.client.options import ResumeOptions
from onward.client.stream_resumer import StreamResumer
from tests.client.model_server import DONE, ModelServer, chat_events, token_event

LOST = ConnectionFailure("lost")
TEXTS = st.lists(st.sampled_from(["a", "é", "日本", "😀", " "]), min_size=1, max_size=8)
HELD = b'event: response.output_item.added\ndata: {"type":"response.output_item.added"}\n\n'


def new_stream(*, random: float = 0.0, last_event_id: str = "", **options: Any) -> StreamResumer:
    return StreamResumer(ResumeOptions(**options), 100.0, lambda: random, last_event_id=last_event_id)


def run(stream: StreamResumer, server: ModelServer, cuts: list[int], piece: int) -> bytes:
    """All that is delivered where each connection breaks after so many bytes, and the last one does not."""
    delivered = b""
    for cut in [*cuts, None]:
        body = server.answer(stream.begin_attempt())[:cut]
        for at in range(0, len(body), piece):
            delivered += stream.feed(body[at : at + piece], 100.0)
        stream.end_connection()
        if stream.is_complete:
            break
        assert stream.failure is not None
        stream.retry_delay(stream.failure, 100.0)
    return delivered


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["a", "é", "日本", "😀"])), min_size=1, max_size=6),
    st.lists(st.integers(0, 600), max_size=6),
    st.integers(1, 200),
)
def test_each_event_is_delivered_once_and_in_order_wherever_connections_break(
    tokens: list[tuple[int, str]], cuts: list[int], piece: int
) -> None:
    events = [event for i, (held, text) in enumerate(tokens) for event in [*[HELD] * held, token_event(i + 1, text)]]
    server = ModelServer(events)
    assert run(new_stream(), server, cuts, piece) == b"".join(events) + DONE


def test_a_break_at_each_byte_of_a_short_stream_is_not_to_be_seen() -> None:
    whole = b"".join(chat_events(["né", "😀"])) + DONE
    for cut in range(len(whole)):
        for piece in (1, len(whole)):
            server = ModelServer(chat_events(["né", "😀"]))
            assert run(new_stream(), server, [cut], piece) == whole, cut


def test_nothing_is_delivered_before_the_first_id_so_that_the_request_can_be_sent_anew() -> None:
    stream, [opening, token] = new_stream(), chat_events(["a"])
    assert stream.begin_attempt() == {}
    assert stream.feed(opening, 100.0) == b""
    stream.end_connection()
    stream.retry_delay(LOST, 100.0)
    assert stream.begin_attempt() == {}, "no event with an id has come"
    assert stream.feed(opening + token, 100.0) == opening + token
    assert stream.begin_attempt() == {"Last-Event-ID": "1;a;0;7;1;1;0:5"}


def test_a_stream_that_another_client_left_is_resumed() -> None:
    server = ModelServer(chat_events(["a", "b"]))
    assert run(new_stream(last_event_id="1;a;0;7;1;1;0:5"), server, [], 9) == server.events[2] + DONE


def test_a_connection_that_is_closed_in_order_is_no_end() -> None:
    stream = new_stream()
    stream.begin_attempt()
    stream.feed(token_event(1, "a"), 100.0)
    stream.end_connection()
    assert stream.failure is not None and stream.failure.is_retryable and not stream.is_complete


@pytest.mark.parametrize("name", ["response.completed", "response.incomplete"])
def test_a_response_ends_with_its_last_event(name: str) -> None:
    stream = new_stream()
    stream.begin_attempt()
    last = b'id: 1;a;0;7;1;1;\nevent: %b\ndata: {"type":"%b"}\n\n' % (name.encode(), name.encode())
    assert stream.feed(HELD + last, 100.0) == HELD + last
    assert stream.is_complete


# It gives up.


def test_delays_grow_and_are_shortened_at_random_by_half_at_most() -> None:
    longest, shortest = new_stream(), new_stream(random=1.0)
    delays = [(longest.retry_delay(LOST, 100.0), shortest.retry_delay(LOST, 100.0)) for _ in range(8)]
    assert [most for most, _ in delays] == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert all(least == most / 2 for most, least in delays)


def test_failures_in_a_row_are_bounded_and_an_event_starts_the_count_again() -> None:
    stream = new_stream(max_failures=3)
    for position in range(1, 4):
        for _ in range(3):
            stream.begin_attempt()
            stream.retry_delay(LOST, 100.0)
        stream.begin_attempt()
        stream.feed(token_event(position, "a"), 100.0)
    for _ in range(3):
        stream.retry_delay(LOST, 100.0)
    with pytest.raises(StreamFailed, match="4 connections in a row have failed: lost") as failed:
        stream.retry_delay(LOST, 100.0)
    assert failed.value.partial.text == "aaa"
    assert failed.value.partial.last_event_id == "1;a;0;7;1;3;0:5"


def test_retry_after_is_the_least_delay() -> None:
    assert new_stream().retry_delay(refusal(503, {"retry-after": "7"}, b""), 100.0) == 7.0
    with_fraction = b'{"error":{"message":"later","retryable":true,"retry_after_s":1.5}}'
    assert new_stream().retry_delay(refusal(429, {"retry-after": "2"}, with_fraction), 100.0) == 1.5
    assert new_stream().retry_delay(refusal(503, {"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}, b""), 100.0) == 0.2
    assert new_stream().retry_delay(refusal(503, {"retry-after": "soon"}, b""), 100.0) == 0.2


def test_a_retry_after_behind_the_deadline_fails_at_once() -> None:
    with pytest.raises(StreamFailed, match=r"the deadline of 60 s passes.*asks for 61 s") as failed:
        new_stream(deadline_s=60).retry_delay(refusal(503, {"retry-after": "61"}, b"{}"), 100.0)
    assert failed.value.status == 503


def test_the_deadline_ends_a_stream_that_still_brings_events_and_delivers_them() -> None:
    stream = new_stream(deadline_s=10)
    stream.begin_attempt()
    assert stream.read_timeout_s(104.0) == 6.0
    assert stream.feed(token_event(1, "a"), 110.0) == token_event(1, "a")
    assert stream.failure is not None
    with pytest.raises(StreamFailed, match="the deadline has passed") as failed:
        stream.retry_delay(stream.failure, 110.0)
    assert failed.value.partial.texts == {0: "a"}


REFUSALS: list[tuple[int, dict[str, Any] | None, bool]] = [
    (400, {"message": "bad", "retryable": False, "param": "n"}, False),
    (401, {"message": "no key", "retryable": False}, False),
    (404, {"message": "unknown", "code": "stream_unknown", "retryable": False}, False),
    (409, {"message": "label", "code": "label_in_use", "retryable": False}, True),
    (409, {"message": "label", "code": "conflict", "param": "X-Request-Id", "retryable": False}, True),
    (409, {"message": "stale", "code": "stale_attempt", "retryable": False}, True),
    (409, {"message": "other tokens", "code": "stream_unknown", "retryable": False}, False),
    (429, {"message": "full", "code": "overloaded", "retryable": True}, True),
    (500, {"message": "the request crashes workers", "code": "crashed_worker", "retryable": False}, False),
    (500, None, False),
    (502, None, True),
    (503, None, True),
    (503, {"message": "later", "retryable": True}, True),
    (504, None, True),
    (504, {"message": "too late", "code": "deadline_exceeded", "retryable": False}, False),
]


@pytest.mark.parametrize(("status", "error", "is_retryable"), REFUSALS)
def test_a_refusal_is_retried_where_the_same_request_may_succeed(
    status: int, error: dict[str, Any] | None, is_retryable: bool
) -> None:
    body = b"<html>nginx</html>" if error is None else json.dumps({"error": error}).encode()
    failure = refusal(status, {}, body)
    assert (failure.is_retryable, failure.status) == (is_retryable, status)
    assert (error or {"message": "nginx"})["message"] in failure.message


@pytest.mark.parametrize("is_retryable", [True, False])
def test_an_error_event_says_whether_the_stream_can_be_resumed(is_retryable: bool) -> None:
    stream = new_stream()
    stream.begin_attempt()
    error = json.dumps(
        {"error": {"message": "x", "code": "unavailable", "retryable": is_retryable, "retry_after_s": 3}}
    )
    body = token_event(1, "a") + f"event: error\ndata: {error}\n\n".encode() + DONE
    assert stream.feed(body, 100.0) == token_event(1, "a"), "the error and what follows it are not delivered"
    assert stream.failure is not None and not stream.is_complete
    if is_retryable:
        assert stream.retry_delay(stream.failure, 100.0) == 3.0
    else:
        with pytest.raises(StreamFailed, match="the server ended the stream: x") as failed:
            stream.retry_delay(stream.failure, 100.0)
        assert (failed.value.code, failed.value.partial.text) == ("unavailable", "a")


def failed_response(code: str, kind: str) -> bytes:
    data = {"type": "response.failed", "response": {"error": {"code": code, "type": kind, "message": "m"}}}
    return f"event: response.failed\ndata: {json.dumps(data)}\n\n".encode()


def test_a_failed_response_is_resumed_or_delivered_as_its_end() -> None:
    stream = new_stream()
    stream.begin_attempt()
    assert stream.feed(failed_response("server_error", "unavailable"), 100.0) == b""
    assert stream.failure is not None and stream.failure.is_retryable
    stream.begin_attempt()
    last = failed_response("server_error", "crashed_worker")
    assert stream.feed(last, 100.0) == last
    assert stream.is_complete
    assert not response_failure(b'{"response":{"error":{"code":"invalid_prompt","type":"x"}}}').is_retryable
    assert response_failure(b'{"response":null}').is_retryable


def test_another_client_that_resumes_the_same_stream_takes_it_over() -> None:
    """Two that took it from each other again and again would never end."""
    stale = b'event: error\ndata: {"error":{"message":"stale","code":"stale_attempt","retryable":false}}\n\n'
    alone = new_stream()
    alone.begin_attempt()
    alone.feed(stale, 100.0)
    assert alone.failure is not None and not alone.failure.is_retryable
    reconnected = new_stream()
    reconnected.begin_attempt()
    reconnected.retry_delay(LOST, 100.0)
    for is_own in (True, False):
        reconnected.begin_attempt()
        reconnected.feed(stale, 100.0)
        assert reconnected.failure is not None
        assert reconnected.failure.is_retryable == is_own, "the lost request may have arrived late, once"
        if is_own:
            reconnected.retry_delay(reconnected.failure, 100.0)


def test_events_without_ids_are_held_up_to_a_bound() -> None:
    stream = new_stream(max_event_bytes=8 << 20)
    stream.begin_attempt()
    event = b"data: %b\n\n" % (b"x" * (1 << 20))
    for _ in range(8):
        assert stream.failure is None
        assert stream.feed(event, 100.0) == b""
    assert stream.failure is not None and "over 8388608 bytes (max_event_bytes)" in stream.failure.message


def test_an_event_without_an_end_is_refused_with_the_option_that_bounds_it() -> None:
    stream = new_stream(max_event_bytes=8 << 20)
    stream.begin_attempt()
    for _ in range(9):
        stream.feed(b"x" * (1 << 20), 100.0)
    assert stream.failure is not None and not stream.failure.is_retryable
    assert "over 8388608 bytes (max_event_bytes)" in stream.failure.message


def test_the_last_event_of_a_long_response_with_logprobs_is_delivered() -> None:
    """Its output, 20,000 tokens with 20 `top_logprobs` each, is in one line that arrives in many pieces."""
    stream = new_stream()
    stream.begin_attempt()
    last = b'id: 1;a;0;7;1;1;\nevent: response.completed\ndata: {"logprobs":"%b"}\n\n' % (b"x" * (30 << 20))
    pieces = [last[at : at + (64 << 10)] for at in range(0, len(last), 64 << 10)]
    assert b"".join(stream.feed(piece, 100.0) for piece in pieces) == last
    assert stream.is_complete


def test_infinite_times_become_finite_waits() -> None:
    """Sockets and event loops refuse infinity."""
    stream = new_stream(read_timeout_s=math.inf, deadline_s=math.inf, connect_timeout_s=math.inf)
    assert stream.read_timeout_s(100.0) == 1e6
    assert stream.retry_delay(refusal(503, {"retry-after": "9" * 200}, b"{}"), 100.0) == 1e6


def test_a_resumed_stream_reports_its_pause_and_the_number_of_its_connection() -> None:
    reports: list[tuple[float, int]] = []
    stream = StreamResumer(ResumeOptions(), 100.0, lambda: 0.0, on_resume=lambda *report: reports.append(report))
    stream.begin_attempt()
    stream.retry_delay(LOST, 101.0)
    stream.begin_attempt()
    stream.feed(token_event(1, "a"), 102.0)
    assert reports == [], "nothing was delivered before, so nothing is resumed"
    stream.retry_delay(LOST, 103.0)
    stream.begin_attempt()
    stream.retry_delay(LOST, 104.0)
    stream.begin_attempt()
    stream.feed(token_event(2, "b"), 105.5)
    stream.feed(token_event(3, "c"), 106.0)
    assert reports == [(2.5, 4)]


@pytest.mark.parametrize("field", ["first_delay_s", "max_delay_s", "deadline_s", "read_timeout_s", "connect_timeout_s"])
def test_options_name_the_field_that_is_wrong(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}: must be above 0, got 0"):
        ResumeOptions(**{field: 0})
    with pytest.raises(ValueError, match="max_failures"):
        ResumeOptions(max_failures=-1)
    with pytest.raises(ValueError, match="max_event_bytes"):
        ResumeOptions(max_event_bytes=0)


def test_lines_may_end_with_a_carriage_return() -> None:
    stream = new_stream()
    stream.begin_attempt()
    received = token_event(1, "a").replace(b"\n", b"\r\n")
    assert b"data: " in stream.feed(received, 100.0)
    assert stream.partial.last_event_id == "1;a;0;7;1;1;0:5"
