"""Decides what each step does. There are no phases: a request catches up with its tokens, further in each step.

    plan:  1. running requests that need one more token (decoding), in the queue's order
           2. running requests that are further behind (prefilling), as far as the token budget goes; a waiting
              request of a higher priority is let in before them
           3. waiting requests, as long as there is a slot, room and budget

The scheduler owns blocks and slots. It knows nothing of what a token means, of clients, or of wires.
"""

from collections import deque
from dataclasses import dataclass

from onward.config import EngineConfig
from onward.engine import policy
from onward.engine.block_pool import BlockPool
from onward.engine.plan_draft import PlanDraft
from onward.engine.request import Request, Status
from onward.engine.request_queue import RequestQueue
from onward.engine.slots import SlotTable
from onward.proto.step import StepPlan


@dataclass(slots=True, frozen=True)
class StepInFlight:
    step: int
    requests: list[Request]


class Scheduler:
    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self.config = config
        self.waiting = RequestQueue()
        self.running = RequestQueue()
        self.preempting: set[Request] = set()
        self.suspects: set[Request] = set()
        """Requests that must run alone: the worker died under them twice, without progress."""
        self.steps_in_flight: deque[StepInFlight] = deque()
        self._by_slot_epoch: dict[int, Request] = {}
        self._next_step = 1
        self._next_slot_epoch = 1
        self.pool = pool
        self.slots = SlotTable(config.max_num_seqs)

    def renew(self, pool: BlockPool) -> list[Request]:
        """The worker is dead, and all that was in its memory. Everyone goes back to the queue with the tokens so far.
        Returns those that had a part in a step in flight."""
        in_flight = list(dict.fromkeys(r for step in self.steps_in_flight for r in step.requests))
        for request in [*self.running, *self.preempting]:
            _forget_place(request)
            request.move_to(Status.WAITING)
            self.waiting.add(request)
        self.running = RequestQueue()
        self.preempting.clear()
        self.steps_in_flight.clear()
        self._by_slot_epoch.clear()
        self.pool = pool
        self.slots = SlotTable(self.config.max_num_seqs)
        return [request for request in in_flight if request.status is not Status.FINISHED]

    def plan(self, now_s: float) -> StepPlan | None:
        if len(self.steps_in_flight) >= self.config.max_steps_in_flight:
            return None
        if self.suspects and self.steps_in_flight:
            return None
        draft = PlanDraft(self._next_step, self.config.max_num_batched_tokens)
        if not self._plan_alone(draft, now_s):
            self._continue_running(draft, now_s)
            self._admit_waiting(draft, now_s)
        sealed = draft.seal()
        if sealed is None:
            return None
        plan, requests = sealed
        self._next_step += 1
        self.steps_in_flight.append(StepInFlight(plan.step, requests))
        return plan

    def begin_commit(self, step: int) -> None:
        """A result has come. Results come in order, one for each plan."""
        in_flight = self.steps_in_flight.popleft()
        assert in_flight.step == step, f"result of step {step} while {in_flight.step} is due"
        for request in in_flight.requests:
            if request.in_flight and request.in_flight[0].step == step:
                request.in_flight.popleft()
        self.pool.pass_fence(step)
        self.slots.pass_fence(step)

    def find(self, slot_epoch: int) -> Request | None:
        """Who that epoch belongs to, if it still runs under it."""
        return self._by_slot_epoch.get(slot_epoch)

    def requeue_preempted(self, request: Request) -> None:
        """The worker has answered: nothing more will come from that epoch, and the token list is fixed."""
        assert request.status is Status.PREEMPTING, "only a reply to a preempt requeues"
        self.preempting.remove(request)
        self._vacate(request, fence_step=None)
        request.num_preemptions += 1
        request.move_to(Status.WAITING)
        self.waiting.add(request)

    def remove(self, request: Request) -> None:
        """Takes a request out, whatever its state. Blocks and slot come back behind their fence."""
        match request.status:
            case Status.WAITING:
                self.waiting.remove(request)
            case Status.RUNNING:
                self.running.remove(request)
            case Status.PREEMPTING:
                self.preempting.remove(request)
            case Status.FINISHED:
                raise AssertionError(f"{request.request_id} was removed before")
        self.suspects.discard(request)
        if request.slot is not None:
            self._vacate(request, fence_step=request.last_planned_step)
        request.move_to(Status.FINISHED)

    def publish_computed(self, request: Request) -> None:
        """Names the blocks whose KV is computed to the end, so that others can share them."""
        size = self.pool.block_size
        tokens = request.num_computed if self.config.output_caching else min(request.num_computed, request.num_prompt)
        num_full = tokens // size if self.config.prefix_caching else 0
        if num_full > request.num_published:
            names = request.hash_chain(size, num_full)
            for index in range(request.num_published, num_full):
                self.pool.publish(request.block_ids[index], names[index])
            request.num_published = num_full

    def _plan_alone(self, draft: PlanDraft, now_s: float) -> bool:
        """A suspect gets the step for itself, so that a crash hurts nobody else."""
        if not self.suspects:
            return False
        suspect = min(self.suspects, key=policy.queue_key)
        if suspect.status is Status.WAITING and not self._admit(draft, suspect, now_s):
            return False
        if suspect.status is Status.RUNNING and suspect not in draft.runs:
            self._continue(draft, suspect)
        return bool(draft.runs)

    def _continue_running(self, draft: PlanDraft, now_s: float) -> None:
        behind = []
        for request in list(self.running):
            if request.status is Status.RUNNING and request not in self.suspects:
                if request.num_to_plan == 1:
                    self._continue(draft, request)
                else:
                    behind.append(request)
        for request in behind:
            self._admit_waiting(draft, now_s, before=request)
            if request.status is Status.RUNNING and draft.budget:
                self._continue(draft, request)

    def _continue(self, draft: PlanDraft, request: Request) -> None:
        num_tokens = policy.chunk_size(request.num_to_plan, draft.budget_for(request))
        if num_tokens == 0:
            return
        missing = self.pool.blocks_for(request.planned_computed + num_tokens) - len(request.block_ids)
        if missing > self.pool.num_available:
            draft.short_of_blocks = True
            self._make_room(draft, request, missing, same_priority=True)
            return
        new_block_ids = self.pool.allocate(missing) if missing > 0 else []
        request.block_ids += new_block_ids
        draft.run(request, num_tokens, new_block_ids)

    def _admit_waiting(self, draft: PlanDraft, now_s: float, before: Request | None = None) -> None:
        """In the queue's order; with `before`, only those of a higher priority than that one."""
        while draft.budget and not draft.short_of_blocks and not draft.preempts:
            request = next((r for r in self.waiting if r not in self.suspects), None)
            if request is None or (before is not None and request.priority >= before.priority):
                return
            if not self._admit(draft, request, now_s):
                return

    def _admit(self, draft: PlanDraft, request: Request, now_s: float) -> bool:
        # All but the last token may come from the cache: its logits are needed, so it is always computed.
        #   |-- hits: shared blocks --|-- needed: own blocks --|
        #   0              hits * block_size          blocks_for(len(token_ids))
        size = self.pool.block_size
        may_hit = self.config.prefix_caching and not request.wants_prompt_logprobs
        max_hits = (len(request.token_ids) - 1) // size if may_hit else 0
        names = request.hash_chain(size, max_hits)
        hits, hits_available = self.pool.hit_length(names)
        needed = self.pool.blocks_for(len(request.token_ids)) - hits
        room = policy.may_admit(needed, self.pool.num_available - hits_available, len(self.running))
        if not room or not self.slots.num_free:
            short = needed + len(self.running) + hits_available if not room else 0
            self._make_room(draft, request, short, same_priority=False)
            return False
        num_tokens = policy.chunk_size(len(request.token_ids) - hits * size, draft.budget_for(request))
        if num_tokens == 0:
            return False
        request.block_ids = self.pool.acquire(names[:hits]) + self.pool.allocate(needed)
        request.num_published = hits
        request.num_computed = hits * size
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(hits * size, request.num_prompt)
        self._seat(request, now_s)
        draft.assign(request)
        draft.run(request, num_tokens, [])
        return True

    def _seat(self, request: Request, now_s: float) -> None:
        self.waiting.remove(request)
        request.slot = self.slots.take()
        request.slot_epoch = self._next_slot_epoch
        self._next_slot_epoch += 1
        self._by_slot_epoch[request.slot_epoch] = request
        if request.scheduled_s is None:
            request.scheduled_s = now_s
        request.move_to(Status.RUNNING)
        self.running.add(request)

    def _make_room(self, draft: PlanDraft, needer: Request, blocks: int, *, same_priority: bool) -> None:
        """Preempts as few as will do, seeing what is on its way back already: blocks that are only fenced come free
        by themselves, and taking the next victim meanwhile would free nothing."""
        frees = self._frees_when_preempted
        coming = self.pool.num_available + self.pool.num_fenced + sum(frees(r) for r in self.preempting)
        slot_coming = self.slots.num_free + self.slots.num_fenced + len(self.preempting) > 0
        while coming < blocks or not slot_coming:
            candidates = [r for r in self.running if r not in draft.assigns]
            victim = policy.choose_victim(needer, candidates, frees, same_priority=same_priority)
            if victim is None:
                return
            coming += frees(victim)
            slot_coming = True
            self.running.remove(victim)
            victim.move_to(Status.PREEMPTING)
            self.preempting.add(victim)
            draft.preempt(victim)

    def _frees_when_preempted(self, request: Request) -> int:
        return self.pool.num_exclusive(request.block_ids)

    def _vacate(self, request: Request, fence_step: int | None) -> None:
        assert request.slot is not None, "it had a slot"
        self.slots.give_back(request.slot, fence_step)
        self.pool.release(request.block_ids, fence_step)
        del self._by_slot_epoch[request.slot_epoch]
        _forget_place(request)


def _forget_place(request: Request) -> None:
    request.prompt_logprobs = None
    request.slot = None
    request.block_ids = []
    request.num_computed = 0
    request.num_published = 0
    request.in_flight.clear()
