"""Prompts that we compute for peers, between the queue and the first step (prefill role).

WAITING ──there is room──> OFFERED ──the peer has granted blocks──> RUNNING

An offered one has its place here, so that it can run the moment the peer answers.
"""

from onward.engine import policy
from onward.engine.request import Request, Status
from onward.engine.seating import Room, Seating
from onward.pd.handoff import HandoverKey
from onward.proto.kv_transfer import Push


class Offers:
    def __init__(self, seating: Seating, tokens_per_step: int) -> None:
        self._seating, self._tokens_per_step = seating, tokens_per_step
        self.offered: list[Request] = []
        self.fresh: list[Request] = []
        """Of those, the ones whose peer must still be told."""

    def may_offer(self, handover: HandoverKey) -> bool:
        """Just in time: a peer's memory is asked for only when what we compute, or it has been offered, is nearly done."""
        offered = (r for r in self.offered if decode_of(r) == handover.decode)
        computing = (r for r in self._seating.running if r.handover is not None)
        tokens_ahead = sum(len(r.token_ids) - r.planned_computed for r in [*offered, *computing])
        return policy.may_offer(tokens_ahead, self._tokens_per_step)

    def offer(self, request: Request, room: Room, now_s: float) -> None:
        self._seating.occupy(request, room)
        request.scheduled_s = now_s
        request.move_to(Status.OFFERED)
        self.offered.append(request)
        self.fresh.append(request)

    def start_push(self, request: Request, push: Push, now_s: float) -> None:
        """The peer has granted blocks: compute, and push. The transfer holds a share of what it reads."""
        self.offered.remove(request)
        request.push = push
        self._seating.pool.start_sending(request.block_ids)
        self._seating.start(request, now_s)


def decode_of(request: Request) -> str | None:
    """The peer that we compute this one for, if it is not ours."""
    return None if request.handover is None else request.handover.decode
