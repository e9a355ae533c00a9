"""Streams that cost little to ask for, so that a load of them leaves the machine to the server that is measured.

Bytes are searched, not parsed: a refusal by its status, tokens by their `id:` lines, an end by its last chunk. Two loads:
so many streams at a time, and so many new ones each second, whatever becomes of the others.
"""

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import msgspec

from onward.bench.prompts import random_words

PATH = "/v1/chat/completions"
_NEW_TOKENS = re.compile(rb";0:([0-9+]+)\n")
"""At the end of an event's `id:` line."""
_DONE = b"data: [DONE]"
_LAST_CHUNK = b"0\r\n\r\n"
_USAGE = re.compile(rb'"completion_tokens":(\d+)')
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_TAIL_BYTES = 2048
_HEAD = b"POST %b HTTP/1.1\r\nhost: %b\r\nauthorization: Bearer %b\r\ncontent-length: %d\r\n\r\n"


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """What each stream of a load is."""

    port: int
    key: str
    model: str
    num_words: int
    max_tokens: int

    def message(self, seed: str) -> bytes:
        body = msgspec.json.encode(
            {
                "model": self.model,
                "stream": True,
                "stream_options": {"include_usage": True},
                "max_tokens": self.max_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "messages": [{"role": "user", "content": random_words(self.num_words, seed)}],
            }
        )
        head = _HEAD % (PATH.encode(), f"127.0.0.1:{self.port}".encode(), self.key.encode(), len(body))
        return head + body


@dataclass(slots=True)
class MeasuredStream:
    """One request, as its client saw it; times on this process's clock."""

    started_s: float
    status: int = 0
    """0: the connection was lost before there was one."""
    first_s: float | None = None
    ended_s: float | None = None
    num_tokens: int = 0
    """By the server's own count, at the end."""
    tokens: Counter[int] = field(default_factory=Counter)
    """By the second in which they came."""

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and self.num_tokens > 0

    @property
    def ttft_s(self) -> float:
        assert self.first_s is not None
        return self.first_s - self.started_s


class _StreamConnection(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._stream: MeasuredStream | None = None
        self._over: asyncio.Future[None] | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are none of asyncio's by class

    async def ask(self, message: bytes, stream: MeasuredStream) -> None:
        """To its end, whatever that is."""
        assert self.transport is not None
        self._stream, self._tail = stream, b""
        self._over = asyncio.get_running_loop().create_future()
        self.transport.write(message)
        await self._over

    def data_received(self, data: bytes) -> None:
        stream, now_s = self._stream, time.perf_counter()
        if stream is None:
            return
        if stream.status == 0:
            stream.status = int(data[9:12])
        if stream.status != 200:
            self._tail += data
            if _is_whole_refusal(self._tail):
                self._end(now_s)
            return
        num_tokens = sum(1 + found.count(b"+") for found in _NEW_TOKENS.findall(data))
        if num_tokens:
            stream.first_s = stream.first_s or now_s
            stream.tokens[int(now_s)] += num_tokens
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if self._tail.endswith(_LAST_CHUNK) and _DONE in self._tail:
            usage = _USAGE.findall(self._tail)
            stream.num_tokens = int(usage[-1]) if usage else 0
            self._end(now_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._end(time.perf_counter())

    def leave(self) -> None:
        if self.transport is not None:
            self.transport.abort()
            self.transport = None

    def _end(self, now_s: float) -> None:
        if self._stream is not None and self._over is not None and not self._over.done():
            self._stream.ended_s = now_s
            self._stream = None
            self._over.set_result(None)


def _is_whole_refusal(answer: bytes) -> bool:
    """All of it must have come, or its rest would be taken for the next answer."""
    head, end, body = answer.partition(b"\r\n\r\n")
    length = _LENGTH.search(head)
    return bool(end) and length is not None and len(body) >= int(length[1])


async def _connected(port: int) -> _StreamConnection:
    _, client = await asyncio.get_running_loop().create_connection(_StreamConnection, "127.0.0.1", port)
    return client


async def ask_one(asked: StreamRequest, seed: str, idle: "list[_StreamConnection] | None" = None) -> MeasuredStream:
    """`idle`: connections that were used before, and are used again, as clients do."""
    stream = MeasuredStream(time.perf_counter())
    while idle and idle[-1].transport is None:
        idle.pop()
    try:
        client = idle.pop() if idle else await _connected(asked.port)
    except OSError:
        return stream
    await client.ask(asked.message(seed), stream)
    if idle is None:
        client.leave()
    else:
        idle.append(client)
    return stream


async def closed_load(
    asked: StreamRequest, num_streams: int, settle_s: float, seconds: float, seed: str
) -> list[MeasuredStream]:
    """So many at a time, each begun when the one before has ended; all are cut off at the end."""
    streams: list[MeasuredStream] = []

    async def one_after_the_other(number: int) -> None:
        client, turn = await _connected(asked.port), 0
        while True:
            if client.transport is None:
                client = await _connected(asked.port)
            streams.append(MeasuredStream(time.perf_counter()))
            await client.ask(asked.message(f"{seed} {number} {turn}"), streams[-1])
            turn += 1

    tasks = [asyncio.create_task(one_after_the_other(number)) for number in range(num_streams)]
    await asyncio.sleep(settle_s + seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return streams


async def open_load(
    asked: StreamRequest, per_s: float, seconds: float, seed: str, on_second: Callable[[], None]
) -> list[MeasuredStream]:
    """New ones at random times, so many a second on average. All that were taken are read to their ends."""
    rng, tasks = random.Random(seed), []
    idle: list[_StreamConnection] = []
    began_s = time.perf_counter()
    at_s = looked_s = 0.0
    while at_s < seconds:
        await asyncio.sleep(max(0.0, began_s + at_s - time.perf_counter()))
        tasks.append(asyncio.create_task(ask_one(asked, f"{seed} {len(tasks)}", idle)))
        at_s += rng.expovariate(per_s)
        if at_s - looked_s >= 1.0:
            looked_s = at_s
            on_second()
    streams = list(await asyncio.gather(*tasks))
    for client in idle:
        client.leave()
    return streams
