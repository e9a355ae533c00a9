"""The routes of one response: show, follow, cancel, delete it, or list the items that it was made from.

An instance and a router use the same code. They differ in where the records are: in the instance's store, or at the
instances behind the router (`ResponseStore`).
"""

import asyncio
from collections.abc import Mapping
from typing import Protocol

import msgspec
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from onward.errors import NotFound, OnwardError
from onward.proto.error_info import to_error_info
from onward.proto.router import StreamRecord
from onward.web import asgi, sse
from onward.web.auth.api_key_table import Caller
from onward.web.auth.authenticator import get_caller
from onward.web.error_format import RequestFailed
from onward.web.error_handlers import handle_errors
from onward.web.json_body import field_error, undecoded_fields
from onward.web.openai_api.previous_response import PREVIOUS_ID_FIELD, previous_response_id, with_previous_items
from onward.web.openai_api.response_ids import CANCEL, INPUT_ITEMS, is_stream, starting_after
from onward.web.openai_api.response_options import response_options

MAX_IGNORED_BYTES = 1 << 16
"""Limit on the body of a request that needs none."""
MAX_POLL_INTERVAL_S = 2.0
IDLE_POLL_INTERVAL_S = 0.5
"""Shortest pause between attempts to resume a response that no process runs."""
PAUSE_FACTOR = 10
"""Length of the pause as a multiple of the poll's duration, so that followers of long responses leave time for other
work."""
NOT_FOUND_TIMEOUT_S = 5.0
"""How long a follower waits for a response that is unknown: a process that has it may be restarting."""
UNREACHABLE_TIMEOUT_S = 60.0
"""How long a follower waits while no process with the response can be reached."""
KEEP_ALIVE_S = 15.0
_KEEP_ALIVE = b": waiting\n\n"
_LAST_EVENTS = (b"event: response.completed", b"event: response.incomplete", b"event: response.failed")


class SequenceNumber(msgspec.Struct, frozen=True):
    sequence_number: int = -1


_numbers = msgspec.json.Decoder(SequenceNumber)


class ResponseReader(Protocol):
    """Reads the events of one response from its successive records."""

    async def events(self, record: StreamRecord, after: int) -> bytes:
        """Returns the events with numbers above `after`. Raises `NotFound` for a response that is not stored."""
        ...


class ResponseStore(Protocol):
    @property
    def poll_interval_s(self) -> float: ...
    def now_s(self) -> float: ...
    def reader(self) -> ResponseReader: ...
    async def find(self, caller: Caller, response_id: str, param: str = "response_id") -> StreamRecord:
        """Returns the record of the caller's response. Raises `NotFound`, or `Unavailable` while its absence is not
        certain."""
        ...

    async def show(self, record: StreamRecord) -> bytes: ...
    async def input_items(self, record: StreamRecord, query: Mapping[str, str]) -> bytes: ...
    async def context(self, record: StreamRecord) -> bytes:
        """Returns all items of a response, for one that continues it. The response must have ended."""
        ...

    async def resume(self, record: StreamRecord) -> None:
        """Resumes a response that no process runs."""
        ...

    async def cancel(self, record: StreamRecord) -> StreamRecord:
        """Cancels a response. Returns the record that is stored then, which may have been complete before."""
        ...

    async def delete(self, record: StreamRecord) -> None: ...


