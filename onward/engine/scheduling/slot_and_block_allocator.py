"""Allocates slots and KV blocks to requests, decides whether another request fits, and numbers slot epochs.

A released slot or block is fenced until the steps in flight have completed: such a step may still report tokens for the
slot or write the block. Independent of queues, plans and priorities.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from onward.config import EngineConfig
from onward.engine.request import Request, RequestStatus
from onward.engine.scheduling import scheduling_policy
from onward.engine.scheduling.block_pool import BlockPool
from onward.engine.scheduling.request_queue import RequestQueue
from onward.proto.block_hash import BlockHash


class SlotPool:
    """Free slots. A released slot is fenced like a block: a step in flight may still report tokens of its last request."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._fenced: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_fenced(self) -> int:
        return len(self._fenced)

    def take(self) -> int:
        return self._free.pop()

    def release(self, slot: int, fence_step: int | None) -> None:
        assert slot not in self._free, f"slot {slot} is free already"
        if fence_step is None:
            self._free.append(slot)
        else:
            self._fenced[slot] = fence_step

    def lift_fences(self, step: int | None) -> None:
        """Frees the slots whose fence is `step` or an earlier one, because the result of `step` has arrived. None frees
        all: no result of a step in flight will come."""
        for slot in [slot for slot, fence in self._fenced.items() if step is None or fence <= step]:
            del self._fenced[slot]
            self._free.append(slot)


@dataclass(slots=True, frozen=True)
class PlannedAllocation:
    """The blocks that a request would take, and whether they are available."""

    block_hashes: list[BlockHash]
    num_cached_blocks: int
    num_new_blocks: int
    fits: bool
    """Whether there are blocks for it now."""
    num_blocks_consumed: int
    """Free blocks that this uses up, including cached blocks without another reference."""
    num_growth_blocks: int
    """Blocks kept free so that running requests can grow: one for each."""


