"""Finds the responses of an instance by id, whichever of its api processes runs them or has run them, for their caller.

A running response comes from the process that runs it, an ended one from the stream store. If the process of a background
response has died, the next process that gets a request for the response resumes it from the tokens so far.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.types import Message

from onward import log
from onward.api.engine_link.request_tracker import MAX_ATTEMPT
from onward.api.lifecycle.generation_runner import GenerationRunner
from onward.api.lifecycle.request_builder import ApiServices
from onward.api.lifecycle.resume import with_longest_logprobs, with_prior_logprobs
from onward.api.lifecycle.stream_registry import ENDED_ELSEWHERE_CODES, LiveStream, StreamRegistry
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.responses.chat_request import ResponseChatRequest
from onward.api.responses.response_formatters import event_bytes
from onward.api.responses.response_view import ResponseView
from onward.errors import Conflict, OnwardError
from onward.proto.error_info import to_error_info
from onward.proto.router import ChoiceSnapshot, StreamRecord
from onward.web.access_log import AccessRecord
from onward.web.auth.api_key_table import Caller
from onward.web.error_format import RequestFailed
from onward.web.error_handlers import INTERNAL_ERROR
from onward.web.json_body import field_error, short_repr
from onward.web.openai_api.previous_response import not_finished_error
from onward.web.openai_api.response_ids import PATH, PREFIX, request_id_of_response, response_not_found
from onward.web.openai_api.response_items import Item, to_items
from onward.web.task_pool import TaskPool

_logger = logging.getLogger(__name__)


class BackgroundResponses:
    """Responses that are generated while no client is connected."""

    def __init__(self, runner: GenerationRunner, streams: StreamRegistry, tasks: TaskPool) -> None:
        self._runner = runner
        self._streams = streams
        self._tasks = tasks

    async def start(self, prepared: PreparedRequest, access: AccessRecord | None = None) -> None:
        """Starts a response and waits until the engine has accepted it. Raises the error if it is refused. `access`: the
        access record of the client's request, whose trace includes the background work."""
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = self._tasks.start(self._run(prepared, accepted, access), prepared.attempt.caller)
        try:
            await asyncio.shield(accepted)
        except asyncio.CancelledError:
            task.cancel()  # the client has disconnected before it could get the id of the response
            raise

    async def _run(
        self, prepared: PreparedRequest, accepted: "asyncio.Future[None]", access: AccessRecord | None
    ) -> None:
        def on_accepted(stream: LiveStream) -> None:
            self._streams.store_started(stream)
            accepted.set_result(None)

        try:
            await self._runner.run(prepared, _discard_messages, on_accepted, access)
        except (OnwardError, RequestFailed) as refused:
            # An error after the acceptance is stored in the response's record.
            if not accepted.done():
                accepted.set_exception(refused)
        except Exception:
            attempt = prepared.attempt
            _logger.exception(
                log.event(
                    "a background response failed because of an internal error",
                    **log.request_fields(attempt.request_id, attempt.client_request_id),
                )
            )
            if not accepted.done():
                accepted.set_exception(RequestFailed(INTERNAL_ERROR))
        finally:
            accepted.cancel()


async def _discard_messages(_: Message) -> None:
    """Discards the ASGI messages of a response without a connection."""


DEFAULT_LIMIT, MAX_LIMIT = 20, 100


def input_items_page(request: ResponseChatRequest, request_id: str, query: Mapping[str, str]) -> dict[str, Any]:
    """Returns one page of the input items of a response, for `GET /v1/responses/{id}/input_items`. The latest item comes
    first unless the query's `order` is `asc`."""
    all_items = [*request.body.context, *to_items(request.body.input)]
    items = [_listed(item, request_id, index) for index, item in enumerate(all_items)]
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise field_error("order", f"must be asc or desc, got {short_repr(order)}")
    if order == "desc":
        items.reverse()
    items = items[_first(items, query.get("after")) :]
    limit = _limit(query.get("limit"))
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(items) > limit,
    }


