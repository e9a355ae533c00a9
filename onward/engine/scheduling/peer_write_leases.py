"""Blocks of ours that a peer may write: a lease for each request whose prompt a peer computes (decode role).

    in line ──there is room──> OPENING ──our worker expects writes──> OPEN ──the KV is here──> ENDED
                                  └────────────── revoked ──────────────┴──> REVOKED ──quiesced──> forgotten

The only owner of leases and of their times. The blocks of a revoked lease are quarantined until our worker reports that
nothing is written into them any more. `take_commands` returns what our worker has to be told; `remote_prefill` arranges
with peers which of them may write.
"""

from dataclasses import dataclass
from enum import Enum

from onward.engine.request import Request, RequestStatus
from onward.engine.scheduling.request_queue import RequestQueue
from onward.engine.scheduling.slot_and_block_allocator import SlotAndBlockAllocator, clear_allocation
from onward.proto.kv_transfer import (
    EndLease,
    ExpectingWrites,
    ExpectWrites,
    KvCommand,
    KvReport,
    LeaseQuiesced,
    RevokeLease,
)

REVOKE_GRACE_S = 1.0
"""A revoked lease is usually quiet within milliseconds. After so long nothing waits for its blocks any more."""
MAX_QUARANTINE_S = 30.0
"""After so long the memory is given up as a whole, and with it the writer that cannot be reached."""
MAX_QUARANTINED_SHARE = 0.25
"""Of the pool; beyond it likewise."""


class LeaseState(Enum):
    OPENING = "opening"
    """Our worker has not confirmed it, so no peer knows of it."""
    OPEN = "open"
    REVOKED = "revoked"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class PeerWriteLease:
    """Blocks of one request, from `first_block` on."""

    lease_id: str
    request: Request
    first_block: int
    block_ids: list[int]
    state: LeaseState = LeaseState.OPENING
    unconfirmed_since_s: float | None = None
    """When our worker was told to expect writes, as long as it has reported nothing."""
    peer_done_s: float | None = None
    """When the peer was done: from then on our own worker is waited for."""
    revoked_s: float | None = None
    """When our worker was told to revoke it."""

    @property
    def worker_due_since_s(self) -> float | None:
        """Since when our worker owes a report: that it expects writes, or that it has counted what a peer has written."""
        if self.unconfirmed_since_s is None and self.state is LeaseState.OPEN:
            return self.peer_done_s
        return self.unconfirmed_since_s


