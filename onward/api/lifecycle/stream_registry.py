"""The live streams of this api process by request id, and its way to the records of ended and detached streams.

A request runs once in an instance: a later attempt ends the earlier one, whichever api process runs it. A record is all
that is needed to resume a stream. The stream store keeps it for a while, for all api processes. An abort drops the record,
or marks it as cancelled if it belongs to a stored response. Knows nothing of HTTP.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from onward.api.engine_link.engine_client import EngineClient
from onward.api.engine_link.request_tracker import ABORTED, MAX_ATTEMPT, PD_PREEMPTED
from onward.api.lifecycle.request_builder import ActiveRequest
from onward.api.lifecycle.resume import with_longest_logprobs
from onward.api.lifecycle.stream_store_client import StreamStoreClient
from onward.clock import Clock
from onward.errors import RETRY_SOON_S, Conflict
from onward.obs.metrics import LabelValues
from onward.proto.engine import ErrorInfo
from onward.proto.finish_reasons import ABORT, PD_RESCHEDULE
from onward.proto.router import Attempt, StreamRecord
from onward.proto.stream_store import EntryKind, EntryStatus, StoreEntry
from onward.web.error_format import RequestFailed
from onward.web.error_handlers import INTERNAL_ERROR

DRAINING = ErrorInfo(
    "draining", "this instance is being drained; try another one", 503, True, retry_after_s=RETRY_SOON_S
)
REPLACED_BY_NEW_SERVER = ErrorInfo(
    "replaced", "a new server takes over at this address", 503, True, retry_after_s=RETRY_SOON_S
)
ABORTED_ENDS_S = 1.0
"""How long the process that runs an aborted response may take to end it."""
LOOK_EVERY_S = 0.05
MAX_ENDING = 16
"""Maximum number of responses that one abort ends at a time."""
MAX_CLAIM_TRIES = 3
"""Tries to claim a stream that is finalized. A try fails if another attempt has started meanwhile."""
REPLACED = ErrorInfo("stale_attempt", "a later attempt at this request has taken its place", 409)
ENDED_ELSEWHERE_CODES = (REPLACED.code, ABORTED.code)
"""Errors of an attempt that was ended by a later attempt or an abort, which also decides how the stream continues or
ends."""


@dataclass(slots=True, eq=False)
class LiveStream:
    """A stream that runs in this api process."""

    request: ActiveRequest
    failure: ErrorInfo | None = None
    """Why the stream has ended, if not by itself."""
    first_token_at_s: float | None = None

    @property
    def attempt(self) -> Attempt:
        return self.request.prepared.attempt


@dataclass(frozen=True, slots=True)
class AbortOutcome:
    """The result of an abort by name."""

    names: set[str]
    """The names by which something has ended."""
    idle: dict[str, list[str]]
    """Stored responses that no process runs and that were left unchanged: by id, the names that match them."""


class StreamRegistry:
    def __init__(
        self,
        client: EngineClient,
        clock: Clock,
        ttl_s: float,
        stream_store: StreamStoreClient,
        response_ttl_s: float = 0.0,
    ) -> None:
        self.is_draining = False
        self._is_stopping = False
        self._client = client
        self._clock = clock
        self._ttls_s: dict[EntryKind, float] = {"detached": ttl_s, "ended": ttl_s, "response": response_ttl_s}
        self._store = stream_store
        self._live: dict[str, LiveStream] = {}
        self._finalizing: Counter[str] = Counter()
        """Number of tasks that are finalizing each request. No attempt at it starts in this process meanwhile."""
        self._decoder = msgspec.msgpack.Decoder(StreamRecord)
        stream_store.attach(self)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def check_attempt(self, attempt: Attempt) -> None:
        """Raises `Conflict` if this process is finalizing the attempt's response. Raises it too if an attempt runs
        here that is not earlier, or is another caller's. Ends nothing."""
        if attempt.request_id in self._finalizing:
            raise _stale_attempt(attempt, attempt.attempt_epoch)
        live = self._live.get(attempt.request_id)
        if live is not None and not _may_replace_attempt(attempt.attempt_epoch, attempt.caller, live):
            raise _stale_attempt(attempt, live.attempt.attempt_epoch)

    async def start(self, prepare: Callable[[], ActiveRequest], attempt: Attempt) -> LiveStream:
        """Starts an attempt. An earlier attempt, in this or another process, ends first. Raises `Conflict` if another
        attempt is not earlier, or if the stream is being finalized."""
        self.check_attempt(attempt)
        if attempt.attempt_epoch > 1:
            held_epoch = await self._store.claim(attempt.request_id, attempt.attempt_epoch, attempt.caller)
            if held_epoch is not None:
                raise _stale_attempt(attempt, held_epoch)
            self.check_attempt(attempt)
        return self._run(prepare, attempt)

    def _run(self, prepare: Callable[[], ActiveRequest], attempt: Attempt) -> LiveStream:
        earlier = self._live.get(attempt.request_id)
        if earlier is not None:
            # Stored first, so that its tokens are not lost if the new attempt fails to start.
            self._put(self._detach(earlier))
        stream = self._live[attempt.request_id] = LiveStream(prepare())
        if attempt.attempt_epoch > 1:
            self._store.drop_superseded(attempt.request_id, attempt.attempt_epoch, attempt.caller)
        return stream

    def end_stream(self, stream: LiveStream) -> None:
        """Removes a stream that has ended or whose client is gone, and aborts its unfinished work. Its record is stored if
        it can still be used."""
        attempt, active = stream.attempt, stream.request
        if self._live.get(attempt.request_id) is not stream:
            return
        del self._live[attempt.request_id]
        self._release(stream)
        if active.collector is not None and stream.failure is not INTERNAL_ERROR:
            result = active.output.apply(active.collector.drain())
            active.keep_logprobs(result.updates)
            stream.failure = stream.failure or result.error
        if (kind := _entry_kind(stream)) is not None:
            self._put(self._entry(stream, kind))

    def store_started(self, stream: LiveStream) -> None:
        """Stores the record of a response that has just started, so that it is not lost if this process dies."""
        self._put(self._entry(stream, "response"))

    def store_response(self, record: StreamRecord) -> None:
        """Stores the record of a response whose end was decided outside its stream."""
        self._put(self._entry_of_record(record, "response", is_stored=True))

    async def claim_to_finalize(self, record: StreamRecord) -> StreamRecord:
        """Ends the attempt of a stream that is to be finalized, in whichever process it runs. Returns the latest record: it
        is finished, or has an epoch that no attempt has had."""
        request_id, caller = record.attempt.request_id, record.attempt.caller
        epoch = record.attempt.attempt_epoch + 1
        for _ in range(MAX_CLAIM_TRIES):
            live = self._live.get(request_id)
            if live is not None and live.attempt.caller == caller:
                epoch = max(epoch, live.attempt.attempt_epoch + 1)
                latest = self._record_of(live)
                entry = self._detach(live)
                if latest.is_finished:
                    self._put(entry)
                return _with_epoch(_longer_record(record, latest), epoch)
            held_epoch = await self._store.claim(request_id, epoch, caller, to_finalize=True)
            if held_epoch is None:
                break
            epoch = held_epoch + 1  # another process has resumed or finalized the stream meanwhile
        entry = await self._store.find(request_id, 0, caller)
        return _with_epoch(record if entry is None else _longer_record(record, self._decoder.decode(entry.data)), epoch)

    async def cancel(self, record: StreamRecord) -> StreamRecord:
        """Ends the attempt of a response, and stores the response as cancelled unless it is finished. Returns the record
        that is then stored."""
        with self._block_attempts(record.attempt.request_id):
            latest = await self.claim_to_finalize(record)
            if latest.is_finished:
                return latest  # it has finished before it could be cancelled
            cancelled = msgspec.structs.replace(latest, is_live=False, is_cancelled=True)
            self.store_response(cancelled)
            return cancelled

    @contextmanager
    def _block_attempts(self, request_id: str) -> Iterator[None]:
        """Prevents attempts at this request from starting in this process until its end is stored. An attempt that already
        waits for its claim never starts: about a claim, the stream store queries only the other processes."""
        self._store.supersede_claims(request_id)
        self._finalizing[request_id] += 1
        try:
            yield
        finally:
            self._finalizing[request_id] -= 1
            if not self._finalizing[request_id]:
                del self._finalizing[request_id]

    async def find(
        self, request_id: str, epoch: int = 0, caller: str | None = None, *, require_reply: bool = False
    ) -> StreamRecord | None:
        """Returns the record of a stream, from the process that runs it or from the stream store. `epoch`: the latest epoch
        that the client has seen; 0: unknown. `caller`: only streams of this caller; None: of all callers. `require_reply`:
        raises `Unavailable` if the stream store does not reply."""
        live = self._live.get(request_id)
        if live is not None:
            return self._record_of(live, is_live=True) if caller in (None, live.attempt.caller) else None
        entry = await self._store.find(request_id, epoch, caller, require_reply=require_reply)
        return None if entry is None else self._decoder.decode(entry.data)

    async def abort_kept(
        self, names: Collection[str], abort_all: bool, caller: str | None, *, leaves_idle: bool
    ) -> AbortOutcome:
        """Drops the stored records with these names, or cancels them if they belong to stored responses. `leaves_idle`:
        responses that no process runs are left unchanged. Running requests have been aborted before."""
        reply = await self._store.drop_by_name(names, abort_all, caller)
        outcome, semaphore = AbortOutcome(set(reply.names), {}), asyncio.Semaphore(MAX_ENDING)

        async def end(record_id: str, own_names: list[str]) -> None:
            async with semaphore:
                record = await self._wait_not_live(record_id, caller)
                if record is not None and not record.is_finished:
                    if leaves_idle and not record.is_live:
                        outcome.idle[record_id] = own_names
                        return
                    record = await self.cancel(record)
                if record is not None and record.is_cancelled:
                    outcome.names.update(own_names)

        await asyncio.gather(*(end(*item) for item in reply.open.items()))
        return outcome

    async def _wait_not_live(self, record_id: str, caller: str | None) -> StreamRecord | None:
        """Waits until the api process that runs the response has ended it after the abort, with the tokens that its readers
        have. Returns the record; after `ABORTED_ENDS_S` also if the response still runs."""
        until_s = self._clock.now_s() + ABORTED_ENDS_S
        while True:
            record = await self.find(record_id, caller=caller)
            if record is None or record.is_finished or not record.is_live or self._clock.now_s() >= until_s:
                return record
            await asyncio.sleep(LOOK_EVERY_S)

    async def delete(self, record: StreamRecord) -> None:
        """Deletes a response for good. A process that still runs it cannot store it again."""
        await self._store.delete(record.attempt.request_id, record.attempt.caller)

    def live_entry(self, record_id: str) -> StoreEntry | None:
        """Returns the entry of a live stream, for another process. None if it does not run here."""
        live = self._live.get(record_id)
        return None if live is None else self._entry(live, "detached", is_live=True)

    def release_attempt(self, record_id: str, epoch: int, caller: str) -> StoreEntry | int | None:
        """Ends a stream because another process continues it, and returns its entry. Its connection here, which may be half
        open, ends too. Returns the epoch of an attempt that is not earlier, and None if the stream does not run here."""
        live = self._live.get(record_id)
        if live is None:
            return None
        return self._detach(live) if _may_replace_attempt(epoch, caller, live) else live.attempt.attempt_epoch

    def counts(self) -> dict[LabelValues, float]:
        """Returns the number of live streams by origin: router or client."""
        num_routed = sum(stream.request.prepared.is_routed for stream in self._live.values())
        return {("router",): num_routed, ("client",): len(self._live) - num_routed}

    def drain(self) -> None:
        """Refuses new requests. Routed streams continue until their router moves them, since only the router knows whether
        another instance can take them. Direct streams continue to their end."""
        self.is_draining = True

    def undrain(self) -> None:
        self.is_draining = self._is_stopping

    def stop(self) -> None:
        """Drains for good: `undrain` has no effect after this."""
        self._is_stopping = self.is_draining = True

    def check_not_stopping(self) -> None:
        if self._is_stopping:
            raise Conflict("this instance is stopping, and takes no requests again")

    def end_routed_streams(self, error: ErrorInfo = DRAINING) -> None:
        """Ends the streams of routers, which continue them elsewhere from the tokens so far."""
        for stream in list(self._live.values()):
            if stream.request.prepared.is_routed:
                self._fail(stream, error)

    def check_not_draining(self) -> None:
        if self.is_draining:
            raise RequestFailed(DRAINING)

    def _detach(self, stream: LiveStream) -> StoreEntry:
        """Ends a stream in favour of a later attempt, and returns its entry."""
        del self._live[stream.attempt.request_id]
        has_ended = stream.request.prepared.request.is_stored and (
            stream.request.output.is_finished or _was_aborted(stream)
        )
        entry = self._entry(stream, "response" if has_ended else "detached")
        self._fail(stream, REPLACED)
        self._release(stream)
        return entry

    def _fail(self, stream: LiveStream, error: ErrorInfo) -> None:
        stream.failure = stream.failure or error
        if stream.request.collector is not None:
            self._client.fail(stream.request.collector, error)

    def _release(self, stream: LiveStream) -> None:
        if stream.request.collector is not None:
            self._client.abort(stream.request.collector)

    def _put(self, entry: StoreEntry) -> None:
        if entry.ttl_s > 0:
            self._store.put(entry)

    def _entry(self, stream: LiveStream, kind: EntryKind, *, is_live: bool = False) -> StoreEntry:
        is_stored = stream.request.prepared.request.is_stored
        return self._entry_of_record(self._record_of(stream, is_live=is_live), kind, is_stored=is_stored)

    def _entry_of_record(self, record: StreamRecord, kind: EntryKind, *, is_stored: bool) -> StoreEntry:
        return StoreEntry(
            request_id=record.attempt.request_id,
            aliases=(record.attempt.client_request_id,) if record.attempt.client_request_id else (),
            caller=record.attempt.caller,
            kind=kind,
            attempt_epoch=record.attempt.attempt_epoch,
            data=msgspec.msgpack.encode(record),
            ttl_s=self._ttls_s[kind],
            status=_entry_status(record) if kind == "response" else "open",
            is_stored=is_stored,
        )

    def _record_of(self, stream: LiveStream, *, is_live: bool = False) -> StreamRecord:
        return StreamRecord(
            attempt=stream.request.next_attempt(self._clock.now_s()),
            is_live=is_live,
            logprobs=stream.request.logprobs,
            error=_final_error(stream),
            is_cancelled=stream.request.prepared.request.is_stored and _was_aborted(stream),
        )


