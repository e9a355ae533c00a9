"""Blocks of ours that peers may write, for requests whose prompt a peer computes (decode role).

    ASKED ──a peer could compute it now, there is room──> GRANTED ──its KV is here──> RUNNING
      ^                                                      │
      └──────── taken back: quarantined until quiet ─────────┘

What the data plane has to be told is left in lists; who may write and when is `remote_prefill`'s to arrange.
"""

from onward.engine.request import BlockLease, Request, RequestStatus
from onward.engine.scheduling.request_queue import RequestQueue
from onward.engine.scheduling.slot_and_block_allocator import SlotAndBlockAllocator, clear_allocation


class BlockLeases:
    def __init__(self, allocator: SlotAndBlockAllocator, prefix: str) -> None:
        self._allocator, self._prefix = allocator, prefix
        self._next_number = 1
        self.awaiting_blocks = RequestQueue()
        """A peer could compute these now, and asks for blocks."""
        self._short_of_blocks = RequestQueue()
        """Asked requests that have found no room, and have not been granted any since."""
        self.unannounced_grants: list[Request] = []
        """Granted, and nobody has been told of it."""
        self.abandoned_requests: list[Request] = []
        """Ended, or put back, while a peer worked for them: the peer must be told."""
        self.quarantined: dict[str, list[int]] = {}
        """Blocks of leases that have ended, until their writer is known to be quiet."""
        self.overdue: set[str] = set()
        """Of those, the ones that nobody should wait for."""
        self.unannounced_revocations: list[str] = []
        """Leases that have ended; the data plane must be told."""

    @property
    def num_returning_blocks(self) -> int:
        """Quarantined blocks that can be expected back soon."""
        return sum(len(blocks) for lease_id, blocks in self.quarantined.items() if lease_id not in self.overdue)

    def reset(self) -> None:
        """The memory is gone: nothing of it can be in anybody's hands."""
        assert not self._allocator.awaiting_kv, "handoffs end before the memory does"
        self.unannounced_grants.clear()
        self.quarantined.clear()
        self.overdue.clear()
        self.unannounced_revocations.clear()

    def request_blocks(self, request: Request, *, at_once: bool) -> None:
        """A peer could compute this one now. It gets blocks at once if there is room, or when a plan has made some."""
        if not (at_once and self.grant(request)):
            self.awaiting_blocks.add(request)
            self.mark_short_of_blocks(request)

    def mark_short_of_blocks(self, request: Request) -> None:
        """There was no room for it. It keeps its place in the line until it is granted some, whoever computes meanwhile."""
        if request not in self._short_of_blocks:
            self._short_of_blocks.add(request)

    @property
    def first_short_of_blocks(self) -> Request | None:
        return self._short_of_blocks.first()

    def withdraw_request(self, request: Request) -> None:
        self.awaiting_blocks.discard(request)

    def remove(self, request: Request) -> None:
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
        request.lease = BlockLease(
            f"{self._prefix}-{self._next_number}",
            allocation.num_cached_blocks,
            request.block_ids[allocation.num_cached_blocks :],
        )
        self._next_number += 1
        allocator.pool.start_lease(request.lease.block_ids)
        request.set_status(RequestStatus.GRANTED)
        allocator.awaiting_kv.add(request)
        self.unannounced_grants.append(request)
        return True

    def complete(self, request: Request, now_s: float) -> None:
        """The KV of the whole list is in the leased blocks."""
        assert request.lease is not None, "what arrives was granted"
        self._allocator.pool.end_lease(request.lease.block_ids)
        request.lease = None
        self._allocator.awaiting_kv.remove(request)
        request.num_computed = len(request.token_ids)
        self._allocator.start_running(request, now_s)

    def revoke(self, request: Request) -> None:
        """The peer is out. What it may still write is quarantined until it is known to be quiet."""
        lease, slot, allocator = request.lease, request.slot, self._allocator
        assert lease is not None, "a granted request has a lease"
        assert slot is not None, "a granted request has a slot"
        allocator.awaiting_kv.remove(request)
        allocator.slots.release(slot, None)
        allocator.pool.release(request.block_ids[: lease.first_block], None)
        allocator.pool.start_quarantine(lease.block_ids)
        self.quarantined[lease.lease_id] = lease.block_ids
        self.unannounced_revocations.append(lease.lease_id)
        request.lease = None
        clear_allocation(request)

    def end_quarantine(self, lease_id: str) -> None:
        self.overdue.discard(lease_id)
        if blocks := self.quarantined.pop(lease_id, None):
            self._allocator.pool.end_quarantine(blocks)
