"""Responses by their ids, whichever process of the instance runs them or has run them. Each caller has its own.

What runs is shown by whoever runs it, what is over by the shelf. One that runs in the background and whose process has
died is taken up by the next process that is asked for it, from the tokens so far.
"""

import asyncio
import dataclasses

import msgspec

from onward.api.generation import Generator
from onward.api.jobs import Backend
from onward.api.ledger import MAX_ATTEMPT
from onward.api.prepared import Prepared
from onward.api.responses.background import Background
from onward.api.responses.view import View
from onward.api.streams import OF_OTHERS, Streams
from onward.errors import Conflict, OnwardError
from onward.proto.router import Record
from onward.web.body import wrong
from onward.web.failures import RequestFailed, info_of
from onward.web.keys import Caller
from onward.web.response_ids import PATH, PREFIX, own_request_id, unknown

TAKE_UP_S = 1.0


class StoredResponses:
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
        attempt = record.attempt
        view = await self._backend.queues.texts.run(attempt.caller, lambda: View(self._jobs, record), len(attempt.body))
        if not view.request.is_stored:
            raise unknown(PREFIX + record.attempt.request_id)
        return view

    async def take_up(self, record: Record, *, even_if_left: bool = False) -> None:
        """Somebody asks for one that nobody runs. `even_if_left`: also where it ran for a client that has gone."""
        attempt = record.attempt
        if record.is_live or record.is_over:
            return
        attempt = msgspec.structs.replace(attempt, epoch=min(attempt.epoch + 1, MAX_ATTEMPT), final=True)
        started_at_s = self._backend.clock.now_s()
        prepared = await self._generator.prepared(
            attempt.caller, attempt.body, lambda: self._jobs.of_attempt(attempt, started_at_s, is_routed=False)
        )
        request = prepared.request
        if request.is_stored and (request.is_background or even_if_left):
            # What a router or a client has left is kept for a short time only, and an engine may take longer to come.
            self._streams.keep_response(record)
            # One that runs in the background was let in, and runs until it is over. One that its client has left has given
            # its slot back, so it is admitted like a new request.
            attempt = msgspec.structs.replace(prepared.attempt, was_taken=request.is_background)
            prepared = dataclasses.replace(prepared, attempt=attempt)
            # Whoever has asked for it does not wait for an engine.
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
        """As it is then. Only what runs in the background can be cancelled: of the rest its client hangs up."""
        view = await self.view(record)
        if not view.request.is_background:
            raise wrong("response_id", "only a response with background: true can be cancelled")
        return record if view.is_over else await self._ended(record)

    async def keep(self, record: Record) -> Record:
        """As a router has decided that it has ended. Returns how it has."""
        if record.is_cancelled:
            return await self._ended(msgspec.structs.replace(record, is_cancelled=False))
        self._streams.keep_response(record)
        return record

    async def _ended(self, record: Record) -> Record:
        left = await self._streams.take_away(record)
        if left.is_over:
            return left  # it was faster
        cancelled = msgspec.structs.replace(left, is_live=False, is_cancelled=True)
        self._streams.keep_response(cancelled)
        return cancelled

    async def delete(self, record: Record) -> None:
        name, caller = record.attempt.request_id, record.attempt.caller
        try:
            await self._backend.client.abort_by_name([name], everything=False, caller=caller)
        finally:
            await self._streams.drop([name], caller=caller)