class StoredResponseEndpoint:
    """The ASGI application of these routes."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await handle_errors(scope, send, self._serve(scope, receive, send))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        await asgi.read_body(receive, MAX_IGNORED_BYTES)
        await asgi.run_until_disconnect(receive, self._respond(scope, QueryParams(scope["query_string"]), send))

    async def _respond(self, scope: Scope, query: Mapping[str, str], send: Send) -> None:
        store, caller, method, path = self._store, get_caller(scope), scope["method"], scope["path"]
        response_id = scope["path_params"]["response_id"]
        if method == "GET" and not path.endswith(INPUT_ITEMS) and is_stream(query):
            await stream_stored_response(store, caller, response_id, starting_after(query), send)
            return
        record = await store.find(caller, response_id)
        if path.endswith(CANCEL):
            body = await self._cancel(caller, response_id, record)
        elif path.endswith(INPUT_ITEMS):
            body = await store.input_items(record, query)
        elif method == "DELETE":
            await store.show(record)  # raises for a response that is not stored
            await store.delete(record)
            body = msgspec.json.encode({"id": response_id, "object": "response", "deleted": True})
        else:
            body = await store.show(record)
            if _is_idle(record) and response_options(record.attempt.body).background:
                await store.resume(record)
        await asgi.respond(send, 200, body)

    async def _cancel(self, caller: Caller, response_id: str, record: StreamRecord) -> bytes:
        """Cancels a background response. The client ends any other response by closing its connection."""
        body = await self._store.show(record)
        if not response_options(record.attempt.body).background:
            raise field_error("response_id", "only a response with background: true can be cancelled")
        if record.is_finished:
            return body
        await self._store.cancel(record)
        return await self._store.show(await self._store.find(caller, response_id))


async def stream_stored_response(
    store: ResponseStore, caller: Caller, response_id: str, after: int, send: Send
) -> None:
    """Sends the events with numbers above `after`, and further events as they are generated. It polls the record, so it
    does not matter which process runs the response, or whether that changes."""
    record, reader = await store.find(caller, response_id), store.reader()
    events = await reader.events(record, after)
    await send(asgi.start_message(200, sse.HEADERS))
    silent_s = failing_s = poll_duration_s = 0.0
    while True:
        if events:
            await send(asgi.body_message(events))
            after, silent_s = max(after, last_sequence_number(events)), 0.0
        elif silent_s >= KEEP_ALIVE_S:
            await send(asgi.body_message(_KEEP_ALIVE))
            silent_s = 0.0
        if not failing_s and _is_end(events, record):
            break
        is_idle = bool(failing_s) or _is_idle(record)
        pause_s = pause_after(poll_duration_s, IDLE_POLL_INTERVAL_S if is_idle else store.poll_interval_s)
        started_at_s = store.now_s()
        try:
            if _is_idle(record):
                await store.resume(record)
            await asyncio.sleep(pause_s)
            polled_at_s = store.now_s()
            record = await store.find(caller, response_id)
            events = await reader.events(record, after)
            failing_s, poll_duration_s = 0.0, store.now_s() - polled_at_s
        except (OnwardError, RequestFailed) as fault:
            await asyncio.sleep(max(0.0, started_at_s + pause_s - store.now_s()))
            failing_s, events = failing_s + store.now_s() - started_at_s, b""
            if failing_s >= _patience_s(fault):
                break  # deleted, expired, or no process can be reached
        silent_s += store.now_s() - started_at_s
    await send(asgi.body_message(b"", more_body=False))


async def with_previous_response(store: ResponseStore, caller: Caller, body: bytes, max_body_bytes: int) -> bytes:
    """Returns a request's body with the items of the response that it continues, so that all attempts see the same
    items."""
    previous_id = previous_response_id(undecoded_fields(body), body)
    if previous_id is None:
        return body
    items = await store.context(await store.find(caller, previous_id, PREVIOUS_ID_FIELD))
    return with_previous_items(body, items, max_body_bytes)


def last_sequence_number(events: bytes) -> int:
    """Returns the sequence number of the last of these events, or -1 if it has none."""
    _, _, data = events.rpartition(b"\ndata: ")
    try:
        return _numbers.decode(data.strip()).sequence_number
    except msgspec.MsgspecError:
        return -1


def _is_idle(record: StreamRecord) -> bool:
    return not (record.is_live or record.is_finished)


def _is_end(events: bytes, record: StreamRecord) -> bool:
    """Returns whether the stream ends with these events. It also ends if there are none and the record is finished: the
    client has the last event already."""
    *_, last_event = events.rstrip().rsplit(b"\n\n", 1)
    return last_event.startswith(_LAST_EVENTS) or (not events and record.is_finished and not record.is_live)


def pause_after(poll_duration_s: float, min_pause_s: float) -> float:
    return min(MAX_POLL_INTERVAL_S, max(min_pause_s, PAUSE_FACTOR * poll_duration_s))


def _patience_s(error: OnwardError | RequestFailed) -> float:
    if isinstance(error, NotFound):
        return NOT_FOUND_TIMEOUT_S
    info = error.info if isinstance(error, RequestFailed) else to_error_info(error)
    return UNREACHABLE_TIMEOUT_S if info.retryable else 0.0
