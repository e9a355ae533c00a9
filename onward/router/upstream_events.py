"""Splits an instance's answer into events and classifies them, at a low cost per token.

Only complete events are returned. In events for the client only the `id:` line is read; JSON is parsed only in the few
events for the router itself. Lines end with a single line feed, as instances write them.
"""

from dataclasses import dataclass

import msgspec

from onward.proto.cursor import Cursor, parse_cursor
from onward.proto.engine import ErrorInfo
from onward.proto.field_types import MAX_SERIAL
from onward.proto.router import PromptUsage, StreamProgress
from onward.router.upstream_errors import parse_error_info

BLANK_LINE = b"\n\n"
DONE = b"data: [DONE]"
HELD = b": held"
MAX_EVENT_BYTES = 64 << 20
"""The whole answer to a client that does not stream is one event."""


class MalformedEvent(Exception):
    """The instance does not keep to the protocol."""


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """Tokens, or the end of a choice."""

    raw: bytes
    cursor: Cursor
    has_data: bool
    """Else it has no data: the router alone learns the tokens."""


@dataclass(frozen=True, slots=True)
class PlainChunk:
    """A chunk without a place: an opening, or the usage."""

    raw: bytes


@dataclass(frozen=True, slots=True)
class HeldChunk:
    """Data that goes to the client together with the next event that has an id, or not at all."""

    raw: bytes


@dataclass(frozen=True, slots=True)
class CompleteBody:
    body: bytes


@dataclass(frozen=True, slots=True)
class UpstreamErrorEvent:
    info: ErrorInfo
    body: bytes = b""
    """The error as the instance has written it, with what there is of the answer."""


@dataclass(frozen=True, slots=True)
class DoneEvent:
    # The instance's `[DONE]`, the end of its response. It completes the stream if only this end marker was missing,
    # else the attempt fails as lost (`ClientStream.on_done`).
    pass


UpstreamEvent = (
    TokenEvent | PlainChunk | HeldChunk | CompleteBody | UpstreamErrorEvent | DoneEvent | PromptUsage | StreamProgress
)


class EventSplitter:
    """Bytes in, whole events out, each without the blank line that ended it."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._held: list[bytes] = []
        self._num_held = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        if self._held:
            if not self._ends_event(chunk):
                self._hold(chunk)
                return []
            chunk = b"".join([*self._held, chunk])
            self._held.clear()
            self._num_held = 0
        events = chunk.split(BLANK_LINE)
        if rest := events.pop():
            self._hold(rest)
        return events

    def _ends_event(self, chunk: bytes) -> bool:
        return BLANK_LINE in chunk or (chunk.startswith(b"\n") and self._held[-1].endswith(b"\n"))

    def _hold(self, part: bytes) -> None:
        # Parts are joined once, when the event is whole: a large one comes in many.
        self._held.append(part)
        self._num_held += len(part)
        if self._num_held > self._max_event_bytes:
            raise MalformedEvent(f"an event is larger than {self._max_event_bytes} bytes")


def parse_event(event: bytes) -> UpstreamEvent | None:
    """Returns what an event means to the router; None if it can be ignored."""
    while event.startswith(b":"):
        comment, _, event = event.partition(b"\n")
        if comment == HELD:
            return HeldChunk(event)
        if not event:
            return _progress(comment)
    if event.startswith(b"id: "):
        end = event.find(b"\n")
        line = event[4:end] if end >= 0 else event[4:]
        return TokenEvent(event, _cursor(line), end >= 0 and event.find(b"data: ", end) >= 0)
    if event.startswith(b"data: "):
        return DoneEvent() if event == DONE else PlainChunk(event)
    return _named_event(event)


def _cursor(line: bytes) -> Cursor:
    try:
        return parse_cursor(line.decode("ascii"))
    except ValueError as fault:
        raise MalformedEvent(str(fault)) from None


def _progress(comment: bytes) -> StreamProgress | None:
    words = comment[1:].split()
    if len(words) != 5 or words[0] != b"progress":
        return None
    try:
        step, computed, queue = (int(word) for word in words[2:])
        engine = words[1].decode()
    except ValueError:
        return None
    in_range = all(0 <= number <= MAX_SERIAL for number in (step, computed, queue))
    return StreamProgress(engine, step, computed, queue) if in_range else None


def _named_event(event: bytes) -> UpstreamEvent | None:
    name, _, rest = event.partition(b"\n")
    data = rest.removeprefix(b"data: ")
    match name:
        case b"event: facts":
            return _facts(data)
        case b"event: answer":
            return CompleteBody(data)
        case b"event: error":
            return UpstreamErrorEvent(parse_error_info(data, None), data)
    return None


def _facts(data: bytes) -> PromptUsage:
    try:
        return msgspec.json.decode(data, type=PromptUsage)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise MalformedEvent(f"the facts are not as agreed: {fault}") from None
