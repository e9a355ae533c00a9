"""Responses by their ids, whichever process of the instance runs them or has run them. Each caller has its own.

What runs is shown by whoever runs it, what is over by the shelf. One that runs in the background and whose process has
died is taken up by the next process that is asked for it, from the tokens so far.
"""

import asyncio
import dataclasses
from collections.abc import Mapping

import msgspec

from onward.api.generation import Generator
from onward.api.jobs import Backend
from onward.api.ledger import MAX_ATTEMPT
from onward.api.prepared import Prepared
from onward.api.responses.background import Background
from onward.api.responses.form import event_bytes
from onward.api.responses.input_items import page_of
from onward.api.responses.view import View
from onward.api.streams import OF_OTHERS, Streams
from onward.errors import Conflict, OnwardError
from onward.proto.router import GivenChoice, Record
from onward.web.failures import RequestFailed, info_of
from onward.web.keys import Caller
from onward.web.response_context import not_over
from onward.web.response_ids import PATH, PREFIX, own_request_id, unknown

TAKE_UP_S = 1.0


class StoredResponses:
    """`Responses` of `web.response_endpoint`, in one instance."""

    ask_every_s = 0.05

    def __init__(self, generator: Generator, backend: Backend, streams: Streams, background: Background) -> None:
        self._jobs = generator.jobs
        self._generator, self._background = generator, background
        self._backend, self._streams = backend, streams

    async def find(self, caller: Caller, response_id: str, param: str = "response_id") -> Record:
        """The caller's own, if it is there to be asked for."""
        request_id = own_request_id(caller, response_id, param)
        record = await self._streams.find(request_id, caller=caller.scope, must_answer=True)
        if record is None or record.attempt.path != PATH:
            raise unknown(response_id, param)
        return record

    async def view(self, record: Record) -> View:
        view = await self._any_view(record)
        if not view.request.is_stored:
            raise unknown(PREFIX + record.attempt.request_id)
        return view

    async def _any_view(self, record: Record) -> View:
        """Of a response that need not be stored, for the client that it is written to."""
        attempt = record.attempt
        return await self._backend.queues.texts.run(attempt.caller, lambda: View(self._jobs, record), len(attempt.body))

    def now_s(self) -> float:
        return self._backend.clock.now_s()

    def reader(self) -> "ViewReader":
        return ViewReader(self)

    async def show(self, record: Record) -> bytes:
        return msgspec.json.encode((await self.view(record)).response(record))

    async def whole(self, record: Record) -> bytes:
        return msgspec.json.encode((await self._any_view(record)).response(record))

    async def rest(self, record: Record, num_told: int | None) -> bytes:
        """The events of a response that is over, behind those that this number of tokens has brought about. None: all."""
        assert record.is_over
        events = (await self._any_view(record)).events
        num_known = 0
        if num_told is not None:
            # Cancelled there, its last event has the number of the first one that the client does not have.
            known = await self._any_view(cut_at(record, num_told))
            num_known = len(known.events) - 1
        return b"".join(map(event_bytes, events[num_known:]))

    async def input_items(self, record: Record, query: Mapping[str, str]) -> bytes:
        return msgspec.json.encode(page_of((await self.view(record)).request, record.attempt.request_id, query))

    async def context(self, record: Record) -> bytes:
        view = await self.view(record)
        if not view.is_over:
            raise not_over(PREFIX + record.attempt.request_id)
        return msgspec.json.encode(view.context())

    async def take_up(self, record: Record) -> None:
        """From the tokens so far, by this process. Waits for a while only: the caller does not wait for an engine."""
        attempt = record.attempt
        if record.is_live or record.is_over:
            return
        attempt = msgspec.structs.replace(attempt, epoch=min(attempt.epoch + 1, MAX_ATTEMPT), final=True)
        started_at_s = self._backend.clock.now_s()
        prepared = await self._generator.prepared(
            attempt.caller, attempt.body, lambda: self._jobs.of_attempt(attempt, started_at_s, is_routed=False)
        )
        if prepared.request.is_stored:
            # What a router or a client has left is kept for a short time only, and an engine may take longer to come.
            self._streams.keep_response(record)
            # One that runs in the background was let in, and runs until it is over. One that its client has left has given
            # its slot back, so it is admitted like a new request.
            attempt = msgspec.structs.replace(prepared.attempt, was_taken=prepared.request.is_background)
            prepared = dataclasses.replace(prepared, attempt=attempt)
            beginning = self._backend.tasks.start(self._begin_again(prepared, record), attempt.caller)
            await asyncio.wait((beginning,), timeout=TAKE_UP_S)

    async def _begin_again(self, prepared: Prepared, record: Record) -> None:
        try:
            await self._background.begin(prepared)
        except Conflict:
            return  # another process was faster
        except (OnwardError, RequestFailed) as fault:
            error = fault.info if isinstance(fault, RequestFailed) else info_of(fault)
            if not error.retryable and error.code not in OF_OTHERS:
                failed = msgspec.structs.replace(record, attempt=prepared.attempt, error=error)
                self._streams.keep_response(failed)

    async def cancel(self, record: Record) -> Record:
        return await self._streams.cancel(record)

    async def keep(self, record: Record) -> Record:
        """As a router has decided that it has ended. Returns how it has."""
        if record.is_cancelled:
            return await self._streams.cancel(msgspec.structs.replace(record, is_cancelled=False))
        self._streams.keep_response(record)
        return record

    async def delete(self, record: Record) -> None:
        await self._streams.delete(record)
        name, caller = record.attempt.request_id, record.attempt.caller
        await self._backend.client.abort_by_name([name], everything=False, caller=caller)


def cut_at(record: Record, num_tokens: int) -> Record:
    """As if it had been cancelled there."""
    choices = [GivenChoice(one.token_ids[:num_tokens]) for one in record.attempt.choices]
    attempt = msgspec.structs.replace(record.attempt, choices=choices)
    return Record(attempt=attempt, scores=record.scores[:num_tokens], is_cancelled=True)


class ViewReader:
    """Makes the events of one response, from record to record, without beginning at its first token each time."""

    def __init__(self, stored: StoredResponses) -> None:
        self._stored = stored
        self._view: View | None = None

    async def events(self, record: Record, after: int) -> bytes:
        if self._view is None:
            self._view = await self._stored.view(record)
        else:
            self._view.take(record)
        return b"".join(map(event_bytes, self._view.events[after + 1 :]))
