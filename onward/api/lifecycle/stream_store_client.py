"""An api process's client of the stream store: stores records without waiting, queries with a deadline, answers queries.

A stream store that is unreachable, silent or slow costs records and never delays a request. Without a reply in time a
record counts as unknown, unless the calling code cannot continue without it. Does not look into records.
"""

import asyncio
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from onward import log
from onward.errors import RETRY_SOON_S, Unavailable
from onward.fair_share import within_fair_share
from onward.obs.metrics import Registry
from onward.proto.control import StreamStoreGone, StreamStoreUp
from onward.proto.stream_store import (
    ClaimAttempt,
    ClaimReply,
    Delete,
    DropByName,
    DropReply,
    DropSuperseded,
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

REPLY_TIMEOUT_S = 0.5
HEARTBEAT_INTERVAL_S = 1.0
MAX_OPEN_QUERIES = 256
DROP_TRIES = 3
"""Tries to drop records by name. An abort must not be lost."""
MAX_UNACKNOWLEDGED_BYTES = 32 << 20
"""Maximum size of all records that were sent and not acknowledged, over all callers. A record that exceeds its caller's
share (`fair_share.within_fair_share`) is not stored."""
HEARTBEAT_AFTER_BYTES = 4 << 20
"""After this many bytes since the last heartbeat the next one is sent at once."""

_logger = logging.getLogger(__name__)


class StreamStoreTransport(Protocol):
    """The interface of `transport.stream_store_sockets.StreamStoreClientSocket`."""

    def send(self, message: ToStreamStore) -> bool: ...
    async def receive(self) -> FromStreamStore: ...
    def close(self) -> None: ...


class LiveStreamSource(Protocol):
    """The live streams of this process, for queries of the stream store."""

    def live_entry(self, record_id: str) -> StoreEntry | None: ...
    def release_attempt(self, record_id: str, epoch: int, caller: str) -> StoreEntry | int | None:
        """Ends the stream's attempt in this process if it is earlier than `epoch` and has the same caller, and
        returns its entry. Otherwise returns that attempt's epoch. Returns None if none runs here."""
        ...


@dataclass(slots=True, eq=False)
class PendingClaim:
    """A claim for an attempt that does not run yet."""

    request_id: str
    attempt_epoch: int
    to_finalize: bool = False
    is_granted: bool = False
    superseded_by: int | None = None


class StreamStoreClient:
    def __init__(
        self, connect: Callable[[str], StreamStoreTransport], on_fault: Callable[[], None], registry: Registry
    ) -> None:
        self._connect, self._on_fault = connect, on_fault
        self._lost = registry.counter(
            "onward_stream_store_lost_total", "Records that were not stored: the stream store was down, or too slow"
        )
        self._source: LiveStreamSource | None = None
        self._transport: StreamStoreTransport | None = None
        self._was_connected = asyncio.Event()
        """Set by the first stream store. Until then the process has just started, so queries wait for the connection."""
        self._store_incarnation = ""
        self._reading: asyncio.Task[None] | None = None
        self._heartbeat_timer: asyncio.TimerHandle | None = None
        self._query_ids = itertools.count(1)
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._pending_claims: dict[int, PendingClaim] = {}
        """Claims by their query id."""
        self._bytes_put = self._bytes_at_heartbeat = self._bytes_acknowledged = 0
        """Bytes sent, bytes sent at the last heartbeat, and bytes that are known to have arrived."""
        self._unacknowledged: deque[tuple[int, str, int]] = deque()
        """For each unacknowledged record: `_bytes_put` after it was sent, its caller, and its own bytes."""
        self._unacknowledged_bytes: Counter[str] = Counter()
        """Unacknowledged bytes by caller."""

    def attach(self, source: LiveStreamSource) -> None:
        self._source = source

    def store_up(self, message: StreamStoreUp) -> None:
        self._disconnect()
        self._store_incarnation, self._transport = message.incarnation, self._connect(message.address)
        self._was_connected.set()
        self._bytes_put = self._bytes_at_heartbeat = self._bytes_acknowledged = 0
        self._unacknowledged.clear()
        self._unacknowledged_bytes.clear()
        self._reading = asyncio.get_running_loop().create_task(self._read_loop(self._transport))
        self._reading.add_done_callback(self._read_ended)
        self._send_heartbeats()

    def store_gone(self, message: StreamStoreGone) -> None:
        if message.incarnation == self._store_incarnation:
            _logger.warning(log.event("stream store gone", incarnation=message.incarnation))
            self._disconnect()

    def put(self, entry: StoreEntry) -> None:
        """Sends a record without waiting for a reply. The record is lost, and counted, if the caller's share is used up or
        the message cannot be sent."""
        num_bytes, caller = len(entry.data), entry.caller
        own_bytes = self._unacknowledged_bytes[caller]
        other_bytes = self._unacknowledged_bytes.total() - own_bytes
        has_room = within_fair_share(num_bytes, own_bytes, other_bytes, MAX_UNACKNOWLEDGED_BYTES, is_named=bool(caller))
        if not has_room or not self._send(PutEntry(entry)):
            self._lost.inc()
            return
        self._bytes_put += num_bytes
        self._unacknowledged.append((self._bytes_put, caller, num_bytes))
        self._unacknowledged_bytes[caller] += num_bytes
        if self._bytes_put - self._bytes_at_heartbeat > HEARTBEAT_AFTER_BYTES:
            self._send_heartbeat()

    def drop_superseded(self, record_id: str, epoch: int, caller: str) -> None:
        self._send(DropSuperseded(record_id, epoch, caller))

    async def find(
        self, record_id: str, epoch: int, caller: str | None, *, require_reply: bool = False
    ) -> StoreEntry | None:
        """Returns the entry with this id, or None if it is unknown. `require_reply`: raises `Unavailable` without a reply
        in time, which otherwise counts as unknown."""
        reply = await self._query(FindEntry(next(self._query_ids), record_id, epoch, caller))
        if isinstance(reply, FindReply):
            return reply.entry
        if require_reply:
            raise Unavailable(
                f"the stream store is not reachable; retry in {RETRY_SOON_S:g} s", retry_after_s=RETRY_SOON_S
            )
        return None

    async def claim(self, record_id: str, epoch: int, caller: str, *, to_finalize: bool = False) -> int | None:
        """Claims a stream for a later attempt, which ends attempts in other processes. Returns the epoch of an attempt that
        is not earlier. None: this attempt may start, and must do so before the task awaits anything else. `to_finalize`:
        no attempt starts, but the end of the stream is stored."""
        query = ClaimAttempt(next(self._query_ids), record_id, epoch, caller, to_finalize)
        claim = self._pending_claims[query.query_id] = PendingClaim(record_id, epoch, to_finalize)
        try:
            reply = await self._query(query)
        finally:
            del self._pending_claims[query.query_id]
        if isinstance(reply, ClaimReply) and reply.blocking_epoch is not None:
            return reply.blocking_epoch
        return claim.superseded_by

    def supersede_claims(self, record_id: str) -> None:
        """Prevents the start of attempts that wait for their claim in this process, even if the stream store grants it."""
        for claim in self._pending_claims.values():
            if claim.request_id == record_id and not claim.to_finalize:
                claim.superseded_by = claim.attempt_epoch

    async def drop_by_name(self, names: Collection[str], drop_all: bool, caller: str | None) -> DropReply:
        return await self._drop(lambda query_id: DropByName(query_id, list(names), drop_all, caller))

    async def delete(self, record_id: str, caller: str) -> None:
        await self._drop(lambda query_id: Delete(query_id, record_id, caller))

    async def _drop(self, make_query: Callable[[int], DropByName | Delete]) -> DropReply:
        """Sends the query up to `DROP_TRIES` times. Without a stream store there is nothing to drop. Raises `Unavailable`
        if the stream store does not reply."""
        for _ in range(DROP_TRIES):
            if self._transport is None:
                break
            reply = await self._query(make_query(next(self._query_ids)))
            if isinstance(reply, DropReply):
                return reply
        if self._transport is None:
            return DropReply(0, [])
        raise Unavailable("records of streams could not be dropped; ask again", retry_after_s=RETRY_SOON_S)

    async def close(self) -> None:
        reading = self._reading
        self._disconnect()
        if reading is not None:
            await asyncio.wait([reading])

    async def _query(
        self, query: FindEntry | ClaimAttempt | DropByName | Delete
    ) -> FindReply | ClaimReply | DropReply | None:
        """Returns the reply. None: there was no reply in time, or there can be none."""
        if len(self._queries) >= MAX_OPEN_QUERIES:
            return None
        if not await self._wait_first_connection():
            return None
        reply = self._queries[query.query_id] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(reply, REPLY_TIMEOUT_S) if self._send(query) else None
        except TimeoutError:
            return None
        finally:
            del self._queries[query.query_id]

    async def _wait_first_connection(self) -> bool:
        if self._was_connected.is_set():
            return True
        try:
            await asyncio.wait_for(self._was_connected.wait(), REPLY_TIMEOUT_S)
        except TimeoutError:
            return False
        return True

    def _send(self, message: ToStreamStore) -> bool:
        return self._transport is not None and self._transport.send(message)

    async def _read_loop(self, transport: StreamStoreTransport) -> None:
        while True:
            self._on_message(await transport.receive())

    def _on_message(self, message: FromStreamStore) -> None:
        assert self._source is not None, "there are streams before there is a stream store"
        match message:
            case StoreHeartbeatReply():
                self._apply_acknowledged(message.num_bytes)
            case QueryLiveStream():
                self._send(LiveStreamReply(message.query_id, self._source.live_entry(message.request_id)))
            case ReleaseAttempt():
                self._send(self._release_attempt(self._source, message))
            case FindReply() | ClaimReply() | DropReply():
                self._resolve_query(message)

    def _apply_acknowledged(self, num_bytes: int) -> None:
        self._bytes_acknowledged = max(self._bytes_acknowledged, num_bytes)
        while self._unacknowledged and self._unacknowledged[0][0] <= self._bytes_acknowledged:
            _, caller, size = self._unacknowledged.popleft()
            self._unacknowledged_bytes[caller] -= size
            if not self._unacknowledged_bytes[caller]:
                del self._unacknowledged_bytes[caller]

    def _resolve_query(self, message: FindReply | ClaimReply | DropReply) -> None:
        claim = self._pending_claims.get(message.query_id)
        if claim is not None and isinstance(message, ClaimReply):
            # Set here and not by the waiting task: the next message may be another process's claim, and may be handled
            # before that task runs.
            claim.is_granted = message.blocking_epoch is None
        reply = self._queries.get(message.query_id)
        if reply is not None and not reply.done():
            reply.set_result(message)

    def _release_attempt(self, source: LiveStreamSource, message: ReleaseAttempt) -> ReleaseReply:
        for claim in self._pending_claims.values():
            if claim.request_id != message.request_id or not claim.is_granted:
                continue
            if claim.attempt_epoch >= message.attempt_epoch:
                return ReleaseReply(message.query_id, blocking_epoch=claim.attempt_epoch)
            claim.superseded_by = message.attempt_epoch
        released = source.release_attempt(message.request_id, message.attempt_epoch, message.caller)
        return (
            ReleaseReply(message.query_id, blocking_epoch=released)
            if isinstance(released, int)
            else ReleaseReply(message.query_id, released)
        )

    def _send_heartbeats(self) -> None:
        """Sends a heartbeat immediately, and again every second. It makes this process known to the stream store, and the
        reply states how many bytes have arrived."""
        self._send_heartbeat()
        self._heartbeat_timer = asyncio.get_running_loop().call_later(HEARTBEAT_INTERVAL_S, self._send_heartbeats)

    def _send_heartbeat(self) -> None:
        if self._send(StoreHeartbeat(self._bytes_put)):
            self._bytes_at_heartbeat = self._bytes_put

    def _disconnect(self) -> None:
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()
        if self._reading is not None:
            self._reading.cancel()
        if self._transport is not None:
            self._transport.close()
        self._transport = self._reading = self._heartbeat_timer = None
        self._store_incarnation = ""
        for reply in self._queries.values():
            if not reply.done():
                reply.set_result(None)

    def _read_ended(self, task: asyncio.Task[None]) -> None:
        """Handles the end of the read task. The task ends only by being cancelled. An exception is a bug: it is logged,
        and `on_fault` is called, because the process must not go on."""
        if not task.cancelled() and (fault := task.exception()) is not None:
            _logger.critical("the stream store client has failed", exc_info=fault)
            self._on_fault()
