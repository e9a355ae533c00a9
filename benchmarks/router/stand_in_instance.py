"""An instance that computes nothing: it answers a router's attempts, and plain requests, with as many events as asked for.

For measuring what is in front of it. It is a bare protocol on one event loop, so that it costs less than what it
measures; it takes well-formed requests of our own programs only. A request's body says how many events (`max_tokens`)
and how far they are apart (`interval_ms`; 0: all at once, as fast as they are taken). Streams of one interval step
together, as those of an engine do.

    python -m benchmarks.router.stand_in_instance --port 9000

With `--text FILE` (a `TokenizerFiles`, as msgpack) it has a tokenizer to give to routers that ask for one.
"""

import argparse
import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import uvloop

from onward.proto import SCHEMA_VERSION
from onward.proto.cursor import ChoiceCursor, Cursor, format_cursor
from onward.proto.model import TokenizerFiles
from onward.proto.router import (
    ATTEMPT_PATH,
    PROBE_PATH,
    TOKENIZER_FILES_PATH,
    Attempt,
    InstanceLoad,
    PromptUsage,
    Registration,
)
from onward.text.prompt_tokenizer import tokenizer_hash

MODEL = "stand-in"
MAX_EVENTS = 1 << 16
BLOCK_SIZE = 16
PROMPT_TOKENS = 100
TOKEN_ID = 19556

_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_LAST_CHUNK = b"0\r\n\r\n"
_CHUNK = (
    b'{"id":"chatcmpl-%b","object":"chat.completion.chunk","created":1700000000,"model":"stand-in",'
    b'"choices":[{"index":0,"delta":%b,"logprobs":null,"finish_reason":%b}]}'
)
_USAGE = (
    b'data: {"id":"chatcmpl-%b","object":"chat.completion.chunk","created":1700000000,"model":"stand-in","choices":[],'
    b'"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n'
)


class StubRequestFields(msgspec.Struct, frozen=True):
    """The fields of a request's body that matter here."""

    max_tokens: int = 16
    interval_ms: float = 0.0


_attempts = msgspec.msgpack.Decoder(Attempt)
_asked = msgspec.json.Decoder(StubRequestFields)


def answer_events(asked: StubRequestFields, attempt: Attempt, *, with_facts: bool) -> Iterator[bytes]:
    """The first one holds all that comes with the first token, the last one all that comes with the last."""
    shown = attempt.request_id.encode()
    opening = b"data: " + _CHUNK % (shown, b'{"role":"assistant","content":""}', b"null") + b"\n\n"
    facts = b"event: facts\ndata: " + msgspec.json.encode(PromptUsage(PROMPT_TOKENS, 0, 1)) + b"\n\n"
    usage = _USAGE % (shown, PROMPT_TOKENS, asked.max_tokens, PROMPT_TOKENS + asked.max_tokens)
    for position in range(1, asked.max_tokens + 1):
        is_last = position == asked.max_tokens
        choice = ChoiceCursor(position, "length" if is_last else None)
        cursor = format_cursor(
            Cursor(attempt.request_id, attempt.seed, attempt.attempt_epoch, [choice], {0: [TOKEN_ID]})
        )
        data = _CHUNK % (shown, b'{"content":" word"}', b'"length"' if is_last else b"null")
        event = b"id: %b\ndata: %b\n\n" % (cursor.encode(), data)
        if position == 1:
            event = (facts if with_facts else b"") + opening + event
        yield event + usage + b"data: [DONE]\n\n" if is_last else event


