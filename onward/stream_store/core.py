"""The stream store's side of the protocol of `proto.stream_store`: keeps records, and decides which api process runs a
stream.

An attempt at a request runs in one api process. Before a later attempt starts in another one, the store ends the
earlier attempt and keeps its output so far. Of two claims for the same request, the one with the higher epoch wins; if
the epochs are equal, the first one wins. An api process that does not answer is skipped after a deadline, so that it
cannot block others. Takes messages and the time, returns messages; does no I/O.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from onward.obs.metrics import Registry
from onward.proto.field_types import MAX_SERIAL
from onward.proto.stream_store import (
    ClaimAttempt,
    ClaimReply,
    Delete,
    DropByName,
    DropReply,
    DropSuperseded,
    EntryKind,
    EntryStatus,
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
"""How long an api process may take to report what it runs. It is shorter than the timeout of the api processes that
query the store."""
FINALIZE_TIMEOUT_S = 2.0
"""How long an api process that has claimed the end of a request may take to store it. Each reply of the store may take
half a second."""
EXPIRE_EVERY_S = 1.0
MAX_PENDING_QUERIES = 4096
ENDED_FOR_GOOD: tuple[EntryStatus, ...] = ("cancelled", "deleted")
"""No attempt at a response with such a status starts, and a running one is ended."""

OutgoingMessages = list[tuple[str, FromStreamStore]]
"""Pairs of receiver and message."""


@dataclass(slots=True, eq=False)
class PendingQuery:
    """A query that is answered when other api processes have replied, or at the deadline."""

    asker: str
    query: FindEntry | ClaimAttempt
    deadline_at_s: float
    waiting_for: set[str]
    best: StoreEntry | None = None


class StreamStoreCore:
    def __init__(self, limits: Mapping[EntryKind, RecordLimits] = DEFAULT_BOUNDS) -> None:
        self.entries = EntryTable(limits)
        self.registry = Registry()
        self._apis: set[str] = set()
        self._pending: dict[int, PendingQuery] = {}
        self._claims: dict[str, int] = {}
        """Ids of pending claims, by request id."""
        self._finalizing: dict[str, tuple[int, float]] = {}
        """Requests whose end an api process has claimed and will store, each with the epoch and a deadline."""
        self._pending_ids = itertools.count(1)
        self._next_expiry_s = 0.0
        self._evicted = self.registry.counter(
            "onward_stream_store_evicted_total", "Records evicted from the stream store to make room for others"
        )
        self._register_metrics(self.registry)

    @property
    def num_pending_queries(self) -> int:
        """Number of queries that an api process waits for."""
        return len(self._pending)

    def receive(self, api_id: str, message: ToStreamStore, now_s: float) -> OutgoingMessages:
        self._apis.add(api_id)
        match message:
            case StoreHeartbeat():
                return [(api_id, StoreHeartbeatReply(message.num_bytes))]
            case PutEntry():
                self._put(message.entry, now_s)
                # An api process that did not answer a claim in time may still run it.
                if message.entry.status == "cancelled":
                    return self._release_ended(message.entry.request_id, self._apis - {api_id}, now_s)
            case DropSuperseded():
                self.entries.drop_superseded(message.request_id, message.attempt_epoch, message.caller, now_s)
                # The attempt runs by now. Its response may have ended after the claim was granted, or without a claim.
                return self._release_ended(message.request_id, {api_id}, now_s)
            case FindEntry():
                return self._find(api_id, message, now_s)
            case ClaimAttempt():
                return self._claim(api_id, message, now_s)
            case DropByName():
                selection = message.names, message.drop_all, message.caller, now_s
                dropped = sorted(self.entries.drop_by_name(*selection))
                return [(api_id, DropReply(message.query_id, dropped, self.entries.open_named(*selection)))]
            case Delete():
                existed = self.entries.delete(message.record_id, message.caller, now_s)
                return [(api_id, DropReply(message.query_id, [message.record_id] if existed else []))]
            case LiveStreamReply():
                return self._on_live_stream(api_id, message, now_s)
            case ReleaseReply():
                return self._on_released(api_id, message, now_s)
        return []

    def api_gone(self, api_id: str, now_s: float) -> OutgoingMessages:
        """Handles the death of an api process. The records that it has stored stay; streams that it ran are lost."""
        self._apis.discard(api_id)
        for pending_id, pending in list(self._pending.items()):
            if pending.asker == api_id:
                self._close(pending_id)
        return self._stop_waiting_for(api_id, list(self._pending), now_s)

    def undelivered(self, api_id: str, message: FromStreamStore, now_s: float) -> OutgoingMessages:
        """Handles a message that could not be delivered to this api process."""
        return (
            self._stop_waiting_for(api_id, [message.query_id], now_s)
            if isinstance(message, QueryLiveStream | ReleaseAttempt)
            else []
        )

    def tick(self, now_s: float) -> OutgoingMessages:
        if now_s >= self._next_expiry_s:
            self._next_expiry_s = now_s + EXPIRE_EVERY_S
            self.entries.expire(now_s)
            self._finalizing = {
                name: finalizing for name, finalizing in self._finalizing.items() if finalizing[1] > now_s
            }
        expired = [pending_id for pending_id, pending in self._pending.items() if pending.deadline_at_s <= now_s]
        return [message for pending_id in expired for message in self._reply(pending_id, now_s)]

    def _put(self, entry: StoreEntry, now_s: float) -> None:
        self._evicted.inc(by=self.entries.put(entry, now_s))

    def _find(self, api_id: str, query: FindEntry, now_s: float) -> OutgoingMessages:
        entry = self._stored_entry(query, now_s)
        if entry is not None and entry.status == "deleted":
            return [(api_id, FindReply(query.query_id, None))]
        if entry is not None and (entry.status != "open" or 0 < query.attempt_epoch <= entry.attempt_epoch):
            return [(api_id, FindReply(query.query_id, entry))]
        return self._query_others(api_id, query, now_s)

    def _claim(self, api_id: str, query: ClaimAttempt, now_s: float) -> OutgoingMessages:
        if (blocking_epoch := self._blocking_epoch(query, now_s)) is not None:
            return [(api_id, ClaimReply(query.query_id, blocking_epoch))]
        messages: OutgoingMessages = []
        if (pending_id := self._claims.get(query.request_id)) is not None:
            rival = self._pending[pending_id]
            if rival.query.attempt_epoch >= query.attempt_epoch:
                return [(api_id, ClaimReply(query.query_id, rival.query.attempt_epoch))]
            self._close(pending_id)
            messages = [(rival.asker, ClaimReply(rival.query.query_id, query.attempt_epoch))]
        return messages + self._query_others(api_id, query, now_s)

    def _blocking_epoch(self, query: ClaimAttempt, now_s: float) -> int | None:
        """Returns the epoch that blocks a claim, or None if the claim may be granted. Called when the claim arrives and
        again before it is granted, because the response may end while other api processes are queried."""
        entry = self.entries.get(query.request_id, now_s)
        if entry is not None and entry.status in ENDED_FOR_GOOD:
            return max(entry.attempt_epoch, query.attempt_epoch)
        epoch = self._finalized_epoch(query, now_s)
        return epoch if epoch is not None and epoch >= query.attempt_epoch else None

    def _finalized_epoch(self, query: ClaimAttempt, now_s: float) -> int | None:
        """Returns the epoch under which a response was stored or is being finalized, or None. An attempt with this
        epoch or a lower one does not know of that output. While a response is being finalized, no attempt at it starts,
        whatever its epoch."""
        epoch, until_s = self._finalizing.get(query.request_id, (0, 0.0))
        if until_s > now_s:
            return epoch if query.to_finalize else max(epoch, query.attempt_epoch)
        entry = self.entries.get(query.request_id, now_s)
        return entry.attempt_epoch if entry is not None and entry.kind == "response" else None

    def _release_ended(self, request_id: str, api_ids: set[str], now_s: float) -> OutgoingMessages:
        """Ends attempts at a response that is cancelled or deleted. The replies are ignored, because no query waits for
        them."""
        entry = self.entries.get(request_id, now_s)
        if entry is None or entry.status not in ENDED_FOR_GOOD:
            return []
        release = ReleaseAttempt(next(self._pending_ids), request_id, MAX_SERIAL, entry.caller)
        return [(api_id, release) for api_id in sorted(api_ids)]

    def _query_others(self, api_id: str, query: FindEntry | ClaimAttempt, now_s: float) -> OutgoingMessages:
        others = self._apis - {api_id}
        if len(self._pending) >= MAX_PENDING_QUERIES:
            others = set()
        pending_id = next(self._pending_ids)
        self._pending[pending_id] = PendingQuery(api_id, query, now_s + PEER_REPLY_TIMEOUT_S, others)
        if isinstance(query, ClaimAttempt):
            self._claims[query.request_id] = pending_id
        if not others:
            return self._reply(pending_id, now_s)
        message = _query_for_others(pending_id, query)
        return [(other, message) for other in sorted(others)]

    def _on_live_stream(self, api_id: str, message: LiveStreamReply, now_s: float) -> OutgoingMessages:
        pending = self._pending.get(message.query_id)
        if pending is None or api_id not in pending.waiting_for:
            return []
        assert isinstance(pending.query, FindEntry), "it was asked to show it"
        if message.entry is not None and is_visible_to(message.entry, pending.query.caller):
            pending.best = _later(pending.best, message.entry)
        is_enough = pending.best is not None and 0 < pending.query.attempt_epoch <= pending.best.attempt_epoch
        return (
            self._reply(message.query_id, now_s)
            if is_enough
            else self._stop_waiting_for(api_id, [message.query_id], now_s)
        )

    def _on_released(self, api_id: str, message: ReleaseReply, now_s: float) -> OutgoingMessages:
        pending = self._pending.get(message.query_id)
        if pending is None or api_id not in pending.waiting_for:
            return []  # the api process that claimed it has continued without a reply
        if message.entry is not None:
            self._put(message.entry, now_s)
        if message.blocking_epoch is not None:
            self._close(message.query_id)
            return [(pending.asker, ClaimReply(pending.query.query_id, message.blocking_epoch))]
        return self._stop_waiting_for(api_id, [message.query_id], now_s)

    def _stop_waiting_for(self, api_id: str, pending_ids: list[int], now_s: float) -> OutgoingMessages:
        """Removes the api process from these pending queries, and answers those that wait for no other one."""
        messages: OutgoingMessages = []
        for pending_id in pending_ids:
            pending = self._pending.get(pending_id)
            if pending is not None and api_id in pending.waiting_for:
                pending.waiting_for.discard(api_id)
                messages += [] if pending.waiting_for else self._reply(pending_id, now_s)
        return messages

    def _reply(self, pending_id: int, now_s: float) -> OutgoingMessages:
        """Answers a query from the stored records and the replies so far. No record is missed: an api process that has
        just left a stream stored its record before it reported that it does not run the stream."""
        pending = self._close(pending_id)
        query = pending.query
        if isinstance(query, ClaimAttempt):
            if (blocking_epoch := self._blocking_epoch(query, now_s)) is not None:
                return [(pending.asker, ClaimReply(query.query_id, blocking_epoch))]
            if query.to_finalize and len(self._finalizing) < MAX_PENDING_QUERIES:
                self._finalizing[query.request_id] = query.attempt_epoch, now_s + FINALIZE_TIMEOUT_S
            return [(pending.asker, ClaimReply(query.query_id))]
        stored = self._stored_entry(query, now_s)
        if stored is not None and stored.status == "deleted":
            return [(pending.asker, FindReply(query.query_id, None))]
        return [
            (pending.asker, FindReply(query.query_id, stored if pending.best is None else _later(stored, pending.best)))
        ]

    def _close(self, pending_id: int) -> PendingQuery:
        pending = self._pending.pop(pending_id)
        if self._claims.get(pending.query.request_id) == pending_id:
            del self._claims[pending.query.request_id]
        return pending

    def _stored_entry(self, query: FindEntry, now_s: float) -> StoreEntry | None:
        entry = self.entries.get(query.request_id, now_s)
        return entry if entry is not None and is_visible_to(entry, query.caller) else None

    def _register_metrics(self, registry: Registry) -> None:
        entries = self.entries
        registry.gauge(
            "onward_stream_store_records",
            "Records in the stream store, by kind",
            ["kind"],
            lambda: {(kind,): float(count) for kind, count in entries.count().items()},
        )
        registry.gauge(
            "onward_stream_store_bytes",
            "Bytes of the records in the stream store, by kind",
            ["kind"],
            lambda: {(kind,): float(count) for kind, count in entries.num_bytes().items()},
        )


def _query_for_others(pending_id: int, query: FindEntry | ClaimAttempt) -> FromStreamStore:
    if isinstance(query, ClaimAttempt):
        return ReleaseAttempt(pending_id, query.request_id, query.attempt_epoch, query.caller)
    return QueryLiveStream(pending_id, query.request_id)


def _later(first: StoreEntry | None, second: StoreEntry) -> StoreEntry:
    return first if first is not None and first.attempt_epoch > second.attempt_epoch else second
