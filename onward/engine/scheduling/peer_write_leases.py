"""Leases on blocks that a peer may write: one for each request whose prompt a peer computes (decode role).

    in line ──there is room──> OPENING ──our worker expects writes──> OPEN ──the KV is here──> ENDED
                                  └────────────── revoked ──────────────┴──> REVOKED ──quiesced──> forgotten

This module is the only owner of leases and their times. The blocks of a revoked lease stay quarantined until our worker
reports that nothing writes them any more. `take_commands` returns commands for our worker; `remote_prefill` arranges
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
"""How long requests may wait for the blocks of a revoked lease. It is usually quiet within milliseconds."""
MAX_QUARANTINE_S = 30.0
"""How long a block may be quarantined. Then the whole memory is given up, and with it the unreachable writer."""
MAX_QUARANTINED_SHARE = 0.25
"""Share of the pool. Beyond it the memory is given up too."""


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
    """When our worker was told to expect writes; None once it has reported anything."""
    peer_done_s: float | None = None
    """When the peer was done: from then on our own worker is waited for."""
    revoked_s: float | None = None
    """When our worker was told to revoke the lease."""

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
        """Leases whose state our worker must be told."""
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
        """Returns why the KV memory must be given up, or None: too much of it is quarantined, or a block has been for
        too long."""
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
        """Forgets all revoked leases because the memory that peers could write is lost. Granted leases must have ended
        before."""
        assert not self._by_request, "handoffs end before the memory does"
        self._by_id.clear()
        self._changed.clear()

    def release_revoked(self) -> None:
        """Ends the quarantine of all blocks and forgets the revoked leases. The worker is dead and its memory is kept,
        which means that no peer can write it any more. Granted leases must have ended before."""
        assert not self._by_request, "handoffs end with their worker"
        for lease in self.revoked:
            self._allocator.pool.end_quarantine(lease.block_ids)
        self.reset()

    def of(self, request: Request) -> PeerWriteLease | None:
        return self._by_request.get(request)

    def request_blocks(self, request: Request, *, at_once: bool) -> None:
        """Handles the offer of a peer that could compute this prompt now. With `at_once`, grants the request blocks if
        there is room; otherwise the request waits in line until a plan has made room."""
        if not (at_once and self.grant(request)):
            self.awaiting_blocks.add(request)
            self.mark_short_of_blocks(request)

    def mark_short_of_blocks(self, request: Request) -> None:
        """Records that there was no room for the request. It keeps its place in line until it is granted blocks, or its
        prompt is computed here."""
        if request not in self._short_of_blocks:
            self._short_of_blocks.add(request)

    @property
    def first_short_of_blocks(self) -> Request | None:
        return self._short_of_blocks.first()

    def withdraw_request(self, request: Request) -> None:
        self.awaiting_blocks.discard(request)

    def leave_line(self, request: Request) -> None:
        """Removes a request that no longer waits for leased blocks: it has ended, or its prompt is computed here."""
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
        """Ends a lease under which a peer has written the KV of all the request's tokens, and starts to run the
        request."""
        request = lease.request
        self._end(lease, LeaseState.ENDED)
        del self._by_id[lease.lease_id]
        self._allocator.pool.end_lease(lease.block_ids)
        request.num_computed = len(request.token_ids)
        self._allocator.start_running(request, now_s)

    def revoke(self, request: Request) -> None:
        """Ends the lease of a failed or cancelled handoff and takes the request's slot and blocks back. Blocks that the
        peer may still write are quarantined until the worker reports that it is quiet."""
        lease, slot, allocator = self._by_request[request], request.slot, self._allocator
        assert slot is not None, "a granted request has a slot"
        self._end(lease, LeaseState.REVOKED)
        allocator.slots.release(slot, None)
        allocator.pool.release(request.block_ids[: lease.first_block], None)
        allocator.pool.start_quarantine(lease.block_ids)
        clear_allocation(request)

    def abandon(self, request: Request) -> None:
        """Revokes the request's lease, or removes the request from the line, because the scheduler ends or preempts it
        while a peer works for it. `take_abandoned` returns it afterwards, so that the handoff is cancelled."""
        if request in self._by_request:
            self.revoke(request)
        else:
            self.leave_line(request)
        self._abandoned.append(request)

    def take_abandoned(self) -> list[Request]:
        """Returns the abandoned requests since the last call. Their handoffs must be cancelled, because peers work for
        them in vain."""
        abandoned, self._abandoned = self._abandoned, []
        return abandoned

    def on_peer_done(self, request: Request, now_s: float) -> None:
        """Records when the peer first reported that it has written everything. From then on our worker owes a report,
        see `worker_due_since_s`."""
        lease = self._by_request.get(request)
        if lease is not None and lease.peer_done_s is None:
            lease.peer_done_s = now_s

    def on_report(self, report: KvReport) -> PeerWriteLease | None:
        """Updates the lease that a report of our worker is about. Returns it if it is granted; None if it is unknown or
        revoked. A report that the writer of a revoked lease is quiet ends the quarantine."""
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
        """Returns the commands for our worker, whose time to answer starts now."""
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
    """Returns whether the lease was revoked so long ago that no request should wait for its blocks any more."""
    return lease.revoked_s is not None and now_s - lease.revoked_s > REVOKE_GRACE_S
