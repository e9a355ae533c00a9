"""Deliberate bugs of the scheduler: which requests are charged, when a suspect has its turn, and which are preempted."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from onward.api.engine_link.request_tracker import ChoiceSubmission, RequestTracker, TrackerActions
from onward.engine.core import EngineCore
from onward.engine.main import EngineProcess
from onward.engine.request import Request
from onward.engine.scheduling import request_queue, scheduler, scheduling_policy
from onward.engine.scheduling.block_pool import BlockPool, ReclaimEstimate
from onward.engine.scheduling.scheduler import Scheduler
from onward.engine.scheduling.slot_and_block_allocator import SlotAndBlockAllocator, SlotPool
from onward.engine.scheduling.step_plan_builder import StepPlanBuilder
from onward.proto.engine import Submit
from onward.proto.step import StepPlan
from tests.sabotage.patches import Patches, Sabotage

ARRIVAL = "tests/engine/test_arrival.py::"
DEATHS = "tests/api/test_engine_deaths.py::"
KILLER = "test_a_request_that_kills_every_engine_is_refused_after_four_and_all_others_complete"
HANDOFFS = "tests/engine/test_handoffs.py::"
SUSPECTS = "tests/engine/test_suspects.py::"
VICTIMS = "tests/engine/test_victims.py::"


def _pass_suspects_by(patch: Patches) -> None:
    def next_waiting(
        original: Callable, self: Scheduler, draft: StepPlanBuilder, blocked_incarnations: set[str]
    ) -> Request | None:
        first = original(self, draft, blocked_incarnations)
        if first not in self.suspects or self.allocator.can_allocate(first):
            return first
        return next((request for request in self.waiting if request not in self.suspects), None)

    patch.around(Scheduler, "_next_waiting", next_waiting)


def _let_suspects_pass(patch: Patches) -> None:
    def next_alone(original: Callable, self: Scheduler, draft: StepPlanBuilder) -> Request | None:
        waiting = sorted(self.suspects & set(self.waiting), key=scheduling_policy.queue_key)
        return original(self, draft) or next((r for r in waiting if self.allocator.can_allocate(r)), None)

    patch.around(Scheduler, "_choose_request_to_isolate", next_alone)


def _give_a_suspect_s_blocks_to_peers(patch: Patches) -> None:
    def in_line(original: Callable, self: Scheduler, request: Request) -> list[Request]:
        line = list(original(self, request))
        # A request of the queue behind the suspect would keep the blocks in its stead.
        return [one for one in line if one not in self.waiting] if self.suspects.intersection(line) else line

    patch.around(Scheduler, "_in_line_before", in_line)


def _count_blocks_and_no_slots(patch: Patches) -> None:
    def has_room(original: Callable, self: SlotAndBlockAllocator, request: Request, others: Iterable[Request]) -> bool:
        slots, self.slots = self.slots, SlotPool(1000)
        try:
            return original(self, request, others)
        finally:
            self.slots = slots

    patch.around(SlotAndBlockAllocator, "has_room_with", has_room)


def _keep_room_for_the_first_only(patch: Patches) -> None:
    def in_line(original: Callable, self: Scheduler, request: Request) -> list[Request]:
        return sorted(original(self, request), key=scheduling_policy.queue_key)[:1]

    patch.around(Scheduler, "_in_line_before", in_line)


def _preempt_for_one_slot(patch: Patches) -> None:
    def is_met(original: Callable, self: scheduling_policy.CapacityShortage, num_blocks: int, num_victims: int) -> bool:
        return original(replace(self, slots=min(1, self.slots)), num_blocks, num_victims)

    patch.around(scheduling_policy.CapacityShortage, "is_met", is_met)


def _no_overlap_while_a_suspect_waits(patch: Patches) -> None:
    def plan(original: Callable, self: Scheduler, now_s: float) -> StepPlan | None:
        return None if self.suspects and self.steps_in_flight else original(self, now_s)

    patch.around(Scheduler, "plan", plan)


def _forget_that_a_step_runs_alone(patch: Patches) -> None:
    def in_flight(original: Callable, step: int, runs: list, preempts: list, runs_alone: bool) -> object:
        return original(step, runs, preempts, False)

    patch.around(scheduler, "StepInFlight", in_flight)


def _charge_the_preempted(patch: Patches) -> None:
    def in_flight(original: Callable, self: Scheduler) -> list[Request]:
        preempted = [request for step in self.steps_in_flight for request in step.preempts]
        return [*original(self), *preempted]

    patch.around(Scheduler, "requests_in_flight", in_flight)


def _preempt_without_enough_room(patch: Patches) -> None:
    def choose(
        original: Callable,
        needer: Request,
        running: list[Request],
        shortage: scheduling_policy.CapacityShortage,
        reclaim: ReclaimEstimate,
        *,
        same_priority: bool,
    ) -> list[Request]:
        if shortage.is_met(reclaim.num_blocks, 0):
            return []
        found = original(needer, running, shortage, reclaim, same_priority=same_priority)
        return found or [request for request in running if request.priority > needer.priority]

    patch.around(scheduling_policy, "choose_victims", choose)


def _count_every_block_of_a_victim(patch: Patches) -> None:
    patch.put(ReclaimEstimate, "_is_freed", lambda self, block: True)


def _spare_no_victim(patch: Patches) -> None:
    def drop(original: Callable, self: ReclaimEstimate, blocks: list[int]) -> None:
        self.num_blocks = -len(self._holders)

    patch.around(ReclaimEstimate, "undo_add", drop)


def _victims_grow(patch: Patches) -> None:
    def is_met(original: Callable, self: scheduling_policy.CapacityShortage, num_blocks: int, num_victims: int) -> bool:
        return original(self, num_blocks - min(self.num_growth_blocks, num_victims), num_victims)

    patch.around(scheduling_policy.CapacityShortage, "is_met", is_met)


def _count_shared_blocks_as_room(patch: Patches) -> None:
    patch.around(BlockPool, "estimate_reclaim", lambda original, self, kept=(): original(self))


def _forget_the_first_in_line(patch: Patches) -> None:
    def make_room(original: Callable, self: Scheduler, *args: object) -> None:
        asks_peers, self.remote_prefill_enabled = self.remote_prefill_enabled, False
        original(self, *args)
        self.remote_prefill_enabled = asks_peers

    patch.around(Scheduler, "_preempt_to_admit", make_room)


def _believe_any_waiting_time(patch: Patches) -> None:
    patch.put(scheduling_policy, "credited_arrival_s", lambda now_s, waited_s: now_s - waited_s)


def _forget_earlier_waiting(patch: Patches) -> None:
    patch.put(scheduling_policy, "credited_arrival_s", lambda now_s, waited_s: now_s)


def _settle_ties_by_id(patch: Patches) -> None:
    def queue_key(original: Callable, request: Request) -> tuple:
        return request.priority, request.arrival_s, 0, request.request_id

    for module in (scheduling_policy, request_queue):
        patch.around(module, "queue_key", queue_key)


def _a_resubmission_comes_last(patch: Patches) -> None:
    def submit(original: Callable, self: EngineCore, owner: str, message: Submit, now_s: float) -> None:
        known = self._live.get(message.request_id)
        if known is not None and known.epoch < message.epoch:
            self.scheduler.remove(known)
            self._live.remove(known)
        original(self, owner, message, now_s)

    patch.around(EngineCore, "_submit", submit)


def _engine_deaths_are_not_charged(patch: Patches) -> None:
    patch.around(RequestTracker, "_count_engine_crash", lambda original, self, submission, alone, actions: None)


def _all_are_charged_alone(patch: Patches) -> None:
    def charge(
        original: Callable,
        self: RequestTracker,
        submission: ChoiceSubmission,
        alone: str | None,
        actions: TrackerActions,
    ) -> None:
        original(self, submission, submission.spec.request_id, actions)

    patch.around(RequestTracker, "_count_engine_crash", charge)


def _the_engine_does_not_say_what_it_runs_alone(patch: Patches) -> None:
    patch.around(EngineProcess, "_announce_isolated_request", lambda original, self, request_id: None)


def _engine_deaths_make_no_suspects(patch: Patches) -> None:
    patch.around(
        scheduling_policy, "is_suspect", lambda original, worker_crashes, engine_crashes: original(worker_crashes, 0)
    )


TABLE = [
    Sabotage(
        "engine-deaths-not-charged",
        "the death of an engine is charged to no request",
        _engine_deaths_are_not_charged,
        [
            DEATHS + "test_a_request_under_which_two_engines_died_alone_is_refused_and_no_other_one",
            DEATHS + KILLER + "[1]",
        ],
    ),
    Sabotage(
        "all-charged-alone",
        "the death of an engine is charged to all of its requests as if each had run alone",
        _all_are_charged_alone,
        [
            DEATHS + "test_requests_that_shared_an_engine_become_suspects_and_are_never_refused",
            DEATHS + KILLER + "[1]",
        ],
    ),
    Sabotage(
        "alone-not-told",
        "the engine does not tell the supervisor which request it runs alone",
        _the_engine_does_not_say_what_it_runs_alone,
        [DEATHS + KILLER + "[1]", DEATHS + KILLER + "[2]"],
    ),
    Sabotage(
        "engine-deaths-no-suspects",
        "a request under which engines died is not run alone",
        _engine_deaths_make_no_suspects,
        [
            SUSPECTS + "test_a_request_under_which_two_engines_died_runs_alone_until_it_has_a_token",
            DEATHS + KILLER + "[1]",
        ],
    ),
    Sabotage(
        "any-waiting-time",
        "credit for time waited elsewhere has no bound",
        _believe_any_waiting_time,
        [ARRIVAL + "test_credit_for_waiting_is_bounded"],
    ),
    Sabotage(
        "waiting-forgotten",
        "a resumed request comes behind all others",
        _forget_earlier_waiting,
        [
            ARRIVAL + "test_time_that_was_waited_elsewhere_counts",
            ARRIVAL + "test_a_prompt_at_a_prefill_instance_brings_its_waiting_time_and_no_clock",
        ],
    ),
    Sabotage(
        "ties-by-id",
        "of requests that come in one turn the smallest id is served first",
        _settle_ties_by_id,
        [ARRIVAL + "test_requests_of_one_turn_are_served_in_the_order_in_which_they_came"],
    ),
    Sabotage(
        "resubmitted-last",
        "a resubmission to the same engine loses its place",
        _a_resubmission_comes_last,
        [ARRIVAL + "test_a_resubmission_to_the_same_engine_keeps_its_place"],
    ),
    Sabotage(
        "suspects-passed-by",
        "later requests are let in while a suspect waits for room",
        _pass_suspects_by,
        [
            SUSPECTS + "test_a_suspect_that_waits_for_room_is_not_passed_by_later_requests",
            SUSPECTS + "test_a_suspect_waits_no_longer_for_room_than_the_same_request_without_charges",
        ],
    ),
    Sabotage(
        "suspects-jump-the-queue",
        "a suspect is let in before requests that come before it",
        _let_suspects_pass,
        [
            SUSPECTS + "test_a_suspect_does_not_pass_earlier_requests_of_the_queue",
            SUSPECTS + "test_two_suspects_come_in_the_queue_s_order",
        ],
    ),
    Sabotage(
        "suspect-s-blocks-leased",
        "the blocks that a suspect waits for are leased to peers",
        _give_a_suspect_s_blocks_to_peers,
        [SUSPECTS + "test_a_suspect_whose_prompt_is_computed_here_is_not_passed_by_those_whose_prompts_peers_compute"],
    ),
    Sabotage(
        "waiting-suspect-costs-the-overlap",
        "one step in flight while a suspect waits",
        _no_overlap_while_a_suspect_waits,
        [SUSPECTS + "test_two_steps_stay_in_flight_while_a_suspect_waits_for_room"],
    ),
    Sabotage(
        "aborted-suspect-s-step-is-not-alone",
        "a step is planned beside that of a suspect that was aborted",
        _forget_that_a_step_runs_alone,
        [SUSPECTS + "test_a_step_beside_an_aborted_suspect_s_step_is_not_planned"],
    ),
    Sabotage(
        "preempted-are-charged",
        "a request is charged with a step that only preempted it",
        _charge_the_preempted,
        [SUSPECTS + "test_a_request_that_was_only_preempted_in_a_step_is_not_charged_with_the_worker_s_death"],
    ),
    Sabotage(
        "preempted-without-enough-room",
        "requests are preempted although all of them together do not make enough room",
        _preempt_without_enough_room,
        [VICTIMS + "test_nobody_is_preempted_if_all_victims_together_do_not_make_enough_room"],
    ),
    Sabotage(
        "useless-victims",
        "F09: requests are preempted although that frees nothing",
        _count_every_block_of_a_victim,
        ["tests/failures/test_steps_and_preemption.py::test_f09_nobody_is_preempted_whose_blocks_are_all_shared"],
    ),
    Sabotage(
        "no-victim-spared",
        "a request is preempted whose blocks are not needed",
        _spare_no_victim,
        [VICTIMS + "test_a_victim_whose_blocks_turn_out_not_to_be_needed_is_spared"],
    ),
    Sabotage(
        "victims-grow",
        "a block is kept for a victim to grow into",
        _victims_grow,
        [VICTIMS + "test_a_victim_s_block_to_grow_into_counts_as_room"],
    ),
    Sabotage(
        "shared-blocks-are-room",
        "blocks that a request would share count as room for its other ones",
        _count_shared_blocks_as_room,
        [VICTIMS + "test_blocks_that_the_needer_would_share_do_not_count_as_room"],
    ),
    Sabotage(
        "preempted-for-one-that-must-wait",
        "requests are preempted for one that an earlier request keeps from the blocks",
        _forget_the_first_in_line,
        [VICTIMS + "test_nobody_is_preempted_for_a_request_that_an_earlier_one_keeps_from_the_blocks"],
    ),
    Sabotage(
        "preempted-for-one-slot-of-two",
        "a request is preempted for one slot where an earlier request needs one too",
        _preempt_for_one_slot,
        [VICTIMS + "test_nobody_is_preempted_for_a_request_that_an_earlier_one_keeps_from_the_slot"],
    ),
    Sabotage(
        "slots-not-kept",
        "the slot that an earlier request waits for goes to a later one, if there are blocks for both",
        _count_blocks_and_no_slots,
        [
            HANDOFFS + "test_a_request_that_waits_for_a_slot_is_not_passed_by_those_whose_prompts_peers_compute",
            HANDOFFS + "test_a_prompt_of_a_peer_that_waits_for_a_slot_is_not_passed_by_requests_of_our_own",
        ],
    ),
    Sabotage(
        "room-kept-for-the-first-only",
        "room is kept for the first in line, and later requests take that of the second",
        _keep_room_for_the_first_only,
        [HANDOFFS + "test_the_second_in_the_queue_keeps_its_room_from_those_whose_prompts_peers_compute"],
    ),
]