class StepTimer:
    """Gives every stream of an interval its next event at the same moment."""

    def __init__(self) -> None:
        self._streams: dict[float, dict[StubInstanceConnection, Iterator[bytes]]] = {}
        """By interval; one has an entry as long as its next step is scheduled."""

    def add(self, interval_ms: float, connection: "StubInstanceConnection", events: Iterator[bytes]) -> None:
        if interval_ms not in self._streams:
            self._streams[interval_ms] = {}
            self._schedule(interval_ms)
        self._streams[interval_ms][connection] = events

    def drop(self, connection: "StubInstanceConnection") -> None:
        for streams in self._streams.values():
            streams.pop(connection, None)

    def _schedule(self, interval_ms: float) -> None:
        asyncio.get_running_loop().call_later(interval_ms / 1000, self._step, interval_ms)

    def _step(self, interval_ms: float) -> None:
        streams = self._streams[interval_ms]
        if not streams:
            del self._streams[interval_ms]
            return
        self._schedule(interval_ms)
        for connection, events in list(streams.items()):
            if (event := next(events, None)) is not None:
                connection.send(event)
            else:
                del streams[connection]
                connection.end()


class StubInstanceConnection(asyncio.Protocol):
    """One request after the other."""

    def __init__(self, steps: StepTimer, answers: dict[str, bytes]) -> None:
        self._steps = steps
        self._answers = answers
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's by class.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._steps.drop(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, blank, body = self._received.partition(b"\r\n\r\n")
        if blank and len(body) >= _content_length(head):
            self._received = b""
            self._answer(head.split(b" ", 2)[1].decode(), body)

    def send(self, event: bytes) -> None:
        self._write(_framed(event))

    def end(self) -> None:
        self._write(_LAST_CHUNK)

    def _answer(self, path: str, body: bytes) -> None:
        if (told := self._answers.get(path)) is not None:
            self._write(_whole(b"application/msgpack", told))
        elif path == ATTEMPT_PATH:
            attempt = _attempts.decode(body)
            self._stream(attempt, attempt.body, with_facts=True)
        elif body:
            self._stream(_plain_attempt(path, body), body, with_facts=False)
        else:
            self._write(_whole(b"text/plain", b"ok"))

    def _stream(self, attempt: Attempt, body: bytes, *, with_facts: bool) -> None:
        asked = _asked.decode(body)
        assert 0 < asked.max_tokens <= MAX_EVENTS, "max_tokens out of range"
        events = answer_events(asked, attempt, with_facts=with_facts)
        self._write(_STREAM_HEAD)
        if asked.interval_ms > 0:
            self._steps.add(asked.interval_ms, self, events)
        else:
            self._write(b"".join([*map(_framed, events), _LAST_CHUNK]))

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)


def _plain_attempt(path: str, body: bytes) -> Attempt:
    """Returns the attempt of a request that came without a router."""
    return Attempt(schema_version=SCHEMA_VERSION, path=path, body=body, request_id="0" * 32, attempt_epoch=1, seed=1,
                   created_s=0)  # fmt: skip


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _whole(kind: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(body), body)


def registration(url: str, its_text_hash: str = "") -> Registration:
    return Registration(
        schema_version=SCHEMA_VERSION, instance="stand-in", url=url, role="mixed", state="ready", model=MODEL,
        fingerprint="stand-in", kv_layout=None, max_tokens=1 << 20, block_size=BLOCK_SIZE, engine="stand-in",
        load=InstanceLoad(max_running=64, free_blocks=1000, num_blocks=1000), tokenizer_hash=its_text_hash,
    )  # fmt: skip


async def listen(port: int = 0, text: TokenizerFiles | None = None) -> asyncio.Server:
    steps = StepTimer()
    answers: dict[str, bytes] = {}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: StubInstanceConnection(steps, answers), "127.0.0.1", port)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    if text is not None:
        answers[TOKENIZER_FILES_PATH] = msgspec.msgpack.encode(text)
    its_text_hash = "" if text is None else tokenizer_hash(text)
    answers[PROBE_PATH] = msgspec.msgpack.encode(registration(url, its_text_hash))
    return server


async def _serve(port: int, text_file: Path | None) -> None:
    text = None if text_file is None else msgspec.msgpack.decode(text_file.read_bytes(), type=TokenizerFiles)
    async with await listen(port, text) as server:
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="An instance that computes nothing.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--text", type=Path)
    args = parser.parse_args()
    uvloop.run(_serve(args.port, args.text))
