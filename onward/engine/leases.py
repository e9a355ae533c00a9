"""Blocks of ours that peers may write, for requests whose prompt a peer computes (decode role).

    ASKED ──a peer could compute it now, there is room──> GRANTED ──its KV is here──> RUNNING
      ^                                                      │
      └──────── taken back: quarantined until quiet ─────────┘

What the data plane has to be told is left in lists; who may write and when is `remote_prefill`'s to arrange.
"""

from onward.engine.request import Lease, Request, Status
from onward.engine.request_queue import RequestQueue
from onward.engine.seating import Seating, forget_place


class Leases:
    def __init__(self, seating: Seating, prefix: str) -> None:
        self._seating, self._prefix = seating, prefix
        self._next_number = 1
        self.wanted = RequestQueue()
        """A peer could compute these now, and asks for blocks."""
        self._short = RequestQueue()
        """Asked requests that have found no room, and have not been granted any since."""
        self.fresh: list[Request] = []
        """Granted, and nobody has been told of it."""
        self.abandoned: list[Request] = []
        """Ended, or put back, while a peer worked for them: the peer must be told."""
        self.quarantined: dict[str, list[int]] = {}
        """Blocks of leases that have ended, until their writer is known to be quiet."""
        self.stuck: set[str] = set()
        """Of those, the ones that nobody should wait for."""
        self.revoked: list[str] = []
        """Leases that have ended; the data plane must be told."""

    @property
    def num_coming(self) -> int:
        """Quarantined blocks that can be expected back soon."""
        return sum(len(blocks) for lease_id, blocks in self.quarantined.items() if lease_id not in self.stuck)

    def renew(self) -> None:
        """The memory is gone: nothing of it can be in anybody's hands."""
        assert not self._seating.granted, "hand-overs end before the memory does"
        self.fresh.clear()
        self.quarantined.clear()
        self.stuck.clear()
        self.revoked.clear()

    def want(self, request: Request, *, at_once: bool) -> None:
        """A peer could compute this one now. It gets blocks at once if there is room, or when a plan has made some."""
        if not (at_once and self.grant(request)):
            self.wanted.add(request)
            self.note_short(request)

    def note_short(self, request: Request) -> None:
        """There was no room for it. It keeps its place in the line until it is granted some, whoever computes meanwhile."""
        if request not in self._short:
            self._short.add(request)

    @property
    def first_short(self) -> Request | None:
        return self._short.first()

    def forget_offer(self, request: Request) -> None:
        self.wanted.discard(request)

    def leave(self, request: Request) -> None:
        """The request waits for leased blocks no longer: it has ended, or its prompt is computed here."""
        self.forget_offer(request)
        self._short.discard(request)

    def grant(self, request: Request) -> bool:
        """Gives an asked request its place: cached blocks are pinned, the others are for the peer to write."""
        seating = self._seating
        room = seating.find_room(request)
        if not room.enough or not seating.slots.num_free:
            return False
        self._short.discard(request)
        seating.occupy(request, room)
        request.lease = Lease(f"{self._prefix}-{self._next_number}", room.hits, request.block_ids[room.hits :])
        self._next_number += 1
        seating.pool.lease(request.lease.block_ids)
        request.move_to(Status.GRANTED)
        seating.granted.add(request)
        self.fresh.append(request)
        return True

    def arrive(self, request: Request, now_s: float) -> None:
        """The KV of the whole list is in the leased blocks."""
        assert request.lease is not None, "what arrives was granted"
        self._seating.pool.end_lease(request.lease.block_ids)
        request.lease = None
        self._seating.granted.remove(request)
        request.num_computed = len(request.token_ids)
        self._seating.start(request, now_s)

    def take_back(self, request: Request) -> None:
        """The peer is out. What it may still write is quarantined until it is known to be quiet."""
        lease, slot, seating = request.lease, request.slot, self._seating
        assert lease is not None and slot is not None, "granted"
        seating.granted.remove(request)
        seating.slots.give_back(slot, None)
        seating.pool.release(request.block_ids[: lease.first_block], None)
        seating.pool.quarantine(lease.block_ids)
        self.quarantined[lease.lease_id] = lease.block_ids
        self.revoked.append(lease.lease_id)
        request.lease = None
        forget_place(request)

    def end_quarantine(self, lease_id: str) -> None:
        self.stuck.discard(lease_id)
        if blocks := self.quarantined.pop(lease_id, None):
            self._seating.pool.end_quarantine(blocks)
