"""A load of many streams that costs little to make: bytes are kept as they come, and read when a stream is over.

For measuring what is between this and a `stand_in_instance`. Every stream is checked to be whole.
"""

import asyncio
from dataclasses import dataclass
from typing import cast

import msgspec

from onward.errors import ServerError

PATH = "/v1/chat/completions"
_LAST_CHUNK = b"0\r\n\r\n"
_LAST_EVENT = b"\n\n\r\n"
_BLANK = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """What is asked for: `num_streams` at once, each `requests_each` times one after the other."""

    num_streams: int
    requests_each: int
    events_each: int
    interval_ms: float
    """Between a stream's events; 0: as fast as they are taken."""
    prompt: str = "Tell me something about the sea."

    @property
    def num_requests(self) -> int:
        return self.num_streams * self.requests_each

    @property
    def num_events(self) -> int:
        return self.num_requests * self.events_each


class StreamClient(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._ended: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's by class.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.parts.append(data)
        if len(self.parts) == 1 and not data.startswith(b"HTTP/1.1 200"):
            self._end(ServerError(f"the server refused a stream: {data[:300].decode(errors='replace')}"))
        elif data.endswith(_LAST_CHUNK) and b"".join(self.parts[-3:]).endswith(_LAST_EVENT + _LAST_CHUNK):
            self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(ServerError("the server closed the connection in the middle of a stream"))

    def _end(self, fault: ServerError | None) -> None:
        if self._ended is None or self._ended.done():
            return
        if fault is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(fault)

    async def ask(self, request: bytes, timeout_s: float) -> list[bytes]:
        """What came, in the pieces in which it came."""
        assert self._transport is not None
        self.parts, self._ended = [], asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await asyncio.wait_for(self._ended, timeout_s)
        return self.parts

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def run(port: int, shape: StreamLoad, timeout_s: float = 120.0) -> int:
    """The whole load, each stream checked. Returns how many reads it took: where that is near the number of events, each
    event travelled alone."""
    body = msgspec.json.encode(
        {
            "model": "stand-in", "stream": True, "stream_options": {"include_usage": True},
            "max_tokens": shape.events_each, "interval_ms": shape.interval_ms,
            "messages": [{"role": "user", "content": shape.prompt}],
        }
    )  # fmt: skip
    request = (
        b"POST %b HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    )
    message = request % (PATH.encode(), port, len(body), body)

    async def one_stream() -> int:
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(StreamClient, "127.0.0.1", port)
        try:
            num_reads = 0
            for _ in range(shape.requests_each):
                parts = await client.ask(message, timeout_s)
                check_whole(b"".join(parts), shape.events_each)
                num_reads += len(parts)
            return num_reads
        finally:
            client.close()

    return sum(await asyncio.gather(*(one_stream() for _ in range(shape.num_streams))))


def check_whole(response: bytes, num_events: int) -> None:
    """All events are there, with one end."""
    text = dechunked(response.partition(_BLANK)[2])
    num_found, num_ends = text.count(b"id: 1;"), text.count(b"data: [DONE]\n\n")
    if num_found != num_events or num_ends != 1:
        raise ServerError(f"a stream had {num_found} events and {num_ends} ends instead of {num_events} and 1")


def dechunked(body: bytes) -> bytes:
    parts: list[bytes] = []
    at = 0
    while at < len(body):
        line_end = body.index(b"\r\n", at)
        size = int(body[at:line_end], 16)
        parts.append(body[line_end + 2 : line_end + 2 + size])
        at = line_end + 2 + size + 2
    return b"".join(parts)
