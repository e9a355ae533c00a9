"""Decides what each step does. There are no phases: a request catches up with its tokens, further in each step.

    plan:  1. running requests that need one more token (decoding), in the queue's order
           2. running requests that are further behind (prefilling), as far as the token budget goes; a waiting
              request of a higher priority is let in before them
           3. requests for which a peer asks for blocks, if there is a slot and room
           4. waiting requests, as long as there is a slot, room and budget

The scheduler decides; who has which slot and block is in `seating`, which blocks a peer may write in `leases`, and which
prompts we compute for peers in `offers`. It knows nothing of what a token means, of clients, of protocols, or of wires.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onward.config import EngineConfig
from onward.engine import policy
from onward.engine.block_pool import BlockPool
from onward.engine.leases import Leases
from onward.engine.offers import Offers, decode_of
from onward.engine.plan_draft import PlanDraft
from onward.engine.request import Request, Status
from onward.engine.request_queue import RequestQueue
from onward.engine.seating import Room, Seating, forget_place
from onward.engine.slots import SlotTable
from onward.proto.step import StepPlan

MAX_GONE_UNDECIDED = 64
"""Nothing is decided while there is no worker, and those who have ended meanwhile are forgotten from so many on."""


@dataclass(slots=True, frozen=True)
class StepInFlight:
    step: int
    runs: list[Request]
    preempts: list[Request]
    runs_alone: bool
    """It belongs to a suspect. That stays so when the suspect ends before its step does."""


class Scheduler:
    def __init__(self, config: EngineConfig, pool: BlockPool, incarnation: str = "") -> None:
        self.config = config
        self.seating = Seating(config, pool)
        self.leases = Leases(self.seating, incarnation)
        self.offers = Offers(self.seating, config.max_num_batched_tokens)
        self.waiting = RequestQueue()
        self.asks_peers = False
        """Whether prompts may be computed elsewhere."""
        self.undecided: list[Request] = []
        """New in the queue: nobody has decided yet where their prompt is computed."""
        self.preempting: set[Request] = set()
        self.suspects: set[Request] = set()
        """Requests that must run alone: the worker died under them twice, without progress. They keep their place in the
        queue."""
        self.draft_cost = 0.0
        """Of guessing one token, see `WorkerHello`."""
        self.steps_in_flight: deque[StepInFlight] = deque()
        self._next_step = 1

    @property
    def pool(self) -> BlockPool:
        return self.seating.pool

    @property
    def slots(self) -> SlotTable:
        return self.seating.slots

    @property
    def running(self) -> RequestQueue:
        return self.seating.running

    def renew(self, pool: BlockPool) -> list[Request]:
        """The worker is dead, and all that was in its memory. Everyone goes back to the queue with the tokens so far.
        Returns the requests that a step in flight ran. One that was only preempted by it cannot have caused the death."""
        assert not self.offers.offered, "hand-overs end before the memory does"
        in_flight = list(dict.fromkeys(r for step in self.steps_in_flight for r in step.runs))
        for request in [*self.running, *self.preempting]:
            forget_place(request)
            request.move_to(Status.WAITING)
            self.enqueue(request)
        self.leases.renew()
        self.seating.renew(pool)
        self.preempting.clear()
        self.steps_in_flight.clear()
        return [request for request in in_flight if request.status is not Status.FINISHED]

    def plan(self, now_s: float) -> StepPlan | None:
        if len(self.steps_in_flight) >= self.config.max_steps_in_flight:
            return None
        if any(step.runs_alone for step in self.steps_in_flight):
            return None
        draft = PlanDraft(self._next_step, self.config.max_num_batched_tokens)
        suspect = self._next_alone(draft)
        if suspect is not None and self.steps_in_flight:
            return None  # its step waits until no other one is in flight
        if suspect is not None:
            self._plan_suspect(draft, suspect, now_s)
        runs_alone = bool(draft.runs)
        if not runs_alone:
            self._continue_running(draft, now_s)
            self._lease_to_peers(draft)
            self._admit_waiting(draft, now_s)
        plan = draft.seal()
        if plan is not None:
            self._next_step += 1
            self.steps_in_flight.append(StepInFlight(plan.step, list(draft.runs), list(draft.preempts), runs_alone))
        return plan

    @property
    def runs_alone(self) -> Request | None:
        """The suspect whose step is in flight."""
        return next((step.runs[0] for step in self.steps_in_flight if step.runs_alone), None)

    def next_alone(self) -> Request | None:
        """The suspect that runs, or that the next plan is about."""
        if not self.suspects or self.steps_in_flight:
            return self.runs_alone
        return self._next_alone(PlanDraft(self._next_step, self.config.max_num_batched_tokens))

    def enqueue(self, request: Request) -> None:
        self.waiting.add(request)
        if self.asks_peers and request.handover is None:
            if len(self.undecided) >= MAX_GONE_UNDECIDED + len(self.waiting):
                self.undecided = [one for one in self.undecided if one.status is Status.WAITING]
            self.undecided.append(request)

    def begin_commit(self, step: int) -> None:
        """A result has come. Results come in order, one for each plan."""
        in_flight = self.steps_in_flight.popleft()
        assert in_flight.step == step, f"result of step {step} while {in_flight.step} is due"
        for request in [*in_flight.runs, *in_flight.preempts]:
            if request.in_flight and request.in_flight[0].step == step:
                request.in_flight.popleft()
        self.pool.pass_fence(step)
        self.slots.pass_fence(step)

    def find(self, slot_epoch: int) -> Request | None:
        """Who that epoch belongs to, if it still runs under it."""
        return self.seating.by_epoch.get(slot_epoch)

    def requeue_preempted(self, request: Request) -> None:
        """The worker has answered: nothing more will come from that epoch, and the token list is fixed."""
        assert request.status is Status.PREEMPTING, "only a reply to a preempt requeues"
        self.preempting.remove(request)
        self._requeue(request)

    def remove(self, request: Request) -> None:
        """Takes a request out, whatever its state. Blocks and slot come back behind their fence."""
        match request.status:
            case Status.WAITING:
                self.waiting.remove(request)
            case Status.ASKED:
                self.leases.leave(request)
                self.leases.abandoned.append(request)
            case Status.GRANTED:
                self.leases.take_back(request)
                self.leases.abandoned.append(request)
            case Status.OFFERED:
                self.offers.offered.remove(request)
            case Status.RUNNING:
                self.running.remove(request)
            case Status.PREEMPTING:
                self.preempting.remove(request)
            case Status.FINISHED:
                raise AssertionError(f"{request.request_id} was removed before")
        self.suspects.discard(request)
        if request.slot is not None:
            self.seating.vacate(request, fence_step=request.last_planned_step)
        request.move_to(Status.FINISHED)

    def hand_out(self, request: Request) -> None:
        """Out of the queue: a peer is asked to compute this one's prompt."""
        self.waiting.remove(request)
        request.move_to(Status.ASKED)

    def take_home(self, request: Request) -> None:
        """Back into the queue: its prompt is computed here."""
        self.leases.leave(request)
        request.move_to(Status.WAITING)
        request.prefills_here = True
        self.waiting.add(request)
        if policy.must_run_alone(request):  # it may have been a peer's worker that died under it
            self.suspects.add(request)

    def may_seat(self, request: Request) -> bool:
        """Whether it may have a slot and blocks here although others that come before it lack them: only if there is room
        for all. They are taken by two kinds, those in the queue and those whose KV a peer brings; neither passes by the
        other."""
        return self.seating.has_room_beside(request, self._in_line_before(request))

    def end_push(self, block_ids: list[int]) -> None:
        """A transfer reads these no more."""
        newest = self.steps_in_flight[-1].step if self.steps_in_flight else None
        self.pool.end_sending(block_ids, newest)

    def publish_computed(self, request: Request) -> None:
        self.seating.publish_computed(request)

    def _next_alone(self, draft: PlanDraft) -> Request | None:
        """The suspect that gets the next step for itself, so that a crash hurts no other request: the first that runs, or
        the first in the queue if it is a suspect and there is room for it.

        A suspect that cannot run, for want of blocks or of a peer's answer, costs the others neither a step nor the
        overlap: what it waits for may be theirs to give.
        """
        if not self.suspects:
            return None
        running = [suspect for suspect in self.suspects if suspect.status is Status.RUNNING]
        if running:
            return min(running, key=policy.queue_key)
        first = self._next_waiting(draft, set())
        if first is None or not self._waits_to_run_alone(first):
            return None
        return first if self.seating.has_room(first) and self.may_seat(first) else None

    def _waits_to_run_alone(self, request: Request) -> bool:
        """A prompt that we compute for a peer is offered first, and that takes no step."""
        return request in self.suspects and request.handover is None

    def _plan_suspect(self, draft: PlanDraft, suspect: Request, now_s: float) -> None:
        if suspect.status is Status.RUNNING:
            self._continue(draft, suspect, suspect.num_to_plan)
        else:
            self._admit(draft, suspect, now_s)

    def _continue_running(self, draft: PlanDraft, now_s: float) -> None:
        behind = []
        load = self._load() if self.config.num_drafts else None
        for request in list(self.running):
            if request.status is Status.RUNNING and request not in self.suspects:
                if (num_to_plan := request.num_to_plan) == 1:
                    self._continue(draft, request, num_to_plan, self._num_drafts(request, load))
                else:
                    behind.append(request)
        for request in behind:
            self._admit_waiting(draft, now_s, before=request)
            if request.status is Status.RUNNING and draft.budget:
                self._continue(draft, request, request.num_to_plan)

    def _load(self) -> policy.Load:
        """Of the step that is about to be planned, drafts not counted."""
        to_plan = [r.num_to_plan for r in self.running if r.status is Status.RUNNING]
        rows, limit = sum(to_plan), self.config.max_num_batched_tokens
        next_in = self.waiting.first()
        if next_in is not None and self.seating.has_room(next_in):
            rows = limit  # prompts will fill it
        return policy.Load(min(rows, limit), limit - min(rows, limit), self.draft_cost)

    def _num_drafts(self, request: Request, load: policy.Load | None) -> int:
        if load is None or (limit := request.num_draftable) <= 0:
            return 0
        num_drafts = policy.num_drafts(limit, request.drafts, load, len(request.given_drafts))
        load.rows_left -= num_drafts
        return num_drafts

    def _continue(self, draft: PlanDraft, request: Request, num_to_plan: int, num_drafts: int = 0) -> None:
        planned_computed = request.planned_computed
        num_tokens = policy.chunk_size(num_to_plan, draft.budget_for(request, planned_computed))
        if num_tokens == 0:
            return
        missing = self.pool.blocks_for(planned_computed + num_tokens) - len(request.block_ids)
        if missing > self.pool.num_available:
            draft.short_of_blocks = True
            # What is in flight may turn out to need less, if not all of its drafts are right.
            if not request.has_drafts_in_flight:
                self._make_room(draft, request, policy.Shortage(missing), same_priority=True)
            return
        if num_drafts:
            missing, num_drafts = self._with_drafts(request, planned_computed + num_tokens, missing, num_drafts)
        elif request.handover is not None and num_tokens == num_to_plan:
            num_drafts = request.max_drafts  # guesses for the peer, which it makes room for
        new_block_ids = self.pool.allocate(missing) if missing > 0 else []
        request.block_ids += new_block_ids
        if request.awaits_assignment:
            draft.assign(request)
            new_block_ids = []  # the assignment names them all
        draft.run(request, num_tokens, new_block_ids, num_drafts)

    def _with_drafts(self, request: Request, end: int, missing: int, num_drafts: int) -> tuple[int, int]:
        """Blocks to allocate, and how many drafts they then hold. Each running request keeps a block to grow into:
        nobody is preempted for the sake of a guess."""
        more = self.pool.blocks_for(end + num_drafts) - len(request.block_ids)
        if more <= max(0, missing) or more + len(self.running) <= self.pool.num_available:
            return more, num_drafts
        room = (len(request.block_ids) + max(0, missing)) * self.pool.block_size - end
        return missing, min(num_drafts, room)

    def _lease_to_peers(self, draft: PlanDraft) -> None:
        for request in list(self.leases.wanted):
            if draft.short_of_blocks or draft.preempts:
                return
            if not self.may_seat(request):
                return
            if self.leases.grant(request):
                self.leases.wanted.remove(request)
            else:
                self._make_room_to_admit(draft, request, self.seating.find_room(request))

    def _admit_waiting(self, draft: PlanDraft, now_s: float, before: Request | None = None) -> None:
        """In the queue's order; with `before`, only those of a higher priority than that one."""
        held_up: set[str] = set()
        """Peers that must first answer for an earlier prompt. They hold up nobody else's."""
        while draft.budget and not draft.short_of_blocks and not draft.preempts:
            request = self._next_waiting(draft, held_up)
            if request is None or (before is not None and request.priority >= before.priority):
                return
            if self._waits_to_run_alone(request):
                # It keeps its place: were later requests let in, there might never be room for it.
                self._make_room_if_short(draft, request)
                return
            if not self._admit(draft, request, now_s):
                return

    def _next_waiting(self, draft: PlanDraft, held_up: set[str]) -> Request | None:
        """The first in the queue, without requests whose peer must answer first (added to `held_up`) and requests that need
        rows with logits, if this step has no more of them. Both hold up no other request."""
        for request in self.waiting:
            if decode_of(request) in held_up:
                continue
            if not draft.prompt_logprob_rows and request.first_reported_row is not None:
                continue
            if request.handover is None or self.offers.may_offer(request.handover):
                return request
            held_up.add(request.handover.decode)
        return None

    def _admit(self, draft: PlanDraft, request: Request, now_s: float) -> bool:
        room = self._make_room_if_short(draft, request)
        if room is None:
            return False
        start = room.hits * self.pool.block_size
        num_tokens = policy.chunk_size(len(request.token_ids) - start, draft.budget_for(request, start))
        if num_tokens == 0 or not self.may_seat(request):
            return False
        self.waiting.remove(request)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(start, request.num_prompt)
        if request.handover is not None:
            self.offers.offer(request, room, now_s)
            return True
        self.seating.occupy(request, room)
        self.seating.start(request, now_s)
        draft.assign(request)
        draft.run(request, num_tokens, [])
        return True

    def _in_line_before(self, request: Request) -> Iterator[Request]:
        """Requests that come before this one, and whose slot and blocks must stay free: all in the queue, since each takes
        them in its turn, and the first of those whose prompts peers compute, since such a prompt may take long."""
        if not self.asks_peers:
            return
        key, short = policy.queue_key(request), self.leases.first_short
        if short is not None and policy.queue_key(short) < key:
            yield short
        for waiting in self.waiting:
            if policy.queue_key(waiting) >= key:
                return
            if waiting.handover is None:
                yield waiting

    def _make_room_if_short(self, draft: PlanDraft, request: Request) -> Room | None:
        """The room for a waiting request. None if there is not enough; lower priorities may then be preempted for it."""
        room = self.seating.find_room(request)
        if room.enough and self.slots.num_free:
            return room
        self._make_room_to_admit(draft, request, room)
        return None

    def _make_room_to_admit(self, draft: PlanDraft, request: Request, room: Room) -> None:
        """Asks for as much as `may_seat` will: what is not enough for that would be taken in vain."""
        kept = [self.seating.find_room(other).taken + 1 for other in self._in_line_before(request)]
        slots_coming = self.slots.num_free + self.slots.num_fenced + len(self.preempting)
        slots_missing = max(0, 1 + len(kept) - slots_coming)
        shortage = policy.Shortage(room.needed + sum(kept), room.growing, slots_missing)
        # Blocks that the request would share are its own as soon as they are free.
        shared = self.pool.find(room.names[: room.hits])
        self._make_room(draft, request, shortage, shared, same_priority=False)

    def _make_room(
        self,
        draft: PlanDraft,
        needer: Request,
        shortage: policy.Shortage,
        shared: Sequence[int] = (),
        *,
        same_priority: bool,
    ) -> None:
        """Preempts as few as will do, seeing what is on its way back already: blocks that are only fenced come free
        by themselves, and taking the next victim meanwhile would free nothing."""
        reclaim = self.pool.reclaim(shared)
        reclaim.num_blocks += self.leases.num_coming
        for request in self.preempting:
            reclaim.add(request.block_ids)
        # A peer's prompt is done soon, and its transfer reads our blocks.
        own = (r for r in [*self.running, *self.seating.granted] if r.handover is None)
        candidates = [r for r in own if r not in draft.assigns]
        for victim in policy.choose_victims(needer, candidates, shortage, reclaim, same_priority=same_priority):
            self._preempt(draft, victim)

    def _preempt(self, draft: PlanDraft, victim: Request) -> None:
        if victim.status is Status.GRANTED:
            self.leases.take_back(victim)
            victim.move_to(Status.ASKED)
            self.leases.abandoned.append(victim)
        elif victim.awaits_assignment:
            # The worker has not been told of it, so there is nothing to wait for.
            self.running.remove(victim)
            self._requeue(victim)
        else:
            self.running.remove(victim)
            victim.move_to(Status.PREEMPTING)
            self.preempting.add(victim)
            draft.preempt(victim)

    def _requeue(self, request: Request) -> None:
        self.seating.vacate(request, fence_step=None)
        request.num_preemptions += 1
        request.move_to(Status.WAITING)
        self.enqueue(request)
