"""Handoffs from this prefill instance to decode instances, from the offer to the end of the KV transfer.

    queued ──there is room──> OFFERED ──the peer has granted blocks──> PUSHING ──all is sent and taken──> forgotten
                                                                          └──cancelled──> STOPPING ──quiesced──┘

The only owner of offers, pushes and their times. An offered request already has a slot and blocks, so that it can run as
soon as the peer grants. A push holds references to the blocks that it reads, and may outlast its request.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from onward.engine.request import Request, RequestStatus
from onward.engine.scheduling import scheduling_policy
from onward.engine.scheduling.slot_and_block_allocator import PlannedAllocation, SlotAndBlockAllocator
from onward.pd.handoff_events import HandoffKey
from onward.proto.kv_transfer import KvCommand, KvPush, PushComplete, StopPush

STOP_TIMEOUT_S = 15.0
"""A worker that cannot even stop a push within this time is given up: before the peer gives up its own memory, which that
worker may still write."""


class OutgoingHandoffState(Enum):
    OFFERED = "offered"
    PUSHING = "pushing"
    STOPPING = "stopping"


@dataclass(slots=True, eq=False)
class OutgoingHandoff:
    key: HandoffKey
    request: Request
    state: OutgoingHandoffState = OutgoingHandoffState.OFFERED
    lease_id: str = ""
    """The peer's lease. Set with the grant, like the blocks and the backend."""
    block_ids: list[int] = field(default_factory=list)
    """Ours that the transfer reads."""
    backend: str = ""
    sent: PushComplete | None = None
    stopping_since_s: float = 0.0


class OutgoingHandoffs:
    """Handoffs of prompts that we compute for peers. Each begins with the offer, before the prompt is computed."""

    def __init__(
        self, allocator: SlotAndBlockAllocator, tokens_per_step: int, newest_step: Callable[[], int | None]
    ) -> None:
        self._allocator, self._tokens_per_step, self._newest_step = allocator, tokens_per_step, newest_step
        self._by_key: dict[HandoffKey, OutgoingHandoff] = {}
        """Offered and pushing ones."""
        self._by_lease: dict[str, OutgoingHandoff] = {}
        """Pushing and stopping ones."""
        self._new_offers: list[OutgoingHandoff] = []

    @property
    def num_sending(self) -> int:
        """Pushes that may read our blocks."""
        return len(self._by_lease)

    @property
    def offered(self) -> list[Request]:
        return [handoff.request for handoff in self._by_key.values() if handoff.state is OutgoingHandoffState.OFFERED]

    def get(self, key: HandoffKey) -> OutgoingHandoff | None:
        return self._by_key.get(key)

    def by_lease(self, lease_id: str) -> OutgoingHandoff | None:
        return self._by_lease.get(lease_id)

    def worker_replacement_reason(self, now_s: float) -> str | None:
        stopping = (handoff for handoff in self._by_lease.values() if handoff.state is OutgoingHandoffState.STOPPING)
        if any(now_s - handoff.stopping_since_s > STOP_TIMEOUT_S for handoff in stopping):
            return f"a transfer could not be stopped within {STOP_TIMEOUT_S:g} s"
        return None

    def reset(self) -> None:
        """Forgets all pushes because the memory that they read is lost. All handoffs must have ended before."""
        assert not self._by_key, "handoffs end before the memory does"
        self._by_lease.clear()

    def release_stopping(self) -> None:
        """Releases the blocks of all pushes that are being stopped, because the worker that read them is dead. All
        handoffs must have ended before."""
        assert not self._by_key, "handoffs end with their worker"
        for handoff in list(self._by_lease.values()):
            self.release(handoff)

    def may_offer(self, key: HandoffKey) -> bool:
        """Returns whether a prompt may be offered to the decode instance of `key` now. An offer takes the peer's
        memory, so it is made only when the prompts being computed here, or offered to that peer, are nearly done."""
        offered = (r for r in self.offered if r.handoff and r.handoff.decode_incarnation == key.decode_incarnation)
        computing = (r for r in self._allocator.running if r.handoff is not None)
        tokens_ahead = sum(len(r.token_ids) - r.planned_computed for r in [*offered, *computing])
        return scheduling_policy.may_offer(tokens_ahead, self._tokens_per_step)

    def offer(self, key: HandoffKey, request: Request, allocation: PlannedAllocation, now_s: float) -> None:
        self._allocator.allocate(request, allocation)
        request.scheduled_s = now_s
        request.set_status(RequestStatus.OFFERED)
        handoff = self._by_key[key] = OutgoingHandoff(key, request)
        self._new_offers.append(handoff)

    def take_new_offers(self) -> list[OutgoingHandoff]:
        """Offers that peers have to be sent."""
        offers, self._new_offers = self._new_offers, []
        return [handoff for handoff in offers if self._by_key.get(handoff.key) is handoff]

    def withdraw_offer(self, request: Request) -> None:
        """Forgets the offer of a request that ends before its peer has granted blocks."""
        assert request.handoff is not None, "only a prompt for a peer is offered"
        del self._by_key[request.handoff]

    def start(self, handoff: OutgoingHandoff, target: KvPush, now_s: float) -> None:
        """Starts to compute and push a prompt for which the peer has granted blocks. The transfer gets its own
        reference of each block that it reads."""
        request = handoff.request
        handoff.state, handoff.lease_id = OutgoingHandoffState.PUSHING, target.lease_id
        handoff.backend, handoff.block_ids = target.endpoint.backend, list(request.block_ids)
        self._by_lease[handoff.lease_id] = handoff
        request.push = target
        self._allocator.pool.start_sending(handoff.block_ids)
        self._allocator.start_running(request, now_s)

    def end(self, key: HandoffKey, now_s: float, *, is_quiesced: bool) -> list[KvCommand]:
        """Ends a handoff and returns the commands for our worker. Its blocks stay with the transfer until that is quiet."""
        handoff = self._by_key.pop(key, None)
        if handoff is None:
            return []
        assert handoff.state is OutgoingHandoffState.PUSHING, "an offer ends with its request"
        if is_quiesced or handoff.sent is not None:
            self.release(handoff)
            return []
        handoff.state, handoff.stopping_since_s = OutgoingHandoffState.STOPPING, now_s
        return [StopPush(handoff.lease_id)]

    def release(self, handoff: OutgoingHandoff) -> None:
        """Forgets a push whose blocks are not read any more, and drops its references of them."""
        del self._by_lease[handoff.lease_id]
        self._allocator.pool.end_sending(handoff.block_ids, self._newest_step())