def finish_reason_of(stream: LiveStream) -> str:
    """Returns how a stream has ended, for metrics and logs: `stop`, `length`, `abort` (also if the client has
    disconnected), `error`, or `rescheduled` if another attempt continues it."""
    failure, choices = stream.failure, stream.request.output.choices
    if failure is not None:
        if failure.code == ABORTED.code:
            return ABORT
        is_carried_on = failure.code == REPLACED.code or (failure.retryable and stream.request.prepared.is_routed)
        return "rescheduled" if is_carried_on else "error"
    reasons = {choice.finish_reason for choice in choices}
    if PD_RESCHEDULE in reasons:
        return "rescheduled"
    if None in reasons or ABORT in reasons:
        return ABORT
    return "length" if "length" in reasons else "stop"


def _entry_kind(stream: LiveStream) -> EntryKind | None:
    """Returns the kind under which an ended stream is stored. None: its record can no longer be used."""
    prepared, failure = stream.request.prepared, stream.failure
    has_ended = stream.request.output.is_finished
    if _was_aborted(stream):
        return "response" if prepared.request.is_stored else None
    if prepared.request.is_stored and (has_ended or _final_error(stream) is not None):
        return "response"
    has_reader = prepared.is_routed or bool(prepared.request.stream)
    if has_reader and (failure is None or failure.retryable):
        return "ended" if has_ended else "detached"
    return None


