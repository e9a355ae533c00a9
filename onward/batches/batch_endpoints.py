"""The routes of `/v1/batches`: create, list, show and cancel a caller's batches."""

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onward.batches.batch_policy import (
    COMPLETION_WINDOW_S,
    BatchLimits,
    check_batch_quota,
    check_request,
)
from onward.batches.batch_store import BATCH_PREFIX, FILE_PREFIX, BatchStore
from onward.batches.caller_turns import CallerTurns
from onward.batches.listing import page_of, page_query
from onward.batches.records import BATCH, BatchList, BatchObject, BatchRecord, CreateBatchRequest, batch_object
from onward.clock import Clock
from onward.errors import InvalidRequest
from onward.random_source import SEED_BITS, RandomSource
from onward.web import asgi
from onward.web.auth.api_key_table import Caller
from onward.web.auth.authenticator import get_caller
from onward.web.body_parts import check_parts
from onward.web.http_responses import json_response
from onward.web.json_body import decode, field_error

DEFAULT_PAGE, MAX_PAGE = 20, 100
MAX_BODY_BYTES = 1 << 16
_requests = msgspec.json.Decoder(CreateBatchRequest)


def decode_create(body: bytes) -> CreateBatchRequest:
    check_parts(body)
    request = decode(body, _requests)
    check_request(request)
    return request


class BatchEndpoints:
    def __init__(
        self, store: BatchStore, limits: BatchLimits, clock: Clock, random: RandomSource, turns: CallerTurns
    ) -> None:
        self._store, self._limits, self._clock, self._random, self._turns = store, limits, clock, random, turns

    async def batches(self, request: Request) -> Response:
        caller = get_caller(request.scope)
        if request.method != "POST":
            page = page_query(request.query_params, DEFAULT_PAGE, MAX_PAGE)
            records, has_more = page_of(await asyncio.to_thread(self._visible_batches, caller), page)
            objects = await asyncio.to_thread(lambda: [self._object(record) for record in records])
            ids = [one.id for one in objects] or [None]
            return json_response(BatchList(objects, has_more, ids[0], ids[-1]))
        body = await asgi.read_connected_body(request.receive, MAX_BODY_BYTES)
        return json_response(await self._turns.run(caller.name, self._create, caller, decode_create(body)))

    async def batch(self, request: Request) -> Response:
        record = await self._found(request)
        return json_response(await asyncio.to_thread(self._object, record))

    async def cancel(self, request: Request) -> Response:
        await asgi.read_connected_body(request.receive, MAX_BODY_BYTES)
        record = await self._found(request)
        return json_response(await asyncio.to_thread(self._cancel, record))

    async def _found(self, request: Request) -> BatchRecord:
        caller, batch_id = get_caller(request.scope), request.path_params["batch_id"]
        return await asyncio.to_thread(self._store.find_batch, caller, batch_id)

    def _visible_batches(self, caller: Caller) -> list[BatchRecord]:
        names = self._store.callers() if caller.is_admin else [caller.name]
        return [record for name in names for record in self._store.batches(name)]

    def _object(self, record: BatchRecord) -> BatchObject:
        return batch_object(record, self._store.cancelled_s(record))

    def _create(self, caller: Caller, request: CreateBatchRequest) -> BatchObject:
        now_s, store, name = self._clock.wall_s(), self._store, caller.name
        with store.locked(name):
            file = store.find_file(caller, request.input_file_id, now_s, "input_file_id")
            if file.caller != name:
                raise field_error("input_file_id", "is another caller's file; a batch needs one of your own")
            if file.purpose != BATCH:
                raise field_error("input_file_id", f"has the purpose {file.purpose}, and must have {BATCH}")
            kept = store.batches(name)
            check_batch_quota(sum(not record.has_ended for record in kept), len(kept))
            output_expiry = request.output_expires_after
            record = BatchRecord(
                id=store.new_id(BATCH_PREFIX, name),
                caller=name,
                created_s=now_s,
                expires_s=now_s + COMPLETION_WINDOW_S,
                seed=self._random.bits(SEED_BITS),
                endpoint=request.endpoint,
                input_file_id=file.id,
                completion_window=request.completion_window,
                output_file_id=store.new_id(FILE_PREFIX, name),
                error_file_id=store.new_id(FILE_PREFIX, name),
                output_ttl_s=self._limits.ttl_s if output_expiry is None else output_expiry.seconds,
                metadata=request.metadata,
            )
            store.write_batch(record)
        return batch_object(record, None)

    def _cancel(self, record: BatchRecord) -> BatchObject:
        if record.has_ended:
            problem = f"batch_id: the batch has ended already: it is {record.status}"
            raise InvalidRequest(problem, param="batch_id", code="batch_ended")
        if self._store.cancelled_s(record) is None:
            self._store.request_cancel(record, self._clock.wall_s())
        return self._object(record)
