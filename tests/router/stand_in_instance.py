"""An instance as a router sees it: the wire protocol of `proto.router` on a real socket, around a model that is a hash.

What it does with an attempt is told by a `Behaviour`: it can refuse, break off after any byte, fall silent, give up.
"""

import asyncio
import contextlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from onward.obs.trace_context import trace_id_in_cursor
from onward.proto import SCHEMA_VERSION
from onward.proto.cursor import ChoiceCursor, Cursor, format_cursor
from onward.proto.router import (
    ABORT_PATH,
    ATTEMPT_PATH,
    CLOSE_PATH,
    FIND_PATH,
    PROBE_PATH,
    REGISTER_PATH,
    Attempt,
    CloseAttempt,
    ClosedAttempt,
    FindStream,
    InstanceLoad,
    PromptUsage,
    Registration,
    RegistrationReply,
    StreamRecord,
)

NUM_PROMPT_TOKENS = 5
REGISTER_EVERY_S = 0.2
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\ntransfer-encoding: chunked\r\n"
)


@dataclass(slots=True)
class Behaviour:
    status: int = 200
    error: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    cut_after_bytes: int | None = None
    """Bytes of the stream after which the connection breaks."""
    fails_after: int | None = None
    """Events with tokens, before `error` is told as an event; or, if it may, a give-up in the client's form."""
    silent_after: int | None = None
    """Events with tokens, after which nothing is said any more but `progress`; also not the whole answer after the last."""
    progress: Callable[[int], str] | None = None
    """The n-th progress line while silent."""
    gate: asyncio.Event | None = None
    """Opens the rest of the stream, after `silent_after`."""
    answers: bool = True
    """Else it takes the request and says nothing, not even a status."""
    num_progress: int = 10**6
    """Progress lines before the stream goes on by itself."""


def token(seed: int, choice: int, position: int, model: str = "hash") -> int:
    """Each model says something else."""
    offset = 0 if model == "hash" else 5000 * (1 + zlib.crc32(model.encode()) % 1000)
    return (seed * 31 + choice * 7919 + position * position * 13 + position) % 5000 + offset


def text_of(token_ids: list[int]) -> str:
    return "".join(f"<{one}>" for one in token_ids)


