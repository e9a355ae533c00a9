"""A load on one api process that costs little to make: answers are kept as bytes, and looked at when they are whole.

Run as a process of its own, so that its time is not counted for another one. Every answer must have all its tokens.

    python -m benchmarks.api.api_load --port 8000 --model NAME --connections 256 --requests-each 1 --max-tokens 512 --stream
"""

import argparse
import asyncio
import re
import sys
from typing import cast

import msgspec
import uvloop

from onward.errors import ServerError

PATH = "/v1/chat/completions"
PROMPT = "Tell me something about the sea."
TIMEOUT_S = 300.0
_BLANK = b"\r\n\r\n"
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_TAIL_BYTES = 64
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_NEW_TOKENS = re.compile(rb"id: 1;[^\n]*;0:([0-9+]+)\n")
"""The `id:` line of an event that has some."""
_USAGE = re.compile(rb'"completion_tokens":(\d+)')


class ApiLoad(msgspec.Struct, frozen=True):
    """So many connections at once, each with so many requests one after the other, all alike."""

    port: int
    model: str
    num_connections: int
    requests_each: int
    max_tokens: int
    stream: bool

    @property
    def num_requests(self) -> int:
        return self.num_connections * self.requests_each

    def message(self) -> bytes:
        fields = {"model": self.model, "max_tokens": self.max_tokens, "messages": [{"role": "user", "content": PROMPT}]}
        if self.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        body = msgspec.json.encode(fields)
        head = "POST {} HTTP/1.1\r\nhost: 127.0.0.1:{}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"
        return head.format(PATH, self.port, len(body)).encode() + body


class ApiLoadResult(msgspec.Struct, frozen=True):
    num_tokens: int
    num_events: int
    """That had tokens. As many as tokens where each travelled alone; 0 without streams."""


class ApiLoadConnection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._num_missing: int | None = None
        """Bytes of an answer that has said how long it is."""
        self._ended: asyncio.Future[bytes] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none of asyncio's by class

    async def ask(self, request: bytes) -> bytes:
        assert self._transport is not None
        self._parts, self._num_missing = [], None
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await asyncio.wait_for(self._ended, TIMEOUT_S)

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        if len(self._parts) == 1:
            head, _, body = data.partition(_BLANK)  # a head is small, and comes at once
            length = _LENGTH.search(head)
            self._num_missing = None if length is None else int(length[1]) - len(body)
        elif self._num_missing is not None:
            self._num_missing -= len(data)
        if self._num_missing == 0 or (self._num_missing is None and self._has_last_chunk(data)):
            self._end(None)

    def _has_last_chunk(self, data: bytes) -> bool:
        tail = data[-_TAIL_BYTES:]
        if len(data) < len(_LAST_CHUNK):
            tail = b"".join(self._parts[-3:])
        return tail.endswith(_LAST_CHUNK)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(ServerError("the server closed the connection in the middle of an answer"))

    def _end(self, fault: ServerError | None) -> None:
        if self._ended is None or self._ended.done():
            return
        if fault is None:
            self._ended.set_result(b"".join(self._parts))
        else:
            self._ended.set_exception(fault)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def check_whole(response: bytes, load: ApiLoad) -> ApiLoadResult:
    """Raises `ServerError` if it is not the whole answer."""
    if not response.startswith(b"HTTP/1.1 200"):
        raise ServerError(f"the server refused: {response[:300].decode(errors='replace')}")
    events = [1 + found.count(b"+") for found in _NEW_TOKENS.findall(response)]
    usage = _USAGE.findall(response)
    num_told = int(usage[-1]) if usage else 0
    num_tokens = sum(events) if load.stream else num_told
    if not num_tokens == num_told == load.max_tokens:
        raise ServerError(
            f"an answer had {num_tokens} tokens and told {num_told}, and {load.max_tokens} were asked for"
        )
    return ApiLoadResult(num_tokens, len(events))


async def run(load: ApiLoad) -> ApiLoadResult:
    message = load.message()

    async def one_connection() -> list[ApiLoadResult]:
        _, connection = await asyncio.get_running_loop().create_connection(ApiLoadConnection, "127.0.0.1", load.port)
        try:
            return [check_whole(await connection.ask(message), load) for _ in range(load.requests_each)]
        finally:
            connection.close()

    each = await asyncio.gather(*(one_connection() for _ in range(load.num_connections)))
    taken = [one for answers in each for one in answers]
    return ApiLoadResult(sum(one.num_tokens for one in taken), sum(one.num_events for one in taken))


def main() -> None:
    parser = argparse.ArgumentParser(description="A load on one api process.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--connections", type=int, required=True)
    parser.add_argument("--requests-each", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--stream", action="store_true")
    args = parser.parse_args()
    load = ApiLoad(args.port, args.model, args.connections, args.requests_each, args.max_tokens, args.stream)
    try:
        taken = uvloop.run(run(load))
    except ServerError as fault:
        sys.exit(fault.message)
    print(msgspec.json.encode(taken).decode())


if __name__ == "__main__":
    main()
