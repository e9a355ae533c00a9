"""The routes of one response: show, follow, cancel, delete it, or list the items that it was made from.

An instance and a router serve them by the same code. What differs is where records are: in the instance's store, or at the
instances behind the router (`Responses`).
"""

import asyncio
from collections.abc import Mapping
from typing import Protocol

import msgspec
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from onward.errors import NotFound, OnwardError
from onward.proto.router import Record
from onward.web import http, sse
from onward.web.body import undecoded_fields, wrong
from onward.web.callers import caller_of
from onward.web.error_answers import answer_errors
from onward.web.failures import RequestFailed, info_of
from onward.web.keys import Caller
from onward.web.response_context import PREVIOUS, previous_of, with_context
from onward.web.response_ids import CANCEL, INPUT_ITEMS, is_stream, starting_after
from onward.web.response_sketch import sketch_of

MAX_IGNORED_BYTES = 1 << 16
"""Of a body, where there is nothing to say in one."""
MAX_ASK_EVERY_S = 2.0
IDLE_ASK_EVERY_S = 0.5
"""A response that nothing runs is taken up no more often than this."""
REST_SHARE = 10
"""How much longer the pause is than the question took, so that followers of long responses leave time for other work."""
MISSING_S = 5.0
"""How long a follower waits for a response that is unknown: a process that has it may be restarting."""
OUT_OF_REACH_S = 60.0
"""How long a follower waits for a process that can be asked."""
KEEP_ALIVE_S = 15.0
_KEEP_ALIVE = b": waiting\n\n"
_LAST_EVENTS = (b"event: response.completed", b"event: response.incomplete", b"event: response.failed")


class Number(msgspec.Struct, frozen=True):
    sequence_number: int = -1


_numbers = msgspec.json.Decoder(Number)


class Reader(Protocol):
    """Of one response, from record to record."""

    async def events(self, record: Record, after: int) -> bytes:
        """Those with a higher number. Raises `NotFound` for a response that is not stored."""
        ...


class Responses(Protocol):
    @property
    def ask_every_s(self) -> float: ...
    def now_s(self) -> float: ...
    def reader(self) -> Reader: ...
    async def find(self, caller: Caller, response_id: str, param: str = "response_id") -> Record:
        """The caller's own. Raises `NotFound`, or `Unavailable` while that is not sure."""
        ...

    async def show(self, record: Record) -> bytes: ...
    async def input_items(self, record: Record, query: Mapping[str, str]) -> bytes: ...
    async def context(self, record: Record) -> bytes:
        """All of its items, for a response that goes on from it, which it must be over for."""
        ...

    async def take_up(self, record: Record) -> None:
        """Has a response carried on that nothing runs."""
        ...

    async def cancel(self, record: Record) -> Record:
        """What is kept of it then, which may have been complete before."""
        ...

    async def delete(self, record: Record) -> None: ...


class ResponseEndpoint:
    """An ASGI application."""

    def __init__(self, responses: Responses) -> None:
        self._responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await answer_errors(send, self._serve(scope, receive, send))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        await http.read_body(receive, MAX_IGNORED_BYTES)
        await http.while_connected(receive, self._answer(scope, QueryParams(scope["query_string"]), send))

    async def _answer(self, scope: Scope, query: Mapping[str, str], send: Send) -> None:
        responses, caller, method, path = self._responses, caller_of(scope), scope["method"], scope["path"]
        response_id = scope["path_params"]["response_id"]
        if method == "GET" and not path.endswith(INPUT_ITEMS) and is_stream(query):
            await follow(responses, caller, response_id, starting_after(query), send)
            return
        record = await responses.find(caller, response_id)
        if path.endswith(CANCEL):
            answer = await self._cancelled(caller, response_id, record)
        elif path.endswith(INPUT_ITEMS):
            answer = await responses.input_items(record, query)
        elif method == "DELETE":
            await responses.show(record)  # raises for a response that is not stored
            await responses.delete(record)
            answer = msgspec.json.encode({"id": response_id, "object": "response", "deleted": True})
        else:
            answer = await responses.show(record)
            if _is_idle(record) and sketch_of(record.attempt.body).background:
                await responses.take_up(record)
        await http.respond(send, 200, answer)

    async def _cancelled(self, caller: Caller, response_id: str, record: Record) -> bytes:
        """Only a response in the background can be cancelled: of any other the client hangs up."""
        shown = await self._responses.show(record)
        if not sketch_of(record.attempt.body).background:
            raise wrong("response_id", "only a response with background: true can be cancelled")
        if record.is_over:
            return shown
        await self._responses.cancel(record)
        return await self._responses.show(await self._responses.find(caller, response_id))