def _first(items: list[Item], after: str | None) -> int:
    if after is None:
        return 0
    index = next((index for index, item in enumerate(items, 1) if item["id"] == after), None)
    if index is None:
        raise field_error("after", f"no item has the id {short_repr(after)}")
    return index


def _limit(value: str | None) -> int:
    if value is None:
        return DEFAULT_LIMIT
    if not value.isascii() or not value.isdigit() or not 1 <= int(value[:9]) <= MAX_LIMIT:
        raise field_error("limit", f"must be between 1 and {MAX_LIMIT}, got {short_repr(value)}")
    return int(value)


def _listed(item: Item, request_id: str, index: int) -> Item:
    """Returns the item with an id and a status, which clients may omit or send as null, and its text as a list of parts."""
    kind = item.get("type", "message")
    given_fields = {name: value for name, value in item.items() if value is not None}
    fields = {"id": f"in_{request_id}_{index}", "status": "completed"} | given_fields | {"type": kind}
    if kind == "message" and isinstance(item.get("content"), str):
        is_assistant = item.get("role") == "assistant"
        part = {"type": "output_text" if is_assistant else "input_text", "text": item["content"]}
        fields["content"] = [part | {"annotations": []} if is_assistant else part]
    if kind == "reasoning":
        fields.setdefault("summary", [])
    return fields


RESUME_WAIT_S = 1.0