class SlotAndBlockAllocator:
    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self._config = config
        self.pool = pool
        self.slots = SlotPool(config.max_num_seqs)
        self.running = RequestQueue()
        self.awaiting_kv = RequestQueue()
        """Have a slot and get more blocks, but do not run: a peer writes their blocks."""
        self.by_slot_epoch: dict[int, Request] = {}
        self._next_epoch = 1
        self.attention_window: int | None = None
        """Attention window of the worker's model."""

    def reset(self, pool: BlockPool) -> None:
        """Starts over with the empty `pool` and free slots, because the KV memory is lost."""
        self.pool = pool
        self.slots = SlotPool(self._config.max_num_seqs)
        self.running = RequestQueue()
        self.by_slot_epoch.clear()

    def plan_allocation(self, request: Request) -> PlannedAllocation:
        # The last token is always computed, because its logits are needed. The same holds for all rows whose logits the
        # request asks for.
        block_size = self.pool.block_size
        first_scored = request.first_scored_row
        cacheable = len(request.token_ids) - 1 if first_scored is None else first_scored
        block_hashes = request.compute_block_hashes(
            block_size, cacheable // block_size if self._config.prefix_caching else 0
        )
        num_cached_blocks, num_available_hits = self.pool.count_cached_prefix(block_hashes)
        num_new_blocks = self.pool.num_blocks_for(len(request.token_ids)) - num_cached_blocks
        num_growth_blocks = len(self.running) + len(self.awaiting_kv)
        fits = scheduling_policy.may_admit(
            num_new_blocks, self.pool.num_available - num_available_hits, num_growth_blocks
        )
        return PlannedAllocation(
            block_hashes,
            num_cached_blocks,
            num_new_blocks,
            fits,
            num_new_blocks + num_available_hits,
            num_growth_blocks,
        )

    def can_allocate(self, request: Request) -> bool:
        return self.slots.num_free > 0 and self.plan_allocation(request).fits

    def has_room_with(self, request: Request, others: Iterable[Request]) -> bool:
        """Returns whether there are slots and blocks for the request and all `others`, and one growth block for each of
        the others and each running or granted request. Examines no more of the others than there are free slots."""
        num_free_slots, num_growth_blocks = self.slots.num_free - 1, len(self.running) + len(self.awaiting_kv)
        num_blocks = self.plan_allocation(request).num_blocks_consumed
        for other in others:
            num_free_slots, num_growth_blocks, num_blocks = (
                num_free_slots - 1,
                num_growth_blocks + 1,
                num_blocks + self.plan_allocation(other).num_blocks_consumed,
            )
            if num_free_slots < 0 or not scheduling_policy.may_admit(
                num_blocks, self.pool.num_available, num_growth_blocks
            ):
                return False
        return True

    def num_uncached_tokens(self, request: Request) -> int:
        return len(request.token_ids) - self.plan_allocation(request).num_cached_blocks * self.pool.block_size

    def allocate(self, request: Request, allocation: PlannedAllocation) -> None:
        """Takes a slot, shares of the cached blocks, and blocks of its own."""
        request.block_ids = self.pool.acquire_cached(
            allocation.block_hashes[: allocation.num_cached_blocks]
        ) + self.pool.allocate(allocation.num_new_blocks)
        request.num_hashed_blocks = allocation.num_cached_blocks
        request.num_computed = allocation.num_cached_blocks * self.pool.block_size
        request.slot = self.slots.take()

    def start_running(self, request: Request, now_s: float) -> None:
        """Starts a slot epoch: from here on the worker reports results for this slot. The next plan assigns the
        slot."""
        self._start_epoch(request)
        if request.scheduled_s is None:
            request.scheduled_s = now_s
        request.set_status(RequestStatus.RUNNING)
        self.running.add(request)

    def reassign(self, request: Request) -> None:
        """Starts a new slot epoch for a request whose worker died and whose KV is kept. The next worker gets the slot,
        its blocks and the number of computed tokens."""
        assert request.slot is not None, "a request that runs has a slot"
        self.by_slot_epoch.pop(request.slot_epoch, None)
        request.planned_runs.clear()
        self._start_epoch(request)

    def _start_epoch(self, request: Request) -> None:
        request.slot_epoch = self._next_epoch
        self._next_epoch += 1
        self.by_slot_epoch[request.slot_epoch] = request
        request.assign_pending = True

    def release(self, request: Request, fence_step: int | None) -> None:
        assert request.slot is not None, "it had a slot"
        self.slots.release(request.slot, fence_step)
        self.pool.release(request.held_block_ids, fence_step)
        self.by_slot_epoch.pop(request.slot_epoch, None)  # an offered one has no epoch yet
        clear_allocation(request)

    def cache_computed_blocks(self, request: Request) -> None:
        """Gives hashes to the blocks whose KV is complete, so that other requests can share them."""
        block_size, config = self.pool.block_size, self._config
        num_cacheable = request.num_computed if config.output_caching else min(request.num_computed, request.num_prompt)
        num_full = num_cacheable // block_size if config.prefix_caching else 0
        if num_full > request.num_hashed_blocks:
            block_hashes = request.compute_block_hashes(block_size, num_full)
            for index in range(request.num_hashed_blocks, num_full):
                self.pool.cache_block(request.block_ids[index], block_hashes[index])
            request.num_hashed_blocks = num_full

    def free_blocks_before_window(self, request: Request) -> None:
        """Gives up the leading blocks that no layer reads any more.

            positions   |---- freed ----|---- the window of the next row ----|
                        0               first_seen              num_computed (the next row)

        There is no fence: rows of steps in flight lie behind `num_computed`, so they neither read nor write these."""
        if self.attention_window is None:
            return
        first_seen = max(0, request.num_computed - self.attention_window + 1)
        num_unseen = first_seen // self.pool.block_size
        if num_unseen > request.num_freed_blocks:
            self.pool.release(request.block_ids[request.num_freed_blocks : num_unseen], None)
            request.num_freed_blocks = num_unseen


def clear_allocation(request: Request) -> None:
    request.prompt_logprobs = None
    request.peer_draft_token_ids = []
    request.slot = None
    request.block_ids = []
    request.num_freed_blocks = 0
    request.num_computed = 0
    request.num_hashed_blocks = 0
    request.assign_pending = False
    request.planned_runs.clear()
