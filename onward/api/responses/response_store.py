"""Responses by their ids, whichever process of the instance runs them or has run them. Each caller has its own.

What runs is shown by the process that runs it, what is over by the stream store. One that runs in the background and whose
process has died is taken up by the next process that is asked for it, from the tokens so far.
"""

import asyncio
import dataclasses
from collections.abc import Mapping

import msgspec

from onward.api.engine_link.request_tracker import MAX_ATTEMPT
from onward.api.lifecycle.generation_runner import GenerationRunner
from onward.api.lifecycle.request_builder import ApiServices
from onward.api.lifecycle.stream_registry import ENDED_ELSEWHERE_CODES, StreamRegistry
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.responses.background import BackgroundResponses
from onward.api.responses.input_items import input_items_page
from onward.api.responses.response_formatters import event_bytes
from onward.api.responses.response_view import ResponseView
from onward.errors import Conflict, OnwardError
from onward.proto.error_info import to_error_info
from onward.proto.router import ChoiceSnapshot, StreamRecord
from onward.web.auth.api_key_table import Caller
from onward.web.error_format import RequestFailed
from onward.web.openai_api.previous_response import not_finished_error
from onward.web.openai_api.response_ids import PATH, PREFIX, request_id_of_response, response_not_found

RESUME_WAIT_S = 1.0


class InstanceResponseStore:
    """`Responses` of `web.openai_api.response_endpoint`, in one instance."""

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
        """The caller's own, if it is there to be asked for."""
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
        """Of a response that need not be stored, for the client that it is written to."""
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
        """The events of a response that is over, behind those that this number of tokens has brought about. None: all."""
        assert record.is_finished
        events = (await self._any_view(record)).events
        num_known = 0
        if num_sent_tokens is not None:
            # Cancelled there, its last event has the number of the first one that the client does not have.
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
        """From the tokens so far, by this process. Waits for a while only: the caller does not wait for an engine."""
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
            # What a router or a client has left is kept for a short time only, and an engine may take longer to come.
            self._streams.store_response(record)
            # One that runs in the background was let in, and runs until it is over. One that its client has left has given
            # its slot back, so it is admitted like a new request.
            attempt = msgspec.structs.replace(prepared.attempt, was_accepted=prepared.request.is_background)
            prepared = dataclasses.replace(prepared, attempt=attempt)
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
        """As a router has decided that it has ended. Returns how it has."""
        if record.is_cancelled:
            return await self._streams.cancel(msgspec.structs.replace(record, is_cancelled=False))
        self._streams.store_response(record)
        return record

    async def delete(self, record: StreamRecord) -> None:
        await self._streams.delete(record)
        name, caller = record.attempt.request_id, record.attempt.caller
        await self._services.engine_client.abort_by_name([name], abort_all=False, caller=caller)


def cut_at(record: StreamRecord, num_tokens: int) -> StreamRecord:
    """As if it had been cancelled there."""
    choices = [ChoiceSnapshot(choice.token_ids[:num_tokens]) for choice in record.attempt.choices]
    attempt = msgspec.structs.replace(record.attempt, choices=choices)
    return StreamRecord(attempt=attempt, logprobs=record.logprobs[:num_tokens], is_cancelled=True)


class InstanceResponseReader:
    """Makes the events of one response, from record to record, without beginning at its first token each time."""

    def __init__(self, store: InstanceResponseStore) -> None:
        self._store = store
        self._view: ResponseView | None = None

    async def events(self, record: StreamRecord, after: int) -> bytes:
        if self._view is None:
            self._view = await self._store.view(record)
        else:
            self._view.apply(record)
        return b"".join(map(event_bytes, self._view.events[after + 1 :]))