class InstanceResponseStore:
    """The `ResponseStore` of `web.openai_api.response_endpoint` in an instance."""

    poll_interval_s = 0.05

    def __init__(
        self,
        runner: GenerationRunner,
        services: ApiServices,
        streams: StreamRegistry,
        background: BackgroundResponses,
    ) -> None:
        self._builder = runner.builder
        self._runner, self._background = runner, background
        self._services, self._streams = services, streams

    async def find(self, caller: Caller, response_id: str, param: str = "response_id") -> StreamRecord:
        """Returns the record of a response of this caller. Raises `NotFound` if there is none, and `Unavailable` if the
        stream store does not reply."""
        request_id = request_id_of_response(caller, response_id, param)
        record = await self._streams.find(request_id, caller=caller.access_filter, require_reply=True)
        if record is None or record.attempt.path != PATH:
            raise response_not_found(response_id, param)
        return record

    async def view(self, record: StreamRecord) -> ResponseView:
        view = await self._any_view(record)
        if not view.request.is_stored:
            raise response_not_found(PREFIX + record.attempt.request_id)
        return view

    async def _any_view(self, record: StreamRecord) -> ResponseView:
        """Returns the view of a response that need not be stored, for the client that it is written to."""
        attempt = record.attempt
        return await self._services.executors.text.run(
            attempt.caller, lambda: ResponseView(self._builder, record), len(attempt.body)
        )

    def now_s(self) -> float:
        return self._services.clock.now_s()

    def reader(self) -> "InstanceResponseReader":
        return InstanceResponseReader(self)

    async def show(self, record: StreamRecord) -> bytes:
        return msgspec.json.encode((await self.view(record)).response(record))

    async def whole(self, record: StreamRecord) -> bytes:
        return msgspec.json.encode((await self._any_view(record)).response(record))

    async def rest(self, record: StreamRecord, num_sent_tokens: int | None) -> bytes:
        """Returns the events of an ended response after those of its first `num_sent_tokens` tokens. None: all events."""
        assert record.is_finished
        events = (await self._any_view(record)).events
        num_known = 0
        if num_sent_tokens is not None:
            # The view of a response cancelled at that point has one event more than the client has: the cancellation.
            known_view = await self._any_view(cut_at(record, num_sent_tokens))
            num_known = len(known_view.events) - 1
        return b"".join(map(event_bytes, events[num_known:]))

    async def input_items(self, record: StreamRecord, query: Mapping[str, str]) -> bytes:
        return msgspec.json.encode(
            input_items_page((await self.view(record)).request, record.attempt.request_id, query)
        )

    async def context(self, record: StreamRecord) -> bytes:
        view = await self.view(record)
        if not view.is_over:
            raise not_finished_error(PREFIX + record.attempt.request_id)
        return msgspec.json.encode(view.context())

    async def resume(self, record: StreamRecord) -> None:
        """Resumes a response that no process runs, from the tokens so far. Waits at most `RESUME_WAIT_S`, since the
        caller must not wait for an engine."""
        attempt = record.attempt
        if record.is_live or record.is_finished:
            return
        attempt = msgspec.structs.replace(
            attempt, attempt_epoch=min(attempt.attempt_epoch + 1, MAX_ATTEMPT), is_final=True
        )
        started_at_s = self._services.clock.now_s()
        prepared = await self._runner.prepare(
            attempt.caller, attempt.body, lambda: self._builder.prepare_attempt(attempt, started_at_s, is_routed=False)
        )
        if prepared.request.is_stored:
            # A record that a router or client has left is kept for a short time only, and an engine may take longer to
            # start.
            self._streams.store_response(record)
            # A background response has been admitted, and runs to its end. A response whose client has disconnected has
            # released its slot, so it is admitted like a new request.
            attempt = msgspec.structs.replace(prepared.attempt, was_accepted=prepared.request.is_background)
            prepared = with_prior_logprobs(dataclasses.replace(prepared, attempt=attempt), record)
            task = self._services.tasks.start(self._restart(prepared, record), attempt.caller)
            await asyncio.wait((task,), timeout=RESUME_WAIT_S)

    async def _restart(self, prepared: PreparedRequest, record: StreamRecord) -> None:
        try:
            await self._background.start(prepared)
        except Conflict:
            return  # another process was faster
        except (OnwardError, RequestFailed) as fault:
            error = fault.info if isinstance(fault, RequestFailed) else to_error_info(fault)
            if not error.retryable and error.code not in ENDED_ELSEWHERE_CODES:
                failed = msgspec.structs.replace(record, attempt=prepared.attempt, error=error)
                self._streams.store_response(failed)

    async def cancel(self, record: StreamRecord) -> StreamRecord:
        return await self._streams.cancel(record)

    async def store(self, record: StreamRecord) -> StreamRecord:
        """Stores how a response has ended, as a router has decided. Returns the record that is then stored."""
        if record.is_cancelled:
            return await self._streams.cancel(msgspec.structs.replace(record, is_cancelled=False))
        if record.error is not None:
            # An attempt that failed here may have left a record. This record replaces it and keeps its logprobs.
            attempt = record.attempt
            record = with_longest_logprobs(record, await self._streams.find(attempt.request_id, caller=attempt.caller))
        self._streams.store_response(record)
        return record

    async def delete(self, record: StreamRecord) -> None:
        await self._streams.delete(record)
        name, caller = record.attempt.request_id, record.attempt.caller
        await self._services.engine_client.abort_by_name([name], abort_all=False, caller=caller)


def cut_at(record: StreamRecord, num_tokens: int) -> StreamRecord:
    """Returns the record as if the response had been cancelled after this number of tokens."""
    choices = [ChoiceSnapshot(choice.token_ids[:num_tokens]) for choice in record.attempt.choices]
    attempt = msgspec.structs.replace(record.attempt, choices=choices)
    return StreamRecord(attempt=attempt, logprobs=record.logprobs[:num_tokens], is_cancelled=True)


class InstanceResponseReader:
    """Returns the events of one response from successive records, without replaying from the first token each time."""

    def __init__(self, store: InstanceResponseStore) -> None:
        self._store = store
        self._view: ResponseView | None = None

    async def events(self, record: StreamRecord, after: int) -> bytes:
        if self._view is None:
            self._view = await self._store.view(record)
        else:
            self._view.apply(record)
        return b"".join(map(event_bytes, self._view.events[after + 1 :]))