class StandInInstance:
    def __init__(
        self,
        name: str,
        *,
        role: str = "mixed",
        fingerprint: str = "fp",
        model: str = "hash",
        model_aliases: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.model, self.model_aliases = model, model_aliases
        self.role = role
        self.fingerprint = fingerprint
        self.state = "ready"
        self.max_tokens = 0
        self.handoff_address = ""
        self.attempts: list[Attempt] = []
        self.headers_of_attempts: list[dict[str, str]] = []
        self.cancelled: list[str] = []
        """Ids of attempts whose connection the router closed."""
        self.answers: dict[str, tuple[int, bytes]] = {}
        """To what is passed on, by its path."""
        self.answer_headers: dict[str, str] = {}
        self.paths: list[str] = []
        """As they were asked for."""
        self.aborted: list[list[str]] = []
        self.aborted_for: list[str | None] = []
        """The caller that each abort of the router names."""
        self.key: str | None = None
        """An admin's, for a router that asks for one."""
        self.records: dict[str, StreamRecord] = {}
        self.closes: Callable[[CloseAttempt], ClosedAttempt] | None = None
        """How it ends the answer to a request that the router gives up. None: it does not answer that."""
        self.asked_to_close: list[CloseAttempt] = []
        self.behave: Callable[[Attempt, int], Behaviour] = lambda attempt, number: Behaviour()
        """By the attempt and how many came here before."""
        self.seen = asyncio.Condition()
        self._server: asyncio.Server | None = None
        self._registering: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As a process that dies: connections break, new ones are refused, and registrations end."""
        await self.stop_registering()
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def stop_registering(self) -> None:
        if self._registering is not None:
            self._registering.cancel()
            await asyncio.wait((self._registering,))

    def register_with(self, router_url: str) -> None:
        self._registering = asyncio.create_task(self._register_forever(router_url))

    async def register_once(self, session: aiohttp.ClientSession, router_url: str) -> RegistrationReply:
        body = msgspec.msgpack.encode(self.registration())
        headers = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        async with session.post(router_url + REGISTER_PATH, data=body, headers=headers) as response:
            return msgspec.msgpack.decode(await response.read(), type=RegistrationReply)

    async def _register_forever(self, router_url: str) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, msgspec.MsgspecError):
                    await self.register_once(session, router_url)
                await asyncio.sleep(REGISTER_EVERY_S)

    def registration(self) -> Registration:
        return Registration(
            schema_version=SCHEMA_VERSION,
            instance=self.name,
            url=self.url,
            role=self.role,
            state=self.state,
            model=self.model,
            model_aliases=list(self.model_aliases),
            fingerprint=self.fingerprint,
            kv_layout=None,
            handoff_address=self.handoff_address,
            max_tokens=self.max_tokens,
            block_size=4,
            load=InstanceLoad(max_running=64, num_blocks=100, free_blocks=100),
            pids_by_role={"api": [1]},
        )

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        async with self.seen, asyncio.timeout(10):
            await self.seen.wait_for(condition)

    async def _tell(self) -> None:
        async with self.seen:
            self.seen.notify_all()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while (request := await _read_request(reader)) is not None:
                path, headers, body = request
                if path == ATTEMPT_PATH:
                    self.headers_of_attempts.append(headers)
                await self._answer(path, body, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _answer(self, path: str, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.paths.append(path)
        if path in self.answers:
            respond(writer, *self.answers[path], self.answer_headers)
        elif path == ATTEMPT_PATH:
            await self._attempt(msgspec.msgpack.decode(body, type=Attempt), reader, writer)
        elif path == CLOSE_PATH and self.closes is not None:
            self.asked_to_close.append(msgspec.msgpack.decode(body, type=CloseAttempt))
            respond(writer, 200, msgspec.msgpack.encode(self.closes(self.asked_to_close[-1])))
        elif path == PROBE_PATH:
            respond(writer, 200, msgspec.msgpack.encode(self.registration()))
        elif path == FIND_PATH:
            record = self.records.get(msgspec.msgpack.decode(body, type=FindStream).request_id)
            respond(writer, 200 if record else 404, msgspec.msgpack.encode(record) if record else b"")
        elif path == ABORT_PATH:
            asked = msgspec.json.decode(body)
            ids = asked.get("ids", [])
            self.aborted_for.append(asked.get("caller"))
            self.aborted.append(ids)
            meant = [attempt for attempt in self.attempts if asked.get("caller") in (None, attempt.caller)]
            ours = [one for one in ids if any(one == attempt.request_id for attempt in meant)]
            respond(writer, 200, msgspec.json.encode({"aborted": ours, "unknown": []}))
        elif path == "/v1/models":
            names = (self.model, *self.model_aliases)
            cards = [{"id": name, "object": "model", "root": self.model, "max_model_len": 1000} for name in names]
            respond(writer, 200, msgspec.json.encode({"object": "list", "data": cards}))
        else:
            respond(writer, 404, b"{}")
        await writer.drain()

    async def _attempt(self, attempt: Attempt, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behaviour = self.behave(attempt, len(self.attempts))
        self.attempts.append(attempt)
        await self._tell()
        if behaviour.status != 200:
            respond(writer, behaviour.status, msgspec.json.encode({"error": behaviour.error}), behaviour.headers)
            return
        if not attempt.body:
            respond(writer, 400, msgspec.json.encode({"error": {"code": "invalid_request", "message": "no JSON"}}))
            return
        asked = msgspec.json.decode(attempt.body).get("model", self.model)
        if asked not in (self.model, *self.model_aliases):
            error = {"code": "model_not_found", "message": f"model: {asked!r} is not served here", "param": "model"}
            respond(writer, 404, msgspec.json.encode({"error": error}))
            return
        sending = asyncio.create_task(self._stream(attempt, behaviour, writer))
        leaving = asyncio.create_task(reader.read(1))
        await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():
            sending.cancel()
            self.cancelled.append(attempt.request_id)
            await asyncio.wait((sending,))
            await self._tell()
            raise ConnectionError
        leaving.cancel()
        await asyncio.wait((leaving,))
        sending.result()
        raise ConnectionError  # one stream per connection, as it said

    async def _stream(self, attempt: Attempt, behaviour: Behaviour, writer: asyncio.StreamWriter) -> None:
        if not behaviour.answers:
            await asyncio.sleep(3600)
        further = "".join(f"{name}: {value}\r\n" for name, value in behaviour.headers.items())
        writer.write(_STREAM_HEAD + further.encode() + b"\r\n")
        left = behaviour.cut_after_bytes
        num_advances = 0
        for event in events_of(attempt, behaviour, self.model):
            if left is not None and len(event) >= left:
                _write_chunk(writer, event[:left])
                await writer.drain()
                raise ConnectionError
            if behaviour.silent_after == num_advances and event.startswith((b"id: ", b"event: answer")):
                await self._be_silent(behaviour, writer)
            num_advances += event.startswith(b"id: ")
            _write_chunk(writer, event)
            await writer.drain()
            # The client sees each event by itself, as from a real instance.
            await asyncio.sleep(0)
            left = None if left is None else left - len(event)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _be_silent(self, behaviour: Behaviour, writer: asyncio.StreamWriter) -> None:
        if behaviour.gate is not None:
            await behaviour.gate.wait()
            return
        for number in range(behaviour.num_progress):
            if behaviour.progress is not None:
                _write_chunk(writer, f": progress {behaviour.progress(number)}\n\n".encode())
            await asyncio.sleep(0.05)


def events_of(attempt: Attempt, behaviour: Behaviour, model: str = "hash") -> list[bytes]:
    """All that the instance would say, as events."""
    return list(_Answer(attempt, behaviour, model).events())


class _Answer:
    def __init__(self, attempt: Attempt, behaviour: Behaviour, model: str) -> None:
        self._attempt, self._behaviour, self._model = attempt, behaviour, model
        body = msgspec.json.decode(attempt.body)
        self._streams = bool(body.get("stream"))
        self._usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self._max_tokens: int = body.get("max_tokens", 4)
        n = body.get("n", 1)
        given = attempt.choices or [None] * n
        own = body.get("generated_token_ids") or body.get("completion_token_ids") or []
        self._tokens = [list(one.token_ids) if one is not None else list(own) for one in given]
        self._reasons = [one.finish_reason if one is not None else None for one in given]
        self._skip_to = attempt.reader_positions
        self._told = [len(tokens) for tokens in self._tokens]

    def events(self):
        yield (
            b"event: facts\ndata: "
            + msgspec.json.encode(PromptUsage(NUM_PROMPT_TOKENS, 2, len(self._tokens)))
            + b"\n\n"
        )
        if not self._attempt.choices and not self._skip_to and self._streams:
            for index in range(len(self._tokens)):
                yield self._event(None, {"index": index, "delta": {"role": "assistant"}, "finish_reason": None})
        num_advances = 0
        while None in self._reasons:
            for index in range(len(self._tokens)):
                if self._reasons[index] is not None:
                    continue
                if self._behaviour.fails_after == num_advances:
                    yield from self._fail()
                    return
                num_advances += 1
                yield self._advance(index)
        if not self._streams:
            yield b"event: answer\ndata: " + self._whole() + b"\n\n"
        elif self._usage:
            yield self._event(None, None, self._usage_fields())
        yield b"data: [DONE]\n\n"

    def _fail(self):
        if self._attempt.is_final and self._behaviour.error.get("code") == "pd_preempted":
            self._reasons = [reason or "pd_reschedule" for reason in self._reasons]
            if self._streams:
                choice = {
                    "index": 0,
                    "delta": {},
                    "finish_reason": "pd_reschedule",
                    "completion_token_ids": self._tokens[0],
                }
                yield self._event(self._cursor({}), choice)
            else:
                yield b"id: " + self._cursor({}).encode() + b"\n\n"
                yield b"event: answer\ndata: " + self._whole() + b"\n\n"
            yield b"data: [DONE]\n\n"
            return
        yield b"event: error\ndata: " + msgspec.json.encode({"error": self._behaviour.error}) + b"\n\n"
        yield b"data: [DONE]\n\n"

    def _advance(self, index: int) -> bytes:
        tokens = self._tokens[index]
        new = token(self._attempt.seed, index, len(tokens), self._model)
        tokens.append(new)
        if len(tokens) == self._max_tokens:
            self._reasons[index] = "length"
        cursor = self._cursor({index: [new]})
        is_skipped = bool(self._skip_to) and len(tokens) <= self._skip_to[index].position
        if not self._streams or is_skipped:
            return b"id: " + cursor.encode() + b"\n\n"
        choice = {"index": index, "delta": {"content": text_of([new])}, "finish_reason": self._reasons[index]}
        return self._event(cursor, choice)

    def _cursor(self, new: dict[int, list[int]]) -> str:
        choices = [ChoiceCursor(len(t), r) for t, r in zip(self._tokens, self._reasons, strict=True)]
        attempt = self._attempt
        trace_id = trace_id_in_cursor(attempt.request_id, attempt.trace)
        place = (attempt.request_id, attempt.seed, attempt.attempt_epoch, choices, new, attempt.created_s)
        return format_cursor(Cursor(*place, trace_id=trace_id, model_tag=attempt.model_tag))

    def _head(self) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self._attempt.request_id}", "created": self._attempt.created_s, "model": self._model}

    def _usage_fields(self) -> dict[str, Any]:
        return {
            "prompt_tokens": NUM_PROMPT_TOKENS,
            "completion_tokens": sum(map(len, self._tokens)),
            "total_tokens": NUM_PROMPT_TOKENS + sum(map(len, self._tokens)),
        }

    def _event(self, cursor: str | None, choice: dict[str, Any] | None, usage: dict[str, Any] | None = None) -> bytes:
        choices = [] if choice is None else [choice]
        data = msgspec.json.encode(
            self._head() | {"object": "chat.completion.chunk", "choices": choices, "usage": usage}
        )
        return (b"" if cursor is None else b"id: " + cursor.encode() + b"\n") + b"data: " + data + b"\n\n"

    def _whole(self) -> bytes:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text_of(tokens)},
                "finish_reason": reason,
                "completion_token_ids": tokens,
            }
            for index, (tokens, reason) in enumerate(zip(self._tokens, self._reasons, strict=True))
        ]
        fields = {"object": "chat.completion", "choices": choices, "usage": self._usage_fields()}
        return msgspec.json.encode(self._head() | fields)


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, dict[str, str], bytes] | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    lines = head.decode().split("\r\n")
    path = lines[0].split(" ")[1]
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    return path, headers, await reader.readexactly(int(headers.get("content-length", "0")))


def respond(writer: asyncio.StreamWriter, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    writer.write(f"HTTP/1.1 {status} X\r\n{more}content-length: {len(body)}\r\n\r\n".encode() + body)


def _write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    if data:
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))
