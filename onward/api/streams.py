"""The streams of this process by their ids: those that run, and records of those whose client has gone.

A request runs once: a later attempt at it ends the earlier one. A record is what it takes to go on, and is kept for a
while, within bounds; an abort drops it. With several api processes each has its own. Knows nothing of HTTP.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from onward.api.engine_client import EngineClient
from onward.api.jobs import Job
from onward.clock import Clock
from onward.errors import Conflict
from onward.proto.request import ErrorInfo
from onward.proto.router import Attempt, Record
from onward.web.failures import RequestFailed

MAX_RECORDS = 1024
MAX_RECORD_BYTES = 64 << 20
RECORD_OVERHEAD_BYTES = 512
TOKEN_BYTES = 36
"""Of an id in a list."""

DRAINING = ErrorInfo("draining", "this instance is being drained; try another one", 503, True, retry_after_s=1.0)
REPLACED = ErrorInfo("stale_attempt", "a later attempt at this request has taken its place", 409)


@dataclass(slots=True, eq=False)
class Stream:
    """One that runs."""

    job: Job
    failure: ErrorInfo | None = None
    """Why it has ended, if not by itself."""

    @property
    def attempt(self) -> Attempt:
        return self.job.prepared.attempt


class Shelf:
    """Records, oldest first. The bounds are kept by forgetting the oldest."""

    def __init__(self, ttl_s: float, max_records: int, max_bytes: int) -> None:
        self._ttl_s = ttl_s
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._records: OrderedDict[str, tuple[Record, float]] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def put(self, record: Record, now_s: float) -> None:
        self.drop(record.attempt.request_id)
        self._records[record.attempt.request_id] = record, now_s + self._ttl_s
        self._num_bytes += _size(record)
        self.expire(now_s)
        while len(self._records) > self._max_records or self._num_bytes > self._max_bytes:
            self.drop(next(iter(self._records)))

    def get(self, request_id: str, now_s: float) -> Record | None:
        self.expire(now_s)
        record, _ = self._records.get(request_id, (None, 0.0))
        return record

    def drop(self, request_id: str) -> None:
        record, _ = self._records.pop(request_id, (None, 0.0))
        if record is not None:
            self._num_bytes -= _size(record)

    def drop_before(self, attempt: Attempt) -> None:
        record, _ = self._records.get(attempt.request_id, (None, 0.0))
        if record is not None and record.attempt.epoch <= attempt.epoch:
            self.drop(attempt.request_id)

    def drop_named(self, names: Collection[str], everything: bool) -> set[str]:
        """Which of these names were here; or, with everything, the ids."""
        dropped: set[str] = set()
        for attempt in [record.attempt for record, _ in self._records.values()]:
            own_names = {attempt.request_id, attempt.label} - {""}
            if everything or not own_names.isdisjoint(names):
                self.drop(attempt.request_id)
                dropped |= {attempt.request_id} if everything else own_names.intersection(names)
        return dropped

    def expire(self, now_s: float) -> None:
        while self._records:
            request_id, (_, until_s) = next(iter(self._records.items()))
            if until_s > now_s:
                break
            self.drop(request_id)


class Streams:
    def __init__(self, client: EngineClient, clock: Clock, ttl_s: float) -> None:
        self.is_draining = False
        self._client = client
        self._clock = clock
        self._live: dict[str, Stream] = {}
        # Streams that were written to their end, which their client may not have read, push out none that was cut.
        self._detached = Shelf(ttl_s, MAX_RECORDS // 2, MAX_RECORD_BYTES // 2)
        self._ended = Shelf(ttl_s, MAX_RECORDS // 2, MAX_RECORD_BYTES // 2)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def check(self, attempt: Attempt) -> None:
        """Refuses an attempt that another one has overtaken."""
        live = self._live.get(attempt.request_id)
        if live is not None and attempt.epoch <= live.attempt.epoch:
            problem = f"attempt {attempt.epoch} at this request comes after attempt {live.attempt.epoch}"
            raise Conflict(problem, code="stale_attempt")

    def run(self, prepare: Callable[[], Job], attempt: Attempt) -> Stream:
        """Starts it in place of an earlier attempt, of which nothing is left."""
        self.check(attempt)
        earlier = self._live.pop(attempt.request_id, None)
        if earlier is not None:
            # Should the new one not start after all, the work so far is not lost.
            self._detached.put(self._record_of(earlier), self._clock.now_s())
            self._end(earlier, REPLACED)
            self._release(earlier)
        stream = self._live[attempt.request_id] = Stream(prepare())
        self._forget(attempt)
        return stream

    def leave(self, stream: Stream) -> None:
        """It has ended, or its client is gone. The work stops; what was made stays for a while, if it can be used."""
        attempt, job = stream.attempt, stream.job
        if self._live.get(attempt.request_id) is not stream:
            return
        del self._live[attempt.request_id]
        self._release(stream)
        if job.mailbox is not None and (error := job.answer.take(job.mailbox.left_over()).error) is not None:
            stream.failure = stream.failure or error
        has_reader = job.prepared.is_routed or bool(job.prepared.request.stream)
        later = self._record(attempt.request_id)
        if later is not None and later.attempt.epoch > attempt.epoch:
            return
        if has_reader and (stream.failure is None or stream.failure.retryable):
            shelf = self._ended if job.answer.finished else self._detached
            shelf.put(self._record_of(stream), self._clock.now_s())

    def find(self, request_id: str) -> Record | None:
        live = self._live.get(request_id)
        return self._record(request_id) if live is None else self._record_of(live)

    def drop(self, names: Collection[str], everything: bool = False) -> set[str]:
        """Forgets the records that go by these names; returns those names that were known."""
        return self._detached.drop_named(names, everything) | self._ended.drop_named(names, everything)

    def drain(self) -> None:
        """Nothing new, and what a router sent goes on elsewhere, from the tokens so far. Clients' own streams may end."""
        self.is_draining = True
        for stream in list(self._live.values()):
            if stream.job.prepared.is_routed:
                self._end(stream, DRAINING)

    def check_open(self) -> None:
        if self.is_draining:
            raise RequestFailed(DRAINING)

    def expire(self) -> None:
        for shelf in (self._detached, self._ended):
            shelf.expire(self._clock.now_s())

    def _end(self, stream: Stream, error: ErrorInfo) -> None:
        stream.failure = stream.failure or error
        if stream.job.mailbox is not None:
            self._client.fail(stream.job.mailbox, error)

    def _release(self, stream: Stream) -> None:
        if stream.job.mailbox is not None:
            self._client.abort(stream.job.mailbox)

    def _record(self, request_id: str) -> Record | None:
        now_s = self._clock.now_s()
        return self._detached.get(request_id, now_s) or self._ended.get(request_id, now_s)

    def _record_of(self, stream: Stream) -> Record:
        return Record(attempt=stream.job.attempt_from_here(self._clock.now_s()))

    def _forget(self, attempt: Attempt) -> None:
        """What earlier attempts have left."""
        for shelf in (self._detached, self._ended):
            shelf.drop_before(attempt)


def _size(record: Record) -> int:
    attempt = record.attempt
    num_tokens = sum(len(choice.token_ids) for choice in attempt.choices) + len(attempt.prompt_token_ids or ())
    return RECORD_OVERHEAD_BYTES + len(attempt.body) + TOKEN_BYTES * num_tokens
