"""The shelf's side of the protocol of `proto.stream_store`: keeps records, and settles who goes on with a stream.

An attempt at a request runs in one api process. Before a later one starts in another, the earlier is told to end, and what
there was of it is put here; of two that claim the same request the higher epoch wins, or who came first. An api process
that says nothing is waited for until a deadline, then passed over: it cannot keep others from going on.

Takes messages and the time, returns messages; does no I/O.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from onward.obs.metrics import Registry
from onward.proto.stream_store import (
    ClaimAttempt,
    ClaimReply,
    Delete,
    DropByName,
    DropReply,
    DropSuperseded,
    EntryKind,
    FindEntry,
    FindReply,
    FromStreamStore,
    LiveStreamReply,
    PutEntry,
    QueryLiveStream,
    ReleaseAttempt,
    ReleaseReply,
    StoreEntry,
    StoreHeartbeat,
    StoreHeartbeatReply,
    ToStreamStore,
)
from onward.stream_store.entries import DEFAULT_BOUNDS, EntryTable, RecordLimits, is_visible_to

PEER_REPLY_TIMEOUT_S = 0.3
"""How long an api process may take to say what it runs. Less than those who ask us wait for us."""
FINALIZE_TIMEOUT_S = 2.0
"""How long whoever settles something may take to put it. An api process may wait half a second for each answer of ours."""
EXPIRE_EVERY_S = 1.0
MAX_PENDING_QUERIES = 4096

OutgoingMessages = list[tuple[str, FromStreamStore]]
"""To whom, and what."""


@dataclass(slots=True, eq=False)
class PendingQuery:
    """Something that others must be asked about first."""

    asker: str
    query: FindEntry | ClaimAttempt
    deadline_at_s: float
    waiting_for: set[str]
    best: StoreEntry | None = None


class StreamStoreCore:
    def __init__(self, bounds: Mapping[EntryKind, RecordLimits] = DEFAULT_BOUNDS) -> None:
        self.entries = EntryTable(bounds)
        self.registry = Registry()
        self._apis: set[str] = set()
        self._questions: dict[int, PendingQuery] = {}
        self._claims: dict[str, int] = {}
        """Questions about claims, by the id of the request."""
        self._finalizing: dict[str, tuple[int, float]] = {}
        """Requests that somebody has ended and will put: under which epoch, and until when they are waited for."""
        self._numbers = itertools.count(1)
        self._next_expiry_s = 0.0
        self._evicted = self.registry.counter("onward_shelf_evicted_total", "Records that made room for others")
        self._register_metrics(self.registry)

    @property
    def num_pending_queries(self) -> int:
        """That somebody waits for."""
        return len(self._questions)

    def receive(self, api: str, message: ToStreamStore, now_s: float) -> OutgoingMessages:
        self._apis.add(api)
        match message:
            case StoreHeartbeat():
                return [(api, StoreHeartbeatReply(message.num_bytes))]
            case PutEntry():
                self._put(message.entry, now_s)
            case DropSuperseded():
                self.entries.drop_superseded(message.request_id, message.attempt_epoch, message.caller, now_s)
            case FindEntry():
                return self._find(api, message, now_s)
            case ClaimAttempt():
                return self._claim(api, message, now_s)
            case DropByName():
                meant = message.names, message.drop_all, message.caller, now_s
                dropped = sorted(self.entries.drop_by_name(*meant))
                return [(api, DropReply(message.query_id, dropped, self.entries.open_named(*meant)))]
            case Delete():
                was_there = self.entries.delete(message.record_id, message.caller, now_s)
                return [(api, DropReply(message.query_id, [message.record_id] if was_there else []))]
            case LiveStreamReply():
                return self._on_live_stream(api, message, now_s)
            case ReleaseReply():
                return self._released(api, message, now_s)
        return []

    def api_gone(self, api: str, now_s: float) -> OutgoingMessages:
        """It is dead. What it had put stays; what it ran is lost."""
        self._apis.discard(api)
        for number, question in list(self._questions.items()):
            if question.asker == api:
                self._close(number)
        return self._stop_waiting_for(api, list(self._questions), now_s)

    def undelivered(self, api: str, message: FromStreamStore, now_s: float) -> OutgoingMessages:
        """It could not be told this."""
        return (
            self._stop_waiting_for(api, [message.query_id], now_s)
            if isinstance(message, QueryLiveStream | ReleaseAttempt)
            else []
        )

    def tick(self, now_s: float) -> OutgoingMessages:
        if now_s >= self._next_expiry_s:
            self._next_expiry_s = now_s + EXPIRE_EVERY_S
            self.entries.expire(now_s)
            self._finalizing = {name: one for name, one in self._finalizing.items() if one[1] > now_s}
        late = [number for number, question in self._questions.items() if question.deadline_at_s <= now_s]
        return [letter for number in late for letter in self._answer(number, now_s)]

    def _put(self, record: StoreEntry, now_s: float) -> None:
        self._evicted.inc(by=self.entries.put(record, now_s))

    def _find(self, api: str, ask: FindEntry, now_s: float) -> OutgoingMessages:
        record = self._stored_entry(ask, now_s)
        if record is not None and record.status == "deleted":
            return [(api, FindReply(ask.query_id, None))]
        if record is not None and (record.status != "open" or 0 < ask.attempt_epoch <= record.attempt_epoch):
            return [(api, FindReply(ask.query_id, record))]
        return self._ask_others(api, ask, now_s)

    def _claim(self, api: str, ask: ClaimAttempt, now_s: float) -> OutgoingMessages:
        kept = self.entries.get(ask.request_id, now_s)
        if kept is not None and kept.status in ("cancelled", "deleted"):
            return [(api, ClaimReply(ask.query_id, max(kept.attempt_epoch, ask.attempt_epoch)))]
        settled_epoch = self._finalized_epoch(ask.request_id, now_s)
        if settled_epoch is not None and settled_epoch >= ask.attempt_epoch:
            return [(api, ClaimReply(ask.query_id, settled_epoch))]
        letters: OutgoingMessages = []
        if (number := self._claims.get(ask.request_id)) is not None:
            rival = self._questions[number]
            if rival.query.attempt_epoch >= ask.attempt_epoch:
                return [(api, ClaimReply(ask.query_id, rival.query.attempt_epoch))]
            self._close(number)
            letters = [(rival.asker, ClaimReply(rival.query.query_id, ask.attempt_epoch))]
        return letters + self._ask_others(api, ask, now_s)

    def _finalized_epoch(self, record_id: str, now_s: float) -> int | None:
        """Of a response that was kept, or will be at once, as of this epoch: an earlier attempt knows nothing of that."""
        epoch, until_s = self._finalizing.get(record_id, (0, 0.0))
        if until_s > now_s:
            return epoch
        kept = self.entries.get(record_id, now_s)
        return kept.attempt_epoch if kept is not None and kept.kind == "response" else None

    def _ask_others(self, api: str, ask: FindEntry | ClaimAttempt, now_s: float) -> OutgoingMessages:
        others = self._apis - {api}
        if len(self._questions) >= MAX_PENDING_QUERIES:
            others = set()
        number = next(self._numbers)
        self._questions[number] = PendingQuery(api, ask, now_s + PEER_REPLY_TIMEOUT_S, others)
        if isinstance(ask, ClaimAttempt):
            self._claims[ask.request_id] = number
        if not others:
            return self._answer(number, now_s)
        message = _query_for_others(number, ask)
        return [(other, message) for other in sorted(others)]

    def _on_live_stream(self, api: str, message: LiveStreamReply, now_s: float) -> OutgoingMessages:
        question = self._questions.get(message.query_id)
        if question is None or api not in question.waiting_for:
            return []
        assert isinstance(question.query, FindEntry), "it was asked to show it"
        if message.entry is not None and is_visible_to(message.entry, question.query.caller):
            question.best = _later(question.best, message.entry)
        is_enough = question.best is not None and 0 < question.query.attempt_epoch <= question.best.attempt_epoch
        return (
            self._answer(message.query_id, now_s)
            if is_enough
            else self._stop_waiting_for(api, [message.query_id], now_s)
        )

    def _released(self, api: str, message: ReleaseReply, now_s: float) -> OutgoingMessages:
        question = self._questions.get(message.query_id)
        if question is None or api not in question.waiting_for:
            return []  # whoever claimed it has gone on without
        if message.entry is not None:
            self._put(message.entry, now_s)
        if message.blocking_epoch is not None:
            self._close(message.query_id)
            return [(question.asker, ClaimReply(question.query.query_id, message.blocking_epoch))]
        return self._stop_waiting_for(api, [message.query_id], now_s)

    def _stop_waiting_for(self, api: str, numbers: list[int], now_s: float) -> OutgoingMessages:
        """These questions wait for that one no longer."""
        letters: OutgoingMessages = []
        for number in numbers:
            question = self._questions.get(number)
            if question is not None and api in question.waiting_for:
                question.waiting_for.discard(api)
                letters += [] if question.waiting_for else self._answer(number, now_s)
        return letters

    def _answer(self, number: int, now_s: float) -> OutgoingMessages:
        """With what is known by now. Whoever has just left a stream has put it before it could say that it has none."""
        question = self._close(number)
        ask = question.query
        if isinstance(ask, ClaimAttempt):
            if ask.to_finalize and len(self._finalizing) < MAX_PENDING_QUERIES:
                self._finalizing[ask.request_id] = ask.attempt_epoch, now_s + FINALIZE_TIMEOUT_S
            return [(question.asker, ClaimReply(ask.query_id))]
        own = self._stored_entry(ask, now_s)
        if own is not None and own.status == "deleted":
            return [(question.asker, FindReply(ask.query_id, None))]
        return [(question.asker, FindReply(ask.query_id, own if question.best is None else _later(own, question.best)))]

    def _close(self, number: int) -> PendingQuery:
        question = self._questions.pop(number)
        if self._claims.get(question.query.request_id) == number:
            del self._claims[question.query.request_id]
        return question

    def _stored_entry(self, ask: FindEntry, now_s: float) -> StoreEntry | None:
        record = self.entries.get(ask.request_id, now_s)
        return record if record is not None and is_visible_to(record, ask.caller) else None

    def _register_metrics(self, registry: Registry) -> None:
        records = self.entries
        registry.gauge(
            "onward_shelf_records",
            "Records of streams whose client has gone",
            ["kind"],
            lambda: {(kind,): float(count) for kind, count in records.count().items()},
        )
        registry.gauge(
            "onward_shelf_bytes",
            "Their size",
            ["kind"],
            lambda: {(kind,): float(count) for kind, count in records.num_bytes().items()},
        )


def _query_for_others(number: int, ask: FindEntry | ClaimAttempt) -> FromStreamStore:
    if isinstance(ask, ClaimAttempt):
        return ReleaseAttempt(number, ask.request_id, ask.attempt_epoch, ask.caller)
    return QueryLiveStream(number, ask.request_id)


def _later(first: StoreEntry | None, second: StoreEntry) -> StoreEntry:
    return first if first is not None and first.attempt_epoch > second.attempt_epoch else second
