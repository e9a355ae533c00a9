"""Deliberate bugs around drafts for the simulator: a draft must never be taken for a sampled token."""

from collections.abc import Callable

import msgspec

from onward.engine.handoff.remote_prefill import RemotePrefillClient
from onward.engine.handoff.remote_prefill_index import RemotePrefill
from onward.engine.request import PlannedRun, Request
from onward.engine.scheduling.scheduler import Scheduler
from onward.engine.scheduling.slot_and_block_allocator import SlotAndBlockAllocator
from onward.engine.scheduling.step_plan_builder import StepPlanBuilder
from onward.engine.step_result_processor import StepResultProcessor
from onward.proto.handoff import PrefillDone
from onward.proto.step import RunSlot, SlotTokens, StepPlan
from onward.sim.hash_worker import HashWorker, HashWorkerSlot
from tests.sabotage.patches import Patches


def a_rejected_draft_is_cached(patch: Patches) -> None:
    """The newest token's position still holds the KV of the rejected draft."""

    def publish(original: Callable, self: SlotAndBlockAllocator, request: Request) -> None:
        computed = request.num_computed
        if request.draft_acceptance.num_verifications:
            request.num_computed = len(request.token_ids)
        original(self, request)
        request.num_computed = computed

    patch.around(SlotAndBlockAllocator, "cache_computed_blocks", publish)


def a_rejected_draft_counts_as_computed(patch: Patches) -> None:
    def told(
        original: Callable, self: HashWorker, run: RunSlot, slot: HashWorkerSlot, position: int, *more: object
    ) -> SlotTokens:
        num_tokens, num_drafted = len(slot.token_ids) - slot.spec.num_prompt - position, more[-1]
        event = original(self, run, slot, position, *more)
        if num_drafted and num_tokens <= num_drafted:  # type: ignore[operator]
            slot.num_computed += 1
        return event

    patch.around(HashWorker, "_tokens_event", told)


def a_draft_of_the_peer_takes_a_position(patch: Patches) -> None:
    def arrived(
        original: Callable, self: RemotePrefillClient, task: RemotePrefill, ready: PrefillDone, now_s: float
    ) -> None:
        tokens = ready.token_ids + ready.draft_token_ids
        original(self, task, msgspec.structs.replace(ready, token_ids=tokens), now_s)

    patch.around(RemotePrefillClient, "_on_arrived", arrived)


def a_rejected_draft_takes_a_position(patch: Patches) -> None:
    """The worker tells what it has computed, and not what it has sampled."""

    def told(
        original: Callable, self: HashWorker, run: RunSlot, slot: HashWorkerSlot, position: int, *more: object
    ) -> SlotTokens:
        at = slot.num_computed
        if more[-1] and len(slot.token_ids) - slot.spec.num_prompt - position <= more[-1]:  # type: ignore[operator]
            cell = self.memory[slot.block_ids[at // self.block_size]][at % self.block_size]
            slot.token_ids[-1] = cell & 0xFFFFFFFF
        return original(self, run, slot, position, *more)

    patch.around(HashWorker, "_tokens_event", told)


def what_follows_a_stop_is_kept(patch: Patches) -> None:
    def append(
        original: Callable, self: StepResultProcessor, request: Request, token_ids: list[int], done: bool
    ) -> list[int]:
        kept = original(self, request, token_ids, done)
        request.token_ids += token_ids[len(kept) :]
        return token_ids

    patch.around(StepResultProcessor, "_append", append)


def drafts_in_flight_are_not_counted(patch: Patches) -> None:
    def seal(original: Callable, self: StepPlanBuilder) -> tuple[StepPlan, list[Request]] | None:
        sealed = original(self)
        for request in self.runs:
            planned = request.planned_runs[-1]
            request.planned_runs[-1] = PlannedRun(planned.step, planned.num_tokens, planned.samples)
        return sealed

    patch.around(StepPlanBuilder, "build", seal)


def drafts_have_no_blocks(patch: Patches) -> None:
    def with_drafts(
        original: Callable, self: Scheduler, request: Request, end: int, missing: int, num_drafts: int
    ) -> tuple[int, int]:
        return missing, num_drafts

    patch.around(Scheduler, "_fit_drafts_into_blocks", with_drafts)
