"""Streams that are cut behind any event and gone on with: what a client had by then, and what it has read in the end."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec

from onward.proto.cursor import Cursor, parse_cursor
from onward.proto.router import Attempt, ChoiceSnapshot
from tests.api.instance import Instance
from tests.api.reader import AnswerRead, read
from tests.api.routed import attempt_of

STEPS_AT_ONCE = 16


@contextmanager
def in_bursts(instance: Instance) -> Iterator[None]:
    """For continuations: there is one for each event, and none need take as long as the first stream, whose events
    come one by one to be cut behind each."""
    instance.engine.steps_at_once = STEPS_AT_ONCE
    try:
        yield
    finally:
        instance.engine.steps_at_once = 1


def fresh(path: str, body: dict[str, Any]) -> Attempt:
    """Under an id that no other test has used or aborted."""
    return attempt_of(path, body, request_id=secrets.token_hex(16))


def later(first: Attempt, **fields: Any) -> Attempt:
    again = attempt_of(first.path, {}, request_id=first.request_id, **fields)
    return msgspec.structs.replace(again, body=first.body)


def events_of(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    *events, nothing = response.text.split("\n\n")
    assert nothing == ""
    return events


def cursor_of(event: str) -> Cursor | None:
    return parse_cursor(event.split("\n")[0].removeprefix("id: ")) if event.startswith("id: ") else None


def cuts(events: list[str]) -> Iterator[tuple[list[str], Cursor]]:
    """What the client has, and its place: behind each event that names one, the usage's included."""
    for at, event in enumerate(events, 1):
        if (place := cursor_of(event)) is not None:
            yield events[:at], place


def told(events: list[str], body: dict[str, Any]) -> AnswerRead:
    """But for what the cache held, and for what is new in each attempt."""
    answer = read(httpx.Response(200, text="\n\n".join([*events, ""])), body)
    assert answer.usage is not None
    del answer.usage["prompt_tokens_details"]
    answer.cursor = None
    assert answer.usages == sorted(answer.usages), "a cut does not start the count over"
    answer.usages = answer.usages[-1:]  # how many tokens an event has, is the connection's affair
    return answer


def is_between(event: str) -> bool:
    """For the router alone."""
    return event.startswith((":", "event: facts"))


def given_by(events: list[str], num: int) -> list[ChoiceSnapshot]:
    token_ids: list[list[int]] = [[] for _ in range(num)]
    last: Cursor | None = None
    for event in events:
        cursor = cursor_of(event)
        for index, new in (cursor.new_tokens if cursor is not None else {}).items():
            token_ids[index] += new
        last = cursor or last
    assert last is not None
    return [ChoiceSnapshot(one, place.finish_reason) for one, place in zip(token_ids, last.choices, strict=True)]


def uncached(answer: bytes | None) -> dict[str, Any]:
    fields = msgspec.json.decode(answer or b"")
    del fields["usage"]["prompt_tokens_details"]
    return fields
