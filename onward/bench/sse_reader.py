"""Parses server-sent events from bytes as they arrive. Does no I/O."""

from onward.errors import ServerError

MAX_EVENT_BYTES = 8 << 20
DONE = b"[DONE]"


class SseReader:
    """Takes bytes cut at any place, and returns the data of each complete event. Other fields and comments are
    ignored."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + received).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ServerError(f"the server sent an event of over {MAX_EVENT_BYTES} bytes")
        events: list[bytes] = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
