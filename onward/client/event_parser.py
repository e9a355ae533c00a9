"""Parses server-sent events from bytes that are cut at any place. An event counts once its blank line has arrived."""

from dataclasses import dataclass


class EventTooLarge(Exception):
    """The bytes are not events, or an event is larger than the parser accepts."""


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    raw: bytes
    """As it arrived, with its blank line."""
    event_id: str
    """The event's own `id:` line; empty without one."""
    name: str
    data: bytes


class EventParser:
    """Parses one stream. Comments between events are skipped."""

    def __init__(self, max_event_bytes: int) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest: list[bytes] = []
        """Pieces of the line that has not ended. Joined once: a response with logprobs has a line of many megabytes."""
        self._lines: list[bytes] = []
        self._num_bytes = 0
        """Size of the event that has not ended."""

    def feed(self, received: bytes) -> list[ServerSentEvent]:
        *ends, rest = received.split(b"\n")
        events: list[ServerSentEvent] = []
        for end in ends:
            line = b"".join([*self._rest, end])
            self._rest.clear()
            self._num_bytes += len(end)
            if line.rstrip(b"\r"):
                self._lines.append(line)
            elif (event := self._take_event()) is not None:
                events.append(event)
        if rest:
            self._rest.append(rest)
            self._num_bytes += len(rest)
        if self._num_bytes > self._max_event_bytes:
            raise EventTooLarge(f"the server sent an event of over {self._max_event_bytes} bytes (max_event_bytes)")
        return events

    def _take_event(self) -> ServerSentEvent | None:
        lines, self._lines, self._num_bytes = self._lines, [], 0
        event_id, name, data = b"", "", []
        for line in lines:
            field, _, value = line.rstrip(b"\r").partition(b":")
            value = value.removeprefix(b" ")
            if field == b"id":
                event_id = value
            elif field == b"event":
                name = value.decode("utf-8", "replace")
            elif field == b"data":
                data.append(value)
        if not data and not event_id:
            return None
        # An id that a header cannot carry is ignored: the stream cannot be resumed from that event.
        id_text = event_id.decode("ascii") if event_id.isascii() else ""
        return ServerSentEvent(b"\n".join([*lines, b"", b""]), id_text, name, b"\n".join(data))