async def follow(responses: Responses, caller: Caller, response_id: str, after: int, send: Send) -> None:
    """The events behind the number `after`, and the rest as they come. Asks for the record again and again, so it does not
    matter which process runs the response, or whether that changes."""
    record, reader = await responses.find(caller, response_id), responses.reader()
    events = await reader.events(record, after)
    await send(http.start_message(200, sse.HEADERS))
    silent_s = missed_s = took_s = 0.0
    while True:
        if events:
            await send(http.part(events))
            after, silent_s = max(after, last_number(events)), 0.0
        elif silent_s >= KEEP_ALIVE_S:
            await send(http.part(_KEEP_ALIVE))
            silent_s = 0.0
        if not missed_s and _is_end(events, record):
            break
        is_idle = bool(missed_s) or _is_idle(record)
        pause_s = pause_after(took_s, IDLE_ASK_EVERY_S if is_idle else responses.ask_every_s)
        began_s = responses.now_s()
        try:
            if _is_idle(record):
                await responses.take_up(record)
            await asyncio.sleep(pause_s)
            asked_s = responses.now_s()
            record = await responses.find(caller, response_id)
            events = await reader.events(record, after)
            missed_s, took_s = 0.0, responses.now_s() - asked_s
        except (OnwardError, RequestFailed) as fault:
            await asyncio.sleep(max(0.0, began_s + pause_s - responses.now_s()))
            missed_s, events = missed_s + responses.now_s() - began_s, b""
            if missed_s >= _patience_s(fault):
                break  # deleted, forgotten, or nothing is left to ask
        silent_s += responses.now_s() - began_s
    await send(http.part(b"", more=False))


async def completed(responses: Responses, caller: Caller, body: bytes, max_body_bytes: int) -> bytes:
    """A request with the items of the response that it goes on from, so that all attempts at it see the same ones."""
    previous = previous_of(undecoded_fields(body), body)
    if previous is None:
        return body
    items = await responses.context(await responses.find(caller, previous, PREVIOUS))
    return with_context(body, items, max_body_bytes)


def last_number(events: bytes) -> int:
    """Of the last of these events; -1: they have none."""
    _, _, data = events.rpartition(b"\ndata: ")
    try:
        return _numbers.decode(data.strip()).sequence_number
    except msgspec.MsgspecError:
        return -1


def _is_idle(record: Record) -> bool:
    return not (record.is_live or record.is_over)


def _is_end(events: bytes, record: Record) -> bool:
    """A client that has the last event already is told nothing more."""
    *_, last = events.rstrip().rsplit(b"\n\n", 1)
    return last.startswith(_LAST_EVENTS) or (not events and record.is_over and not record.is_live)


def pause_after(took_s: float, least_s: float) -> float:
    return min(MAX_ASK_EVERY_S, max(least_s, REST_SHARE * took_s))


def _patience_s(fault: OnwardError | RequestFailed) -> float:
    if isinstance(fault, NotFound):
        return MISSING_S
    info = fault.info if isinstance(fault, RequestFailed) else info_of(fault)
    return OUT_OF_REACH_S if info.retryable else 0.0
