"""Stored responses as a router finds them: those that it runs, those that it remembers, and those that instances store.

Instances build a response from its record, because the router cannot turn tokens into text.
"""

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from onward.errors import RETRY_SOON_S, Unavailable
from onward.proto.engine import ErrorInfo
from onward.proto.router import RESPONSE_PATH, ChoiceSnapshot, QueryResponse, StreamRecord
from onward.router.client_stream import ClientStream
from onward.router.core import instance_unreachable
from onward.router.instance_registry import InstanceInfo, InstanceState
from onward.router.record_lookup import find_records
from onward.router.stream_runner import StreamRunner, no_instance_of
from onward.router.upstream_client import PASS_ON_TIMEOUT_S
from onward.router.upstream_errors import parse_error_info
from onward.web.auth.api_key_table import Caller
from onward.web.auth.authenticator import may_access
from onward.web.error_format import RequestFailed
from onward.web.openai_api.response_ids import PATH, request_id_of_response, response_not_found
from onward.web.openai_api.response_options import response_options

MAX_TRIES = 3
LOOKUP_INTERVAL_S = 0.5
UNREACHABLE_WAIT_S = 5.0
"""How long a query waits for an unreachable instance. Within this time a response whose instance has died runs at
another one, or the instance has restarted its api process."""
READ_TIMEOUT_S = 5.0
"""How long an instance may take to read a record. One that hangs is passed over for the next one."""
_READS = frozenset({"events", "show", "whole", "input_items", "context", "rest"})
MAX_CANCELS, MAX_CANCELLING = 1024, 64
"""Responses that are being cancelled: those that wait, and those for which instances are queried at a time."""
NUM_COPIES = 2
"""Instances that keep the end of a response, so that it is not lost with one of them."""
ABORTED, REPLACED = "aborted", "stale_attempt"
"""Codes of errors of a run that was ended by an abort, or by a cancel or a later attempt, which decides what is kept."""

_records = msgspec.msgpack.Decoder(StreamRecord)


