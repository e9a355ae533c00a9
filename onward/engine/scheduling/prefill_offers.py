"""Prompts that we compute for peers, between the queue and the first step (prefill role).

WAITING ──there is room──> OFFERED ──the peer has granted blocks──> RUNNING

An offered one has its place here, so that it can run the moment the peer answers.
"""

from onward.engine.request import Request, RequestStatus
from onward.engine.scheduling import scheduling_policy
from onward.engine.scheduling.slot_and_block_allocator import PlannedAllocation, SlotAndBlockAllocator
from onward.pd.handoff import HandoffKey
from onward.proto.kv_transfer import KvPush


class PrefillOffers:
    def __init__(self, allocator: SlotAndBlockAllocator, tokens_per_step: int) -> None:
        self._allocator, self._tokens_per_step = allocator, tokens_per_step
        self.offered: list[Request] = []
        self.unsent: list[Request] = []
        """Of those, the ones whose peer must still be told."""

    def may_offer(self, key: HandoffKey) -> bool:
        """Just in time: a peer's memory is asked for only when what we compute, or it has been offered, is nearly done."""
        offered = (r for r in self.offered if decode_instance_of(r) == key.decode_incarnation)
        computing = (r for r in self._allocator.running if r.handoff is not None)
        tokens_ahead = sum(len(r.token_ids) - r.planned_computed for r in [*offered, *computing])
        return scheduling_policy.may_offer(tokens_ahead, self._tokens_per_step)

    def offer(self, request: Request, allocation: PlannedAllocation, now_s: float) -> None:
        self._allocator.allocate(request, allocation)
        request.scheduled_s = now_s
        request.set_status(RequestStatus.OFFERED)
        self.offered.append(request)
        self.unsent.append(request)

    def start_push(self, request: Request, push: KvPush, now_s: float) -> None:
        """The peer has granted blocks: compute, and push. The transfer holds a share of what it reads."""
        self.offered.remove(request)
        request.push = push
        self._allocator.pool.start_sending(request.block_ids)
        self._allocator.start_running(request, now_s)


def decode_instance_of(request: Request) -> str | None:
    """The peer that we compute this one for, if it is not ours."""
    return None if request.handoff is None else request.handoff.decode_incarnation
