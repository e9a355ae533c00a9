"""Decides what each step does. There are no phases: a request catches up with its tokens, further in each step.

    plan:  1. running requests that need one more token (decoding), in the queue's order
           2. running requests that are further behind (prefilling), as far as the token budget goes; a waiting
              request of a higher priority is let in before them
           3. requests for which a peer asks for blocks, if there is a slot and room
           4. waiting requests, as long as there is a slot, room and budget

The scheduler decides; which request has which slot and blocks is in `allocator`, which blocks a peer may write in `leases`,
and which prompts we compute for peers, and push, in `outgoing_handoffs`. It knows nothing of what a token means, of
clients, of protocols, or of wires.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onward.config import EngineConfig
from onward.engine.request import RecomputeCause, Request, RequestStatus
from onward.engine.scheduling import scheduling_policy
from onward.engine.scheduling.block_pool import BlockPool
from onward.engine.scheduling.outgoing_handoffs import OutgoingHandoffs
from onward.engine.scheduling.peer_write_leases import PeerWriteLeases
from onward.engine.scheduling.request_queue import RequestQueue
from onward.engine.scheduling.slot_and_block_allocator import (
    PlannedAllocation,
    SlotAndBlockAllocator,
    SlotPool,
    clear_allocation,
)
from onward.engine.scheduling.step_plan_builder import StepPlanBuilder
from onward.proto.step import StepPlan


@dataclass(slots=True, frozen=True)
class StepInFlight:
    step: int
    runs: list[Request]
    preempts: list[Request]
    is_isolated: bool
    """It belongs to a suspect. That stays so when the suspect ends before its step does."""


class Scheduler:
    def __init__(self, config: EngineConfig, pool: BlockPool, incarnation: str = "") -> None:
        self.config = config
        self.allocator = SlotAndBlockAllocator(config, pool)
        self.leases = PeerWriteLeases(self.allocator, incarnation, checksums=config.kv_checksums)
        self.outgoing_handoffs = OutgoingHandoffs(self.allocator, config.max_num_batched_tokens, self._newest_step)
        self.waiting = RequestQueue()
        self.remote_prefill_enabled = False
        """Whether prompts may be computed elsewhere."""
        self._unrouted: dict[Request, None] = {}
        """New in the queue: where their prompts are computed is not decided yet."""
        self.preempting: set[Request] = set()
        self.suspects: set[Request] = set()
        """Requests that must run alone: the worker died under them twice, without progress. They keep their place in the
        queue."""
        self.draft_cost = 0.0
        """Cost of drafting one token; see `WorkerHello`."""
        self.steps_in_flight: deque[StepInFlight] = deque()
        self._next_step = 1
        self._recomputed: list[tuple[RecomputeCause, int]] = []

    def take_recomputed(self) -> list[tuple[RecomputeCause, int]]:
        """Returns, for requests admitted since the last call, the tokens whose KV is computed again, by cause."""
        recomputed, self._recomputed = self._recomputed, []
        return recomputed

    @property
    def pool(self) -> BlockPool:
        return self.allocator.pool

    @property
    def slots(self) -> SlotPool:
        return self.allocator.slots

    @property
    def running(self) -> RequestQueue:
        return self.allocator.running

    def requests_in_flight(self) -> list[Request]:
        """Returns the requests that a step in flight runs. A request that such a step only preempts cannot cause a
        worker's death."""
        return list(dict.fromkeys(request for step in self.steps_in_flight for request in step.runs))

    def reset(self, pool: BlockPool) -> None:
        """Starts over with the empty `pool` because the KV memory is lost. All running and preempting requests go back
        to the queue with their tokens so far."""
        for request in [*self.running, *self.preempting]:
            request.lose_kv(RecomputeCause.WORKER)
            clear_allocation(request)
            request.set_status(RequestStatus.WAITING)
            self.enqueue(request)
        self.leases.reset()
        self.outgoing_handoffs.reset()
        self.allocator.reset(pool)
        self.preempting.clear()
        self.steps_in_flight.clear()

    def detach_worker(self) -> None:
        """Handles the death of a worker whose KV memory is kept. Committed KV is still there; steps in flight may have
        written only behind it. Running requests keep slot and blocks, and are assigned to the next worker.

        A request that was being preempted goes back to the queue, since no reply will come. So does a request with a
        mean pool, whose sum was in the worker alone. All leases and pushes have ended before: memory that a peer may
        still write is not kept (`supervisor.worker_deaths`), and only the worker has read what it pushed.
        """
        assert not self.allocator.awaiting_kv, "leases end before their worker is detached"
        self.leases.release_revoked()
        self.outgoing_handoffs.release_stopping()
        for request in list(self.preempting):
            self.requeue_preempted(request)
        for request in list(self.running):
            if request.spec.sampling_params.pooling == "mean":
                self.running.remove(request)
                self._requeue(request, RecomputeCause.WORKER)
            else:
                if num_lost := sum(run.num_tokens for run in request.planned_runs):
                    self._recomputed.append((RecomputeCause.WORKER, num_lost))
                if request.phases is not None and request.phases.phase is not None:
                    request.phases.enter(request.phases.phase, request.num_generated, cause="worker_crash")
                self.allocator.reassign(request)
        self.steps_in_flight.clear()
        self.pool.lift_fences(None)
        self.slots.lift_fences(None)

    def plan(self, now_s: float) -> StepPlan | None:
        if len(self.steps_in_flight) >= self.config.max_steps_in_flight:
            return None
        if any(step.is_isolated for step in self.steps_in_flight):
            return None
        draft = StepPlanBuilder(self._next_step, self.config.max_num_batched_tokens)
        suspect = self._choose_request_to_isolate(draft)
        if suspect is not None and self.steps_in_flight:
            return None  # its step waits until no other one is in flight
        if suspect is not None:
            self._plan_suspect(draft, suspect, now_s)
        runs_alone = bool(draft.runs)
        if not runs_alone:
            self._plan_running(draft, now_s)
            self._grant_waiting_leases(draft)
            self._admit_waiting(draft, now_s)
        plan = draft.build()
        if plan is not None:
            self._next_step += 1
            self.steps_in_flight.append(StepInFlight(plan.step, list(draft.runs), list(draft.preempts), runs_alone))
        return plan

    @property
    def isolated_request(self) -> Request | None:
        """Returns the suspect that runs alone in a step in flight, or None."""
        return next((step.runs[0] for step in self.steps_in_flight if step.is_isolated), None)

    def next_to_isolate(self) -> Request | None:
        """Returns the suspect that runs alone in a step in flight, or that the next plan would run or admit; None if
        there is none."""
        if not self.suspects or self.steps_in_flight:
            return self.isolated_request
        return self._choose_request_to_isolate(StepPlanBuilder(self._next_step, self.config.max_num_batched_tokens))

    def enqueue(self, request: Request) -> None:
        self.waiting.add(request)
        if self.remote_prefill_enabled and request.handoff is None:
            self._unrouted[request] = None

    def take_unrouted(self) -> list[Request]:
        """Returns the waiting requests that have entered the queue since the last call. For each of them, the caller
        decides where its prompt is computed."""
        unrouted, self._unrouted = self._unrouted, {}
        return [request for request in unrouted if request.status is RequestStatus.WAITING]

    def begin_commit(self, step: int) -> None:
        """Removes a step in flight because its result has arrived, and lifts its fences. Results come in order, one for
        each plan."""
        in_flight = self.steps_in_flight.popleft()
        assert in_flight.step == step, f"result of step {step} while {in_flight.step} is due"
        for request in [*in_flight.runs, *in_flight.preempts]:
            if request.planned_runs and request.planned_runs[0].step == step:
                request.planned_runs.popleft()
        self.pool.lift_fences(step)
        self.slots.lift_fences(step)

    def request_of_slot_epoch(self, slot_epoch: int) -> Request | None:
        """Returns the request that runs under this slot epoch, if any."""
        return self.allocator.by_slot_epoch.get(slot_epoch)

    def requeue_preempted(self, request: Request) -> None:
        """Puts a preempted request back into the queue. The worker has confirmed the preemption: no further events come
        for that slot epoch, and the request's tokens are final."""
        assert request.status is RequestStatus.PREEMPTING, "only a reply to a preempt requeues"
        self.preempting.remove(request)
        self._requeue(request)

    def remove(self, request: Request) -> None:
        """Takes a request out, whatever its state. Blocks and slot come back behind their fence."""
        match request.status:
            case RequestStatus.WAITING:
                self.waiting.remove(request)
            case RequestStatus.ASKED | RequestStatus.GRANTED:
                self.leases.abandon(request)
            case RequestStatus.OFFERED:
                self.outgoing_handoffs.withdraw_offer(request)
            case RequestStatus.RUNNING:
                self.running.remove(request)
            case RequestStatus.PREEMPTING:
                self.preempting.remove(request)
            case RequestStatus.FINISHED:
                raise AssertionError(f"{request.request_id} was removed before")
        self.suspects.discard(request)
        self._unrouted.pop(request, None)
        if request.slot is not None:
            self.allocator.release(request, fence_step=request.last_planned_step)
        request.set_status(RequestStatus.FINISHED)

    def start_remote_prefill(self, request: Request) -> None:
        """Takes the request out of the queue because a peer is asked to compute its prompt."""
        self.waiting.remove(request)
        request.set_status(RequestStatus.ASKED)

    def fall_back_to_local_prefill(self, request: Request) -> None:
        """Puts a request that waited for a peer back into the queue, to compute its prompt here. It becomes a suspect
        if it was part of too many crashes."""
        self.leases.leave_line(request)
        request.set_status(RequestStatus.WAITING)
        request.prefill_locally = True
        self.waiting.add(request)
        if scheduling_policy.must_run_alone(request):  # it may have been a peer's worker that died under it
            self.suspects.add(request)

    def leaves_room_for_earlier(self, request: Request) -> bool:
        """Returns whether the request may take a slot and blocks although earlier requests lack them: only if there is
        room for all of them. Both the queue and remote prefills take slots and blocks, and neither may overtake the
        other."""
        return self.allocator.has_room_with(request, self._in_line_before(request))

    def publish_computed(self, request: Request) -> None:
        self.allocator.cache_computed_blocks(request)
        self.allocator.free_blocks_before_window(request)  # blocks with a hash can still be found by it

    def _newest_step(self) -> int | None:
        return self.steps_in_flight[-1].step if self.steps_in_flight else None

    def _choose_request_to_isolate(self, draft: StepPlanBuilder) -> Request | None:
        """Returns the suspect that gets the next step for itself, so that a crash hurts no other request; None if there
        is none. It is the first suspect that runs, or else the first request in the queue if that is a suspect and
        there is room for it.

        A suspect that lacks blocks or waits for a peer's answer is not chosen. Other requests may hold what it waits
        for, so it must delay neither their steps nor the overlap of steps.
        """
        if not self.suspects:
            return None
        running = [suspect for suspect in self.suspects if suspect.status is RequestStatus.RUNNING]
        if running:
            return min(running, key=scheduling_policy.queue_key)
        first = self._next_waiting(draft, set())
        if first is None or not self._must_wait_for_isolation(first):
            return None
        return first if self.allocator.can_allocate(first) and self.leaves_room_for_earlier(first) else None

    def _must_wait_for_isolation(self, request: Request) -> bool:
        """Returns whether the request is a suspect that may only be admitted to a step of its own. A prompt that we
        compute for a peer need not wait: its admission only makes an offer."""
        return request in self.suspects and request.handoff is None

    def _plan_suspect(self, draft: StepPlanBuilder, suspect: Request, now_s: float) -> None:
        if suspect.status is RequestStatus.RUNNING:
            self._plan_run(draft, suspect, suspect.num_plannable_tokens)
        else:
            self._admit(draft, suspect, now_s)

    def _plan_running(self, draft: StepPlanBuilder, now_s: float) -> None:
        behind = []
        load = self._step_load() if self.config.num_draft_tokens else None
        for request in list(self.running):
            if request.status is RequestStatus.RUNNING and request not in self.suspects:
                if (num_to_plan := request.num_plannable_tokens) == 1:
                    self._plan_run(draft, request, num_to_plan, self._choose_num_drafts(request, load))
                else:
                    behind.append(request)
        for request in behind:
            self._admit_waiting(draft, now_s, before=request)
            if request.status is RequestStatus.RUNNING and draft.token_budget:
                self._plan_run(draft, request, request.num_plannable_tokens)

    def _step_load(self) -> scheduling_policy.StepLoad:
        """Returns the load of the step that is about to be planned, without drafts."""
        to_plan = [r.num_plannable_tokens for r in self.running if r.status is RequestStatus.RUNNING]
        rows, limit = sum(to_plan), self.config.max_num_batched_tokens
        next_request = self.waiting.first()
        if next_request is not None and self.allocator.can_allocate(next_request):
            rows = limit  # prompts will fill it
        return scheduling_policy.StepLoad(min(rows, limit), limit - min(rows, limit), self.draft_cost)

    def _choose_num_drafts(self, request: Request, load: scheduling_policy.StepLoad | None) -> int:
        if load is None or (limit := request.max_drafts_now) <= 0:
            return 0
        num_drafts = scheduling_policy.choose_num_drafts(
            limit, request.draft_acceptance, load, len(request.peer_draft_token_ids)
        )
        load.num_draft_rows_left -= num_drafts
        return num_drafts

    def _plan_run(self, draft: StepPlanBuilder, request: Request, num_to_plan: int, num_drafts: int = 0) -> None:
        planned_computed = request.planned_computed
        num_tokens = scheduling_policy.chunk_size(num_to_plan, draft.budget_for(request, planned_computed))
        if num_tokens == 0:
            return
        missing = self.pool.num_blocks_for(planned_computed + num_tokens) - len(request.block_ids)
        if missing > self.pool.num_available:
            draft.short_of_blocks = True
            # The steps in flight may need fewer blocks, if not all of their drafts are accepted.
            if not request.has_drafts_in_flight:
                self._preempt_for(draft, request, scheduling_policy.CapacityShortage(missing), same_priority=True)
            return
        if num_drafts:
            missing, num_drafts = self._fit_drafts_into_blocks(
                request, planned_computed + num_tokens, missing, num_drafts
            )
        elif request.handoff is not None and num_tokens == num_to_plan:
            num_drafts = request.max_drafts  # guesses for the peer, which it makes room for
        new_block_ids = self.pool.allocate(missing) if missing > 0 else []
        request.block_ids += new_block_ids
        if request.assign_pending:
            draft.add_assign(request)
            new_block_ids = []  # the assignment names them all
        draft.add_run(request, num_tokens, new_block_ids, num_drafts)

    def _fit_drafts_into_blocks(self, request: Request, end: int, missing: int, num_drafts: int) -> tuple[int, int]:
        """Returns the number of blocks to allocate, and how many drafts fit into them. A block is kept for each running
        request to grow into: drafts never cause a preemption."""
        more = self.pool.num_blocks_for(end + num_drafts) - len(request.block_ids)
        if more <= max(0, missing) or more + len(self.running) <= self.pool.num_available:
            return more, num_drafts
        num_free_tokens = (len(request.block_ids) + max(0, missing)) * self.pool.block_size - end
        return missing, min(num_drafts, num_free_tokens)

    def _grant_waiting_leases(self, draft: StepPlanBuilder) -> None:
        for request in list(self.leases.awaiting_blocks):
            if draft.short_of_blocks or draft.preempts:
                return
            if not self.leaves_room_for_earlier(request):
                return
            if self.leases.grant(request):
                self.leases.awaiting_blocks.remove(request)
            else:
                self._preempt_to_admit(draft, request, self.allocator.plan_allocation(request))

    def _admit_waiting(self, draft: StepPlanBuilder, now_s: float, before: Request | None = None) -> None:
        """Admits requests in the order of the queue (`queue_key`); with `before`, only requests of a higher priority
        than that one.

        A waiting request may be overtaken by later ones only in these cases:
          * It is a prompt for a peer that may not be offered yet (`OutgoingHandoffs.may_offer`). Later prompts for the same
            peer do not overtake it.
          * It needs logits of prompt rows, and this step has no such rows left (`prompt_logprob_budget`).
          * A peer computes the later one's prompt, and slots and blocks suffice for both (`leaves_room_for_earlier`).
        A request that lacks a slot or blocks, and a suspect that must run alone, are overtaken in no other case. Requests
        whose prompts peers compute wait in another queue (`leases.awaiting_blocks`). If several of them lack blocks, blocks
        are reserved for the first one only. `MAX_OVERTAKEN` in `onward/sim/invariants.py` checks how many later requests of
        the same priority may overtake one.
        """
        blocked_incarnations: set[str] = set()
        """Peers that must first answer for an earlier prompt. Only their own later prompts wait for that."""
        while draft.token_budget and not draft.short_of_blocks and not draft.preempts:
            request = self._next_waiting(draft, blocked_incarnations)
            if request is None or (before is not None and request.priority >= before.priority):
                return
            if self._must_wait_for_isolation(request):
                # It keeps its place: were later requests let in, there might never be room for it.
                self._allocation_or_preempt(draft, request)
                return
            if not self._admit(draft, request, now_s):
                return

    def _next_waiting(self, draft: StepPlanBuilder, blocked_incarnations: set[str]) -> Request | None:
        """Returns the first request of the queue that may be admitted. Skips requests whose peer must answer first
        (added to `blocked_incarnations`) and requests that need rows with logits when this step has none left. Skipped
        requests hold up no other request."""
        for request in self.waiting:
            key = request.handoff
            if key is not None and key.decode_incarnation in blocked_incarnations:
                continue
            if not draft.prompt_logprob_budget and request.first_logits_row is not None:
                continue
            if key is None or self.outgoing_handoffs.may_offer(key):
                return request
            blocked_incarnations.add(key.decode_incarnation)
        return None

    def _admit(self, draft: StepPlanBuilder, request: Request, now_s: float) -> bool:
        allocation = self._allocation_or_preempt(draft, request)
        if allocation is None:
            return False
        start = allocation.num_cached_blocks * self.pool.block_size
        num_tokens = scheduling_policy.chunk_size(len(request.token_ids) - start, draft.budget_for(request, start))
        if num_tokens == 0 or not self.leaves_room_for_earlier(request):
            return False
        self.waiting.remove(request)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(start, request.num_prompt)
        if request.recompute_cause is not None:
            if request.num_lost_tokens > start:
                self._recomputed.append((request.recompute_cause, request.num_lost_tokens - start))
            request.recompute_cause = None
        if request.handoff is not None:
            self.outgoing_handoffs.offer(request.handoff, request, allocation, now_s)
            return True
        self.allocator.allocate(request, allocation)
        self.allocator.start_running(request, now_s)
        draft.add_assign(request)
        draft.add_run(request, num_tokens, [])
        return True

    def _in_line_before(self, request: Request) -> Iterator[Request]:
        """Yields the earlier requests whose slots and blocks must stay free. These are all requests in the queue, and
        the first remote prefill that lacks blocks; later remote prefills are left out because such a prompt may take
        long."""
        if not self.remote_prefill_enabled:
            return
        key, first_short = scheduling_policy.queue_key(request), self.leases.first_short_of_blocks
        if first_short is not None and scheduling_policy.queue_key(first_short) < key:
            yield first_short
        for waiting in self.waiting:
            if scheduling_policy.queue_key(waiting) >= key:
                return
            if waiting.handoff is None:
                yield waiting

    def _allocation_or_preempt(self, draft: StepPlanBuilder, request: Request) -> PlannedAllocation | None:
        """Returns the allocation for a waiting request if there are a slot and blocks for it now. Otherwise returns
        None, and preempts requests of lower priority if that makes enough room."""
        allocation = self.allocator.plan_allocation(request)
        if allocation.fits and self.slots.num_free:
            return allocation
        self._preempt_to_admit(draft, request, allocation)
        return None

    def _preempt_to_admit(self, draft: StepPlanBuilder, request: Request, allocation: PlannedAllocation) -> None:
        """Asks for as much as `leaves_room_for_earlier` will: what is not enough for that would be taken in vain."""
        reserved_blocks = [
            self.allocator.plan_allocation(other).num_blocks_consumed + 1 for other in self._in_line_before(request)
        ]
        slots_coming = self.slots.num_free + self.slots.num_fenced + len(self.preempting)
        slots_missing = max(0, 1 + len(reserved_blocks) - slots_coming)
        shortage = scheduling_policy.CapacityShortage(
            allocation.num_new_blocks + sum(reserved_blocks), allocation.num_growth_blocks, slots_missing
        )
        # Blocks that the request would share are its own as soon as they are free.
        shared = self.pool.find_cached(allocation.block_hashes[: allocation.num_cached_blocks])
        self._preempt_for(draft, request, shortage, shared, same_priority=False)

    def _preempt_for(
        self,
        draft: StepPlanBuilder,
        needer: Request,
        shortage: scheduling_policy.CapacityShortage,
        shared: Sequence[int] = (),
        *,
        same_priority: bool,
    ) -> None:
        """Preempts as few as will do, seeing what is on its way back already: blocks that are only fenced come free
        by themselves, and taking the next victim meanwhile would free nothing."""
        reclaim = self.pool.estimate_reclaim(shared)
        reclaim.num_blocks += self.leases.num_returning_blocks
        for request in self.preempting:
            reclaim.add(request.held_block_ids)
        # A peer's prompt is done soon, and its transfer reads our blocks.
        own = (r for r in [*self.running, *self.allocator.awaiting_kv] if r.handoff is None)
        candidates = [r for r in own if r not in draft.assigns]
        for victim in scheduling_policy.choose_victims(
            needer, candidates, shortage, reclaim, same_priority=same_priority
        ):
            self._preempt(draft, victim)

    def _preempt(self, draft: StepPlanBuilder, victim: Request) -> None:
        if victim.status is RequestStatus.GRANTED:
            self.leases.abandon(victim)
            victim.set_status(RequestStatus.ASKED)
        elif victim.assign_pending:
            # The worker does not know of the request yet, so no reply has to be awaited.
            self.running.remove(victim)
            self._requeue(victim)
        else:
            self.running.remove(victim)
            victim.set_status(RequestStatus.PREEMPTING)
            self.preempting.add(victim)
            draft.add_preempt(victim)

    def _requeue(self, request: Request, cause: RecomputeCause = RecomputeCause.PREEMPTION) -> None:
        request.lose_kv(cause)
        self.allocator.release(request, fence_step=None)
        request.num_preemptions += cause is RecomputeCause.PREEMPTION
        request.set_status(RequestStatus.WAITING)
        self.enqueue(request)