def _was_aborted(stream: LiveStream) -> bool:
    return stream.request.output.aborted or (stream.failure is not None and stream.failure.code == ABORTED.code)


def _entry_status(record: StreamRecord) -> EntryStatus:
    """Returns the status of a response's entry. A response that has failed or was given up is still `open`, since a later
    attempt may complete it."""
    if record.is_cancelled:
        return "cancelled"
    finish_reasons = [choice.finish_reason for choice in record.attempt.choices]
    is_complete = (
        bool(finish_reasons)
        and record.error is None
        and None not in finish_reasons
        and PD_RESCHEDULE not in finish_reasons
    )
    return "complete" if is_complete else "open"


def _final_error(stream: LiveStream) -> ErrorInfo | None:
    """Returns the error of a stored response that has failed for good. None if a router may still continue it, or if its
    client may resume its stream."""
    prepared, failure = stream.request.prepared, stream.failure
    if not prepared.request.is_stored:
        return None
    if stream.request.output.rescheduled and not _was_aborted(stream):
        return PD_PREEMPTED
    if prepared.is_routed or failure is None or failure.code in ENDED_ELSEWHERE_CODES:
        return None
    return failure if prepared.request.is_background or not failure.retryable else None


def _longer_record(known: StreamRecord, latest: StreamRecord) -> StreamRecord:
    """Returns the latest record with the longer logprobs of both. If the latest is not finished and has lost tokens of the
    known record, which a client may have received, returns the known one."""
    if latest.is_finished or _num_tokens(latest) >= _num_tokens(known):
        return with_longest_logprobs(latest, known)
    return with_longest_logprobs(known, latest)


def _num_tokens(record: StreamRecord) -> int:
    return sum(len(choice.token_ids) for choice in record.attempt.choices)


def _with_epoch(record: StreamRecord, epoch: int) -> StreamRecord:
    if record.is_finished:
        return record
    return msgspec.structs.replace(
        record, attempt=msgspec.structs.replace(record.attempt, attempt_epoch=min(epoch, MAX_ATTEMPT))
    )


def _may_replace_attempt(epoch: int, caller: str, live: LiveStream) -> bool:
    return epoch > live.attempt.attempt_epoch and caller == live.attempt.caller


def _stale_attempt(attempt: Attempt, epoch: int) -> Conflict:
    problem = f"attempt {attempt.attempt_epoch} at this request comes after attempt {epoch}"
    return Conflict(problem, code="stale_attempt")