class PeerWriteLeases:
    """All leases, and the requests in line for one.

    A lease has no expiry: it is revoked when its handoff fails, also by a timeout of `pd.handoff_timeouts`. A revoked lease
    is quarantined until the worker reports that the writer is quiet, or the memory is given up."""

    def __init__(self, allocator: SlotAndBlockAllocator, prefix: str, *, checksums: bool) -> None:
        self._allocator, self._prefix, self._checksums = allocator, prefix, checksums
        self._next_number = 1
        self.awaiting_blocks = RequestQueue()
        """A peer could compute these now, and asks for blocks."""
        self._short_of_blocks = RequestQueue()
        """Asked requests that have found no room, and have not been granted any since."""
        self._by_id: dict[str, PeerWriteLease] = {}
        """Opening, open and revoked ones."""
        self._by_request: dict[Request, PeerWriteLease] = {}
        """Opening and open ones."""
        self._changed: dict[PeerWriteLease, None] = {}
        """Our worker has to be told of their state."""
        self._abandoned: list[Request] = []
        self._last_taken_s = 0.0

    @property
    def idle(self) -> bool:
        return not self._by_id

    @property
    def revoked(self) -> list[PeerWriteLease]:
        return [lease for lease in self._by_id.values() if lease.state is LeaseState.REVOKED]

    @property
    def num_returning_blocks(self) -> int:
        """Quarantined blocks that can be expected back soon."""
        return sum(len(lease.block_ids) for lease in self.revoked if not _is_overdue(lease, self._last_taken_s))

    @property
    def worker_due_since_s(self) -> float | None:
        due_since_s = (lease.worker_due_since_s for lease in self._by_id.values())
        return min((since_s for since_s in due_since_s if since_s is not None), default=None)

    def worker_replacement_reason(self, now_s: float) -> str | None:
        """A reason to give the KV memory up: too much of it is quarantined, or some has been for too long."""
        pool = self._allocator.pool
        if not pool.num_quarantined:
            return None
        revoked = self.revoked
        if pool.num_quarantined > pool.num_blocks * MAX_QUARANTINED_SHARE and any(
            _is_overdue(lease, now_s) for lease in revoked
        ):
            return f"{pool.num_quarantined} of {pool.num_blocks} KV blocks are quarantined"
        if any(lease.revoked_s is not None and now_s - lease.revoked_s > MAX_QUARANTINE_S for lease in revoked):
            return f"a peer that may write KV blocks has not answered for {MAX_QUARANTINE_S:g} s"
        return None

    def count_by_state(self) -> dict[str, int]:
        return {"granted": len(self._by_request), "quarantined": len(self._by_id) - len(self._by_request)}

    def reset(self) -> None:
        """The memory is gone, and with it all that peers could write."""
        assert not self._by_request, "handoffs end before the memory does"
        self._by_id.clear()
        self._changed.clear()

    def of(self, request: Request) -> PeerWriteLease | None:
        return self._by_request.get(request)

    def request_blocks(self, request: Request, *, at_once: bool) -> None:
        """A peer could compute this one now. It gets blocks at once if there is room, or when a plan has made some."""
        if not (at_once and self.grant(request)):
            self.awaiting_blocks.add(request)
            self.mark_short_of_blocks(request)

    def mark_short_of_blocks(self, request: Request) -> None:
        """There was no room for it. It keeps its place in line until it is granted blocks, or is computed here."""
        if request not in self._short_of_blocks:
            self._short_of_blocks.add(request)

    @property
    def first_short_of_blocks(self) -> Request | None:
        return self._short_of_blocks.first()

    def withdraw_request(self, request: Request) -> None:
        self.awaiting_blocks.discard(request)

    def leave_line(self, request: Request) -> None:
        """The request waits for leased blocks no longer: it has ended, or its prompt is computed here."""
        self.withdraw_request(request)
        self._short_of_blocks.discard(request)

    def grant(self, request: Request) -> bool:
        """Gives an asked request its place: cached blocks are pinned, the others are for the peer to write."""
        allocator = self._allocator
        allocation = allocator.plan_allocation(request)
        if not allocation.fits or not allocator.slots.num_free:
            return False
        self._short_of_blocks.discard(request)
        allocator.allocate(request, allocation)
        first_block = allocation.num_cached_blocks
        lease_id = f"{self._prefix}-{self._next_number}"
        lease = PeerWriteLease(lease_id, request, first_block, request.block_ids[first_block:])
        self._next_number += 1
        self._by_id[lease_id] = self._by_request[request] = lease
        self._changed[lease] = None
        allocator.pool.start_lease(lease.block_ids)
        request.set_status(RequestStatus.GRANTED)
        allocator.awaiting_kv.add(request)
        return True

    def complete(self, lease: PeerWriteLease, now_s: float) -> None:
        """The KV of the whole list is in the leased blocks, and the request runs."""
        request = lease.request
        self._end(lease, LeaseState.ENDED)
        del self._by_id[lease.lease_id]
        self._allocator.pool.end_lease(lease.block_ids)
        request.num_computed = len(request.token_ids)
        self._allocator.start_running(request, now_s)

    def revoke(self, request: Request) -> None:
        """The peer is out. What it may still write is quarantined until it is known to be quiet."""
        lease, slot, allocator = self._by_request[request], request.slot, self._allocator
        assert slot is not None, "a granted request has a slot"
        self._end(lease, LeaseState.REVOKED)
        allocator.slots.release(slot, None)
        allocator.pool.release(request.block_ids[: lease.first_block], None)
        allocator.pool.start_quarantine(lease.block_ids)
        clear_allocation(request)

    def abandon(self, request: Request) -> None:
        """The scheduler ends the request, or takes its place, while a peer works for it."""
        if request in self._by_request:
            self.revoke(request)
        else:
            self.leave_line(request)
        self._abandoned.append(request)

    def take_abandoned(self) -> list[Request]:
        """Requests for which peers still work in vain."""
        abandoned, self._abandoned = self._abandoned, []
        return abandoned

    def on_peer_done(self, request: Request, now_s: float) -> None:
        """The peer says that it has written everything."""
        lease = self._by_request.get(request)
        if lease is not None and lease.peer_done_s is None:
            lease.peer_done_s = now_s

    def on_report(self, report: KvReport) -> PeerWriteLease | None:
        """Our worker reports on a lease. Returns it as long as its peer may write, or has written, under it."""
        lease = self._by_id.get(report.lease_id)
        if lease is None:
            return None
        lease.unconfirmed_since_s = None
        if lease.state is LeaseState.REVOKED:
            if isinstance(report, LeaseQuiesced):
                del self._by_id[lease.lease_id]
                self._allocator.pool.end_quarantine(lease.block_ids)
            return None
        if isinstance(report, ExpectingWrites):
            lease.state = LeaseState.OPEN
        return lease

    def take_commands(self, now_s: float) -> list[KvCommand]:
        """What our worker has to be told. Its time to answer begins now."""
        commands: list[KvCommand] = []
        for lease in self._changed:
            match lease.state:
                case LeaseState.OPENING:
                    lease.unconfirmed_since_s = now_s
                    commands.append(ExpectWrites(lease.lease_id, lease.block_ids, self._checksums))
                case LeaseState.REVOKED:
                    lease.revoked_s = now_s
                    commands.append(RevokeLease(lease.lease_id))
                case LeaseState.ENDED:
                    commands.append(EndLease(lease.lease_id))
        self._changed.clear()
        self._last_taken_s = now_s
        return commands

    def _end(self, lease: PeerWriteLease, state: LeaseState) -> None:
        del self._by_request[lease.request]
        self._allocator.awaiting_kv.remove(lease.request)
        lease.state = state
        self._changed[lease] = None


def _is_overdue(lease: PeerWriteLease, now_s: float) -> bool:
    """Nothing should wait for its blocks any more."""
    return lease.revoked_s is not None and now_s - lease.revoked_s > REVOKE_GRACE_S