class ClusterResponseStore:
    """The `ResponseStore` of a router (`web.openai_api.response_endpoint`), over its own streams and all instances."""

    poll_interval_s = 0.2

    def __init__(self, runner: StreamRunner) -> None:
        self._runner = runner
        self._cancels: set[asyncio.Task[StreamRecord | None]] = set()
        self._cancelling = asyncio.Semaphore(MAX_CANCELLING)

    def now_s(self) -> float:
        return self._runner.clock.now_s()

    def reader(self) -> "ClusterResponseStore":
        return self

    async def events(self, record: StreamRecord, after: int) -> bytes:
        return await self.ask_instances("events", record, after=after)

    async def show(self, record: StreamRecord) -> bytes:
        return await self.ask_instances("show", record)

    async def input_items(self, record: StreamRecord, query: Mapping[str, str]) -> bytes:
        return await self.ask_instances("input_items", record, query=query)

    async def context(self, record: StreamRecord) -> bytes:
        return await self.ask_instances("context", record)

    async def resume(self, record: StreamRecord) -> None:
        await self.ask_instances("take_up", record)

    async def delete(self, record: StreamRecord) -> None:
        """Deletes a response at this router and at all its instances, and aborts its run. All instances receive the
        deletion, so that none of them stores the end of the aborted run."""
        request_id, caller = record.attempt.request_id, record.attempt.caller
        live = self._runner.core.find_live(request_id)
        if live is not None and live.stream.request.caller == caller:
            live.is_deleted = True
        message = msgspec.msgpack.encode(QueryResponse(action="delete", record=record))
        forward = self._runner.upstream.forward
        instances = self._instances_for(record)
        await asyncio.gather(*(forward(instance.url, RESPONSE_PATH, message) for instance in instances))
        self._runner.abort_local([request_id], caller or None)
        self._runner.core.resumable_streams.drop(request_id)

    async def find(self, caller: Caller, response_id: str, param: str = "response_id") -> StreamRecord:
        """Returns the most advanced record of a response at this router and the instances. Raises a 404 if none of them
        has it, and a 503 if an instance does not answer for `UNREACHABLE_WAIT_S`. A router that has just started waits
        for the instances to register before it raises the 404."""
        request_id, runner = request_id_of_response(caller, response_id, param), self._runner
        give_up_at_s = runner.clock.now_s() + UNREACHABLE_WAIT_S
        while True:
            found = await find_records(runner, request_id)
            record = self._most_advanced(caller, request_id, found.records)
            if record is not None:
                return record
            if runner.clock.now_s() >= (runner.settled_at_s if found.is_complete else give_up_at_s):
                break
            await runner.wait_for_change(LOOKUP_INTERVAL_S)
        raise response_not_found(response_id, param) if found.is_complete else instance_unreachable(param)

    def _most_advanced(self, caller: Caller, request_id: str, stored: list[StreamRecord]) -> StreamRecord | None:
        records = [*self._local_records(request_id), *stored]
        accessible = [
            record for record in records if record.attempt.path == PATH and may_access(caller, record.attempt.caller)
        ]
        return max(accessible, key=_rank, default=None)

    async def cancelled(self, caller: Caller | None, request_id: str) -> StreamRecord | None:
        """Returns the record of a cancelled response as instances store it. `caller` limits it to this caller's
        responses; None: any caller's."""
        records = (await find_records(self._runner, request_id)).records
        accessible = [
            candidate for candidate in records if caller is None or may_access(caller, candidate.attempt.caller)
        ]
        record = max((candidate for candidate in accessible if candidate.attempt.path == PATH), key=_rank, default=None)
        return record if record is not None and record.is_cancelled else None

    async def rest(self, record: StreamRecord, num_tokens_sent: int | None) -> bytes:
        """Returns the events of a response that is over, without the events of the first `num_tokens_sent` tokens."""
        return await self._query_instances(QueryResponse(action="rest", record=record, num_told=num_tokens_sent))

    async def ask_instances(
        self, action: Any, record: StreamRecord, *, after: int = -1, query: Mapping[str, str] | None = None
    ) -> bytes:
        return await self._query_instances(
            QueryResponse(action=action, record=record, after_event=after, query=dict(query or {}))
        )

    async def _query_instances(self, query: QueryResponse) -> bytes:
        """Returns the answer of the first instance that gives one. Raises its refusal."""
        message = msgspec.msgpack.encode(query)
        timeout_s = READ_TIMEOUT_S if query.action in _READS else PASS_ON_TIMEOUT_S
        for instance in sorted(self._instances_for(query.record), key=_is_not_ready)[:MAX_TRIES]:
            reply = await self._runner.upstream.forward(instance.url, RESPONSE_PATH, message, timeout_s)
            if reply is None or reply.status >= 500:
                continue
            if reply.status != 200:
                raise RequestFailed(parse_error_info(reply.body, reply.status))
            return reply.body
        raise no_instance_of(_model_of(query.record))

    async def cancel(self, record: StreamRecord) -> StreamRecord:
        """Cancels a response and returns the stored record. The instance with the most tokens goes first: if it has
        completed the response, it is not cancelled. Its record, which may be more recent than this router's, is then
        stored at all other reachable instances, so that each of them shows the same response and none resumes it."""
        attempt = msgspec.structs.replace(record.attempt, attempt_epoch=record.attempt.attempt_epoch + 1)
        cancelled = msgspec.structs.replace(record, attempt=attempt, is_live=False, is_cancelled=True)
        urls = {instance.url for instance in self._instances_for(record)}
        by_url = (await find_records(self._runner, attempt.request_id)).by_url
        holders = sorted(urls & by_url.keys(), key=lambda url: (_rank(by_url[url]), url), reverse=True)
        stored: list[StreamRecord] = []
        for target_urls in (holders[:1], holders[1:], sorted(urls - by_url.keys())):
            stored += await self._store_at(cancelled, target_urls)
            if stored and not any(stored_record.is_cancelled for stored_record in stored):
                return max(stored, key=_rank)
            cancelled = max([cancelled, *stored], key=_rank)
        if not stored:
            raise Unavailable("no instance can store it now", retry_after_s=RETRY_SOON_S)
        # An instance that could not be reached may still run it for this router.
        self._runner.abort_local([attempt.request_id], attempt.caller or None)
        return max(stored, key=_rank)

    async def cancel_soon(self, record: StreamRecord, timeout_s: float) -> StreamRecord | None:
        """Cancels a response like `cancel`, but waits at most `timeout_s`; after that, the cancel continues in the
        background. Returns the stored record, or None if it is not known yet or no instance can store it. Also returns
        None, and cancels nothing, if `MAX_CANCELS` cancels are running."""
        if len(self._cancels) >= MAX_CANCELS:
            return None
        task = asyncio.create_task(self._cancelled_or_not(record))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)
        done, _ = await asyncio.wait((task,), timeout=timeout_s)
        return task.result() if done else None

    async def cancel_idle(self, request_id: str, timeout_s: float) -> bool:
        """Cancels a response that instances store and that nothing runs. The most advanced record counts, because one
        instance may have completed the response while another has an earlier record. Returns whether the response is
        cancelled, and True if that is not known within `timeout_s`."""
        records = (await find_records(self._runner, request_id)).records
        furthest = max((record for record in records if record.attempt.path == PATH), key=_rank, default=None)
        if furthest is None or furthest.is_finished:
            return furthest is not None and furthest.is_cancelled
        cancelled = await self.cancel_soon(furthest, timeout_s)
        return cancelled is None or cancelled.is_cancelled

    async def _cancelled_or_not(self, record: StreamRecord) -> StreamRecord | None:
        async with self._cancelling:
            try:
                return await self.cancel(record)
            except Unavailable:
                return None

    async def store_final(self, stream: ClientStream, error: ErrorInfo | None = None) -> None:
        """Stores the final state of a response that this router has run. If no instance can be reached, only this
        router has the record, and the next client's query resumes the response."""
        assert not stream.is_attempt_running, "the final record is stored after the last attempt"
        if error is not None and error.code == REPLACED:
            return
        record = msgspec.structs.replace(self.record_of(stream, is_live=False), error=error)
        holder_id = stream.instance_id if error is None else None
        others = [
            instance
            for instance in self._instances_for(record)
            if instance.instance_id != holder_id and not _is_not_ready(instance)
        ]
        others.sort(key=lambda instance: zlib.crc32(f"{stream.request_id} {instance.instance_id}".encode()))
        await self._store_at(record, [instance.url for instance in others[: NUM_COPIES - (holder_id is not None)]])

    async def _store_at(self, record: StreamRecord, urls: Sequence[str]) -> list[StreamRecord]:
        """Stores a record at these instances and returns what each reachable one stores now."""
        message = msgspec.msgpack.encode(QueryResponse(action="keep", record=record))
        forward = self._runner.upstream.forward
        replies = await asyncio.gather(*(forward(url, RESPONSE_PATH, message) for url in urls))
        return [_records.decode(reply.body) for reply in replies if reply is not None and reply.status == 200]

    def _instances_for(self, record: StreamRecord) -> list[InstanceInfo]:
        """Returns the instances of the record's model, which can decode its tokens; all instances if it names no known
        model."""
        core = self._runner.core
        models = core.models.served().models_of_record(_model_of(record), record.attempt.model_tag)
        instances = core.serving_instances(self._runner.clock.now_s())
        return [instance for instance in instances if not models or instance.model in models]

    def record_of(self, stream: ClientStream, *, is_live: bool) -> StreamRecord:
        if not is_live and not stream.is_complete:
            stream.note_completion(self._runner.clock.wall_s())
        attempt = stream.build_attempt(self._runner.clock.now_s(), [])
        if stream.was_aborted:
            # At its instance: the record says how it has ended, and not its choice.
            attempt = msgspec.structs.replace(
                attempt, choices=[ChoiceSnapshot(choice.token_ids) for choice in attempt.choices]
            )
        elif is_live:
            attempt = msgspec.structs.replace(attempt, choices=stream.readable_choices())
        return StreamRecord(attempt=attempt, is_live=is_live, is_cancelled=stream.was_aborted)

    def _local_records(self, request_id: str) -> list[StreamRecord]:
        core = self._runner.core
        live = core.find_live(request_id)
        if live is not None:
            return [] if live.is_deleted else [self.record_of(live.stream, is_live=True)]
        resumable = core.resumable_streams.find(request_id, self._runner.clock.now_s())
        return [] if resumable is None else [self.record_of(resumable, is_live=False)]


def _model_of(record: StreamRecord) -> str:
    return response_options(record.attempt.body).model


def _is_not_ready(instance: InstanceInfo) -> bool:
    """Returns a sort key: ready instances are queried first, because a query to a hanging instance waits for its
    timeout."""
    return instance.state is not InstanceState.READY


def _rank(record: StreamRecord) -> tuple[bool, bool, bool, int, int, int]:
    """Returns a sort key: the most advanced record has the largest. A cancelled record wins over a completed one, which
    comes from an instance that the cancel did not reach."""
    num_tokens = sum(len(choice.token_ids) for choice in record.attempt.choices)
    return (
        record.is_finished,
        record.is_cancelled,
        record.is_live,
        num_tokens,
        len(record.logprobs),
        record.attempt.attempt_epoch,
    )
