"""Cutting an instance's bytes into events, and telling them apart."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.proto.cursor import ChoiceCursor
from onward.proto.router import PromptUsage, StreamProgress
from onward.router.upstream_events import (
    CompleteBody,
    DoneEvent,
    EventSplitter,
    MalformedEvent,
    PlainChunk,
    TokenEvent,
    UpstreamErrorEvent,
    parse_event,
)

EVENTS = [
    b"event: facts\ndata: {}",
    b": progress e 1 2 3",
    b'data: {"choices":[]}',
    b'id: 1;r;9;7;1;1;0:5\ndata: {"x":"a\\nb"}',
    b"data: [DONE]",
]
WIRE = b"".join(event + b"\n\n" for event in EVENTS)


@given(st.lists(st.integers(0, len(WIRE))))
def test_however_the_bytes_are_cut_the_same_whole_events_come_out(cuts: list[int]) -> None:
    splitter, out = EventSplitter(), []
    edges = sorted({0, len(WIRE), *cuts})
    for start, end in pairwise(edges):
        out += splitter.feed(WIRE[start:end])
    assert out == EVENTS


def test_an_event_without_its_blank_line_never_comes_out() -> None:
    for length in range(len(WIRE)):
        assert EventSplitter().feed(WIRE[:length]) == EVENTS[: WIRE[:length].count(b"\n\n")]


def test_an_event_may_not_grow_without_bound() -> None:
    splitter = EventSplitter(max_event_bytes=10)
    splitter.feed(b"data: 1234")
    with pytest.raises(MalformedEvent, match="larger than 10 bytes"):
        splitter.feed(b"5")


def test_events_are_told_apart() -> None:
    advance = parse_event(b"id: 1;r;9;7;2;3:stop;0:5\ndata: {}")
    assert isinstance(advance, TokenEvent)
    assert (advance.has_data, advance.cursor.attempt_epoch) == (True, 2)
    assert advance.cursor.choices == [ChoiceCursor(3, "stop")]
    alone = parse_event(b"id: 1;r;9;7;2;3;0:5")
    assert isinstance(alone, TokenEvent) and not alone.has_data
    assert parse_event(b'data: {"a":1}') == PlainChunk(b'data: {"a":1}')
    assert parse_event(b"data: [DONE]") == DoneEvent()
    assert parse_event(b'event: answer\ndata: {"a":1}') == CompleteBody(b'{"a":1}')
    facts = b'event: facts\ndata: {"num_prompt_tokens":5,"num_cached_tokens":2,"num_choices":1}'
    assert parse_event(facts) == PromptUsage(5, 2, 1)
    assert parse_event(b": progress engine-1 17 300 2") == StreamProgress("engine-1", 17, 300, 2)
    assert parse_event(b": anything else") is None
    assert parse_event(b"event: later\ndata: 1") is None


def test_a_comment_that_shares_an_event_does_not_hide_it() -> None:
    assert parse_event(b": progress e 1 2 3\ndata: [DONE]") == DoneEvent()
    assert parse_event(b":a\n" * 50_000 + b"data: [DONE]") == DoneEvent()


def test_an_error_event_keeps_what_a_machine_needs() -> None:
    body = (
        b'{"error":{"message":"PD Error: m","code":"pd_preempted","retryable":true,"stage":"decode","retry_after_s":2}}'
    )
    failure = parse_event(b"event: error\ndata: " + body)
    assert isinstance(failure, UpstreamErrorEvent)
    info = failure.info
    assert (info.code, info.retryable, info.stage, info.retry_after_s) == ("pd_preempted", True, "decode", 2)
    assert info.status == 503


@pytest.mark.parametrize(
    "event", [b"id: nonsense\ndata: {}", b"id: 1;r;9;7;\xff;3;\ndata: {}", b"event: facts\ndata: {"]
)
def test_what_breaks_the_protocol_is_said_to(event: bytes) -> None:
    with pytest.raises(MalformedEvent):
        parse_event(event)
