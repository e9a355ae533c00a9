"""Slots and blocks: who has them, whether there is room for one more, and who speaks under which epoch.

Both are resources with an owner, and both come back behind a fence: a step in flight may still speak for a slot and write
a block that its request has given up. Knows nothing of queues, plans and priorities.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from onward.config import EngineConfig
from onward.engine import policy
from onward.engine.block_pool import BlockPool
from onward.engine.request import Request, Status
from onward.engine.request_queue import RequestQueue
from onward.engine.slots import SlotTable
from onward.proto.block_hash import BlockHash


@dataclass(slots=True, frozen=True)
class Room:
    """What a request would take, and whether it may."""

    names: list[BlockHash]
    hits: int
    needed: int
    enough: bool
    """Whether there are blocks for it now."""
    taken: int
    """Blocks that would not be available any more, those of hits that nobody else holds included."""
    growing: int
    """Requests for which a block each is kept to grow into."""


class Seating:
    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self._config = config
        self.pool = pool
        self.slots = SlotTable(config.max_num_seqs)
        self.running = RequestQueue()
        self.granted = RequestQueue()
        """Have a seat, and grow, but do not run: a peer writes their blocks."""
        self.by_epoch: dict[int, Request] = {}
        self._next_epoch = 1

    def renew(self, pool: BlockPool) -> None:
        """The worker is dead, and all that was in its memory."""
        self.pool = pool
        self.slots = SlotTable(self._config.max_num_seqs)
        self.running = RequestQueue()
        self.by_epoch.clear()

    def find_room(self, request: Request) -> Room:
        # All but the last token may come from the cache: its logits are needed, so it is always computed. So are the
        # rows whose logits somebody wants.
        #   |-- hits: shared blocks --|-- needed: own blocks --|
        #   0              hits * block_size          blocks_for(len(token_ids))
        size = self.pool.block_size
        first_scored = request.first_scored_row
        cacheable = len(request.token_ids) - 1 if first_scored is None else first_scored
        names = request.hash_chain(size, cacheable // size if self._config.prefix_caching else 0)
        hits, hits_available = self.pool.hit_length(names)
        needed = self.pool.blocks_for(len(request.token_ids)) - hits
        growing = len(self.running) + len(self.granted)
        enough = policy.may_admit(needed, self.pool.num_available - hits_available, growing)
        return Room(names, hits, needed, enough, needed + hits_available, growing)

    def has_room(self, request: Request) -> bool:
        return self.slots.num_free > 0 and self.find_room(request).enough

    def has_room_beside(self, request: Request, others: Iterable[Request]) -> bool:
        """A slot and blocks for all of them, and a block for each to grow into, but for the request itself. Looks at no
        more of the others than there are slots."""
        slots, growing = self.slots.num_free - 1, len(self.running) + len(self.granted)
        taken = self.find_room(request).taken
        for other in others:
            slots, growing, taken = slots - 1, growing + 1, taken + self.find_room(other).taken
            if slots < 0 or not policy.may_admit(taken, self.pool.num_available, growing):
                return False
        return True

    def num_uncached(self, request: Request) -> int:
        return len(request.token_ids) - self.find_room(request).hits * self.pool.block_size

    def occupy(self, request: Request, room: Room) -> None:
        """Takes a slot, shares of the cached blocks, and blocks of its own."""
        request.block_ids = self.pool.acquire(room.names[: room.hits]) + self.pool.allocate(room.needed)
        request.num_published = room.hits
        request.num_computed = room.hits * self.pool.block_size
        request.slot = self.slots.take()

    def start(self, request: Request, now_s: float) -> None:
        """From here on the worker speaks for this slot. The next plan tells it so."""
        request.slot_epoch = self._next_epoch
        self._next_epoch += 1
        self.by_epoch[request.slot_epoch] = request
        request.awaits_assignment = True
        if request.scheduled_s is None:
            request.scheduled_s = now_s
        request.move_to(Status.RUNNING)
        self.running.add(request)

    def vacate(self, request: Request, fence_step: int | None) -> None:
        assert request.slot is not None, "it had a slot"
        self.slots.give_back(request.slot, fence_step)
        self.pool.release(request.block_ids, fence_step)
        self.by_epoch.pop(request.slot_epoch, None)  # an offered one has no epoch yet
        forget_place(request)

    def publish_computed(self, request: Request) -> None:
        """Names the blocks whose KV is computed to the end, so that others can share them."""
        size, config = self.pool.block_size, self._config
        tokens = request.num_computed if config.output_caching else min(request.num_computed, request.num_prompt)
        num_full = tokens // size if config.prefix_caching else 0
        if num_full > request.num_published:
            names = request.hash_chain(size, num_full)
            for index in range(request.num_published, num_full):
                self.pool.publish(request.block_ids[index], names[index])
            request.num_published = num_full


def forget_place(request: Request) -> None:
    request.prompt_logprobs = None
    request.given_drafts = []
    request.slot = None
    request.block_ids = []
    request.num_computed = 0
    request.num_published = 0
    request.awaits_assignment = False
    request.in_flight.clear()
