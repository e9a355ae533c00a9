"""Deliberate bugs in the engine's steps: events, positions, preemption, fences, the prefix cache, deltas."""

from collections.abc import Callable
from types import SimpleNamespace

import msgspec

from onward.engine import step_result_processor
from onward.engine.core import EngineCore
from onward.engine.outbox import ApiOutbox
from onward.engine.request import Request, RequestStatus
from onward.engine.scheduling import scheduling_policy, slot_and_block_allocator, step_plan_builder
from onward.engine.scheduling.block_pool import BlockPool
from onward.engine.scheduling.scheduler import Scheduler
from onward.engine.scheduling.slot_and_block_allocator import SlotPool
from onward.engine.step_result_processor import StepResultProcessor
from onward.proto import block_hash
from onward.proto.step import SlotPreempted, SlotTokens, StepPlan, StepResult, TokenLogprobs
from onward.sim.hash_worker import HashWorker
from onward.transport import shm_rows, shm_wire
from tests.sabotage.patches import Patches, Sabotage

FAILURES = "tests/failures/test_steps_and_preemption.py::"
STAGES = "tests/conformance/test_stages.py::"
EVENTS = "tests/conformance/test_events.py::"
CORE = "tests/engine/test_core.py::"
SHM = "tests/transport/test_shm.py::"
DIFFERENTIAL = "tests/conformance/test_differential.py::"
ISOLATION = "tests/conformance/test_isolation.py::test_a_stage_that_raises_for_one_request_costs_no_other_a_token"


def _one_value_with_two_meanings(patch: Patches) -> None:
    patch.put(shm_rows, "PREEMPTED_TOKEN_ID", shm_rows.NO_TOKEN)


def _skip_the_epoch_check(patch: Patches) -> None:
    def find(original: Callable, self: Scheduler, epoch: int) -> Request | None:
        return original(self, epoch) or next(iter(self.allocator.by_slot_epoch.values()), None)

    patch.around(Scheduler, "request_of_slot_epoch", find)


def _no_result_when_nothing_runs(patch: Patches) -> None:
    def step(original: Callable, self: HashWorker, plan: StepPlan) -> StepResult:
        result = original(self, plan)
        return result if plan.run else StepResult(plan.step, [])

    patch.around(HashWorker, "step", step)


def _requeue_without_the_reply(patch: Patches) -> None:
    def commit(original: Callable, self: StepResultProcessor, result: StepResult, now_s: float) -> None:
        original(self, result, now_s)
        for request in list(self._scheduler.preempting):
            self._scheduler.requeue_preempted(request)

    patch.around(StepResultProcessor, "commit", commit)


def _requeue_beats_finish(patch: Patches) -> None:
    def finish(original: Callable, self: StepResultProcessor, request: Request, *rest: object) -> None:
        if request.status is RequestStatus.PREEMPTING:
            self._outbox.add_delta(request, [])
            return
        original(self, request, *rest)

    patch.around(StepResultProcessor, "finish", finish)


def _drop_token_zero(patch: Patches) -> None:
    def append(
        original: Callable, self: StepResultProcessor, request: Request, token_ids: list[int], grammar_done: bool
    ) -> list[int]:
        return original(self, request, [token for token in token_ids if token > 0], grammar_done)

    patch.around(StepResultProcessor, "_append", append)


def _cut_the_list_at_preemption(patch: Patches) -> None:
    def requeue(original: Callable, self: Scheduler, request: Request) -> None:
        original(self, request)
        del request.token_ids[request.num_prompt :]

    patch.around(Scheduler, "requeue_preempted", requeue)


def _keep_the_counters_of_the_old_epoch(patch: Patches) -> None:
    def forget_place(original: Callable, request: Request) -> None:
        computed = request.num_computed
        original(request)
        request.num_computed = computed - 1

    patch.around(slot_and_block_allocator, "clear_allocation", forget_place)


def _free_blocks_without_the_fence(patch: Patches) -> None:
    patch.around(BlockPool, "release", lambda original, self, blocks, fence_step: original(self, blocks, None))


def _free_slots_without_the_fence(patch: Patches) -> None:
    patch.around(SlotPool, "release", lambda original, self, slot, fence_step: original(self, slot, None))


def _do_not_see_fences(patch: Patches) -> None:
    patch.put(BlockPool, "num_fenced", property(lambda self: 0))


def _share_what_is_fenced_without_taking_the_fence_down(patch: Patches) -> None:
    def acquire(original: Callable, self: BlockPool, names: list[bytes]) -> list[int]:
        fenced = dict(self._fenced)
        blocks = original(self, names)
        self._fenced |= {block: step for block, step in fenced.items() if block in blocks}
        return blocks

    patch.around(BlockPool, "acquire_cached", acquire)


def _ignore_the_salt(patch: Patches) -> None:
    patch.around(block_hash, "root_hash", lambda original, cache_salt: original(""))


def _take_any_position(patch: Patches) -> None:
    def on_tokens(
        original: Callable, self: StepResultProcessor, request: Request, event: SlotTokens, now_s: float
    ) -> None:
        original(self, request, msgspec.structs.replace(event, position=request.num_generated), now_s)

    patch.around(StepResultProcessor, "_on_tokens", on_tokens)


def _cache_before_it_is_computed(patch: Patches) -> None:
    def publish(original: Callable, self: Scheduler, request: Request) -> None:
        computed, request.num_computed = request.num_computed, len(request.token_ids)
        original(self, request)
        request.num_computed = computed

    patch.around(Scheduler, "publish_computed", publish)


def _always_cache_outputs(patch: Patches) -> None:
    def publish(original: Callable, self: Scheduler, request: Request) -> None:
        prompt, request.num_prompt = request.num_prompt, len(request.token_ids)
        original(self, request)
        request.num_prompt = prompt

    patch.around(Scheduler, "publish_computed", publish)


def _believe_the_plan(patch: Patches) -> None:
    def begin_commit(original: Callable, self: Scheduler, step: int) -> None:
        for request in self.steps_in_flight[0].runs:
            request.num_computed += sum(run.num_tokens for run in request.planned_runs if run.step == step)
        original(self, step)

    patch.around(Scheduler, "begin_commit", begin_commit)


def _abort_only_what_runs(patch: Patches) -> None:
    def abort(original: Callable, self: EngineCore, owner: str, message: object, now_s: float) -> None:
        request = self._live.get(message.request_id)  # type: ignore[attr-defined]
        if request is None or request.status is RequestStatus.RUNNING:
            original(self, owner, message, now_s)

    patch.around(EngineCore, "_abort", abort)


def _keep_every_tombstone(patch: Patches) -> None:
    def bury(original: Callable, self: EngineCore, request_id: str, now_s: float) -> None:
        self._tombstones[request_id] = now_s + self.config.tombstone_s

    patch.around(EngineCore, "_add_tombstone", bury)


def _abort_by_prefix(patch: Patches) -> None:
    def abort(original: Callable, self: EngineCore, owner: str, message: object, now_s: float) -> None:
        live = [request.external_id for request in self._live.values()]
        matching = [name for name in live for wanted in message.names if name.startswith(wanted)]  # type: ignore[attr-defined]
        original(self, owner, msgspec.structs.replace(message, names=matching), now_s)  # type: ignore[type-var]

    patch.around(EngineCore, "_abort_by_name", abort)


def _no_isolation(patch: Patches) -> None:
    def isolate(
        original: Callable, self: StepResultProcessor, request: Request, fault: Exception, now_s: float
    ) -> None:
        raise fault

    patch.around(StepResultProcessor, "_fail_isolated", isolate)


def _an_error_behind_tokens_that_were_not_sent(patch: Patches) -> None:
    def isolate(original: Callable, self: StepResultProcessor, request: Request, *rest: object) -> None:
        request.num_sent_tokens = request.num_generated
        original(self, request, *rest)

    patch.around(StepResultProcessor, "_fail_isolated", isolate)


def _admit_without_a_slot(patch: Patches) -> None:
    def take(original: Callable, self: SlotPool) -> int:
        return original(self) if self._free else 0

    patch.put(SlotPool, "num_free", property(lambda self: max(1, len(self._free))))
    patch.around(SlotPool, "take", take)


def _plans_share_the_request_s_lists(patch: Patches) -> None:
    patch.shadow(step_plan_builder, "list", lambda items: items)


def _one_place_for_all_steps(patch: Patches) -> None:
    patch.put(shm_wire._SharedRing, "entry_offset", lambda self, step: 0)


def _no_checksum(patch: Patches) -> None:
    patch.put(shm_wire, "zlib", SimpleNamespace(crc32=lambda *data: 1))


def _the_wrong_victim(patch: Patches) -> None:
    def choose(original: Callable, needer: Request, running: list[Request], *rest: object, **how: object) -> list:
        if not original(needer, running, *rest, **how):
            return []
        return [min((r for r in running if r is not needer), key=scheduling_policy.queue_key)]

    patch.around(scheduling_policy, "choose_victims", choose)


def _forget_before_publish(patch: Patches) -> None:
    def drain(original: Callable, self: ApiOutbox, step: int) -> list:
        ended = {owner: [d for d in deltas if d.finish_reason] for owner, deltas in self._deltas.items()}
        self._deltas = {owner: [d for d in deltas if not d.finish_reason] for owner, deltas in self._deltas.items()}
        out = original(self, step)
        self._deltas = ended
        return out

    patch.around(ApiOutbox, "take_messages", drain)


def _holding_before_deltas(patch: Patches) -> None:
    patch.put(ApiOutbox, "send_after_deltas", ApiOutbox.send)


def _ignore_min_tokens(patch: Patches) -> None:
    def stop_reason(original: Callable, request: Request, position: int, grammar_done: bool) -> object:
        token = request.token_ids[request.num_prompt + position]
        ends = token in request.spec.sampling_params.end_token_ids
        return (
            step_result_processor.FinishReason.STOP if ends else original(request, position, grammar_done=grammar_done)
        )

    patch.around(step_result_processor, "stop_reason", stop_reason)


def _keep_what_lies_behind_the_stop(patch: Patches) -> None:
    def append(
        original: Callable, self: StepResultProcessor, request: Request, token_ids: list[int], grammar_done: bool
    ) -> list[int]:
        accepted = original(self, request, token_ids, grammar_done)
        request.token_ids += token_ids[len(accepted) :]
        return token_ids

    patch.around(StepResultProcessor, "_append", append)


def _decide_the_reason_again(patch: Patches) -> None:
    def delta(original: Callable, self: ApiOutbox, request: Request, *rest: object, **more: object) -> None:
        if request.finish_reason and request.num_generated >= request.max_output_tokens:
            request.finish_reason = step_result_processor.FinishReason.LENGTH
        original(self, request, *rest, **more)

    patch.around(ApiOutbox, "add_delta", delta)


def _say_what_was_cached_only_once(patch: Patches) -> None:
    def delta(original: Callable, self: ApiOutbox, request: Request, *rest: object, **more: object) -> None:
        original(self, request, *rest, **more)
        request.num_cached_tokens = 0

    patch.around(ApiOutbox, "add_delta", delta)


def _lose_logprobs_in_the_rows(patch: Patches) -> None:
    def decode(original: Callable, *args: object) -> list:
        return [
            msgspec.structs.replace(event, logprobs=None) if isinstance(event, SlotTokens) else event
            for event in original(*args)
        ]

    patch.around(shm_rows, "decode", decode)


def _logprobs_of_the_neighbour(patch: Patches) -> None:
    def delta(
        original: Callable,
        self: ApiOutbox,
        request: Request,
        token_ids: list[int],
        error: object = None,
        logprobs: list[TokenLogprobs] | None = None,
        *rest: object,
        **more: object,
    ) -> None:
        shifted = None if logprobs is None else [msgspec.structs.replace(one, rank=one.rank + 1) for one in logprobs]
        original(self, request, token_ids, error, shifted, *rest, **more)

    patch.around(ApiOutbox, "add_delta", delta)


def _the_wire_s_order(patch: Patches) -> None:
    patch.put(step_result_processor, "_slot", lambda event: 0)


def _a_reply_shorter_than_the_list(patch: Patches) -> None:
    def preempt(original: Callable, self: HashWorker, command: object) -> SlotPreempted:
        reply = original(self, command)
        return msgspec.structs.replace(reply, num_tokens=reply.num_tokens - 1)

    patch.around(HashWorker, "_preempt", preempt)


def _accept_an_older_submission(patch: Patches) -> None:
    def submit(original: Callable, self: EngineCore, owner: str, message: object, now_s: float) -> None:
        known = self._live.get(message.request_id)  # type: ignore[attr-defined]
        if known is not None:
            known.spec = msgspec.structs.replace(known.spec, epoch=-1)
        original(self, owner, message, now_s)

    patch.around(EngineCore, "_submit", submit)


def _time_the_first_token_twice(patch: Patches) -> None:
    def observe(original: Callable, self: StepResultProcessor, request: Request, *rest: object) -> None:
        request.last_token_s = None
        request.spec = msgspec.structs.replace(request.spec, generated_token_ids=[])
        original(self, request, *rest)

    patch.around(StepResultProcessor, "_record_metrics", observe)


TABLE = [
    Sabotage(
        "one-value-two-meanings",
        "F01: the code of a preempted slot is that of a silent one",
        _one_value_with_two_meanings,
        [FAILURES + "test_f01_each_value_has_one_meaning_and_a_reply_names_its_epoch"],
    ),
    Sabotage(
        "skip-epoch-check",
        "F01, F07: an event of an epoch that is over is applied to a request that runs",
        _skip_the_epoch_check,
        [
            FAILURES + "test_f01_each_value_has_one_meaning_and_a_reply_names_its_epoch",
            FAILURES + "test_f07_what_an_older_epoch_still_brings_does_not_touch_the_newer_one",
            STAGES + "test_an_event_of_an_unknown_epoch_is_dropped_and_counted_and_is_no_error",
            STAGES + "test_an_event_of_an_epoch_that_is_over_never_reaches_the_slot_s_next_tenant",
        ],
    ),
    Sabotage(
        "no-result-when-nothing-runs",
        "F02: a plan of nothing but preempts is not answered",
        _no_result_when_nothing_runs,
        [
            FAILURES + "test_f02_a_plan_of_nothing_but_preempts_has_a_result",
            EVENTS + "test_the_reply_to_a_preempt_comes_in_that_step_also_when_nothing_runs",
        ],
    ),
    Sabotage(
        "requeue-without-reply",
        "F03: silence is read as the reply to a preempt",
        _requeue_without_the_reply,
        [
            FAILURES + "test_f03_a_slot_that_is_missing_from_a_result_has_said_nothing",
            EVENTS + "test_nothing_but_its_own_reply_requeues_a_preempted_request",
        ],
    ),
    Sabotage(
        "requeue-beats-finish",
        "F04: a request that ends while it is preempted is queued again",
        _requeue_beats_finish,
        [
            FAILURES + "test_f04_a_request_that_finished_is_not_requeued_by_the_reply_that_crossed_its_end",
            STAGES + "test_a_request_that_finishes_while_it_is_being_preempted_is_finished_and_never_requeued",
        ],
    ),
    Sabotage(
        "token-zero-dropped",
        "F05: only ids above zero are tokens",
        _drop_token_zero,
        [FAILURES + "test_f05_token_zero_is_a_token_everywhere", EVENTS + "test_token_id_zero_survives"],
    ),
    Sabotage(
        "list-cut-at-preemption",
        "F06: a preempted request comes back without its output",
        _cut_the_list_at_preemption,
        [
            FAILURES + "test_f06_a_resumed_request_comes_back_with_its_whole_list",
            "tests/conformance/test_preempted_output.py",
            "tests/engine/test_core_properties.py::test_a_pool_that_is_too_small_costs_time_and_no_token",
        ],
    ),
    Sabotage(
        "counters-survive",
        "F07: counters of the old epoch go on in the new one",
        _keep_the_counters_of_the_old_epoch,
        [FAILURES + "test_f07_a_step_that_was_in_flight_at_the_preemption_changes_only_the_list"],
    ),
    Sabotage(
        "no-block-fence",
        "F08: blocks are free while a step in flight writes them",
        _free_blocks_without_the_fence,
        [
            FAILURES + "test_f08_blocks_are_not_reused_while_a_step_in_flight_may_write_them",
            STAGES + "test_a_finished_request_gives_everything_back_behind_its_fence",
            "tests/engine/test_core_properties.py::test_every_client_gets_exactly_its_tokens_whatever_happens",
        ],
    ),
    Sabotage(
        "fences-unseen",
        "F09: a request is preempted for blocks that are only fenced",
        _do_not_see_fences,
        [FAILURES + "test_f09_blocks_that_are_only_fenced_are_waited_for"],
    ),
    Sabotage(
        "fence-survives-sharing",
        "F10: a block is fenced for one request while another one holds it",
        _share_what_is_fenced_without_taking_the_fence_down,
        [FAILURES + "test_f10_two_requests_share_a_block_by_its_hash_and_in_no_other_way"],
    ),
    Sabotage(
        "salt-ignored",
        "F10: callers share each other's blocks",
        _ignore_the_salt,
        [
            FAILURES + "test_f10_two_requests_share_a_block_by_its_hash_and_in_no_other_way",
            CORE + "test_another_salt_shares_nothing",
        ],
    ),
    Sabotage(
        "no-position-check",
        "F11: a token is taken wherever it claims to belong",
        _take_any_position,
        [
            FAILURES + "test_f11_a_token_is_taken_at_its_position_once",
            STAGES + "test_a_token_that_was_taken_before_is_dropped_and_counted",
            STAGES + "test_a_gap_fails_that_request_and_never_reaches_the_client",
        ],
    ),
    Sabotage(
        "no-slot-fence",
        "F12: a slot has a new request while the last one's step is in flight",
        _free_slots_without_the_fence,
        [FAILURES + "test_f12_a_slot_has_no_new_tenant_while_a_surplus_step_of_the_last_one_is_in_flight"],
    ),
    Sabotage(
        "cached-before-computed",
        "F13: blocks join the prefix cache when their tokens are known",
        _cache_before_it_is_computed,
        [
            FAILURES + "test_f13_only_what_was_computed_is_cached",
            STAGES + "test_a_block_is_cached_when_its_last_token_is_computed_and_not_when_it_is_sampled",
            STAGES + "test_a_chunk_s_blocks_are_shared_as_soon_as_they_are_computed_and_not_before",
        ],
    ),
    Sabotage(
        "plan-believed",
        "F13: what was planned counts as computed",
        _believe_the_plan,
        [EVENTS + "test_a_slot_without_an_event_advances_nothing_and_answers_nothing"],
    ),
    Sabotage(
        "outputs-always-cached",
        "outputs are cached although that is switched off",
        _always_cache_outputs,
        [
            f"{STAGES}test_full_blocks_of_the_output_are_cached_where_that_is_on[{wire}-False-12]"
            for wire in ("inproc", "zmq", "shm")
        ],
    ),
    Sabotage(
        "abort-only-what-runs",
        "F14: a request that waits or is being preempted cannot be aborted",
        _abort_only_what_runs,
        [
            FAILURES + "test_f14_an_abort_is_answered_in_every_state_and_twice[waiting]",
            FAILURES + "test_f14_an_abort_is_answered_in_every_state_and_twice[preempting]",
        ],
    ),
    Sabotage(
        "tombstones-unbounded",
        "F14: the tombstones of aborted requests stay for ever",
        _keep_every_tombstone,
        [FAILURES + "test_f14_the_marks_of_aborted_requests_are_bounded"],
    ),
    Sabotage(
        "abort-by-prefix",
        "F15: the beginning of a name matches it",
        _abort_by_prefix,
        [FAILURES + "test_f15_a_name_matches_itself_and_nothing_else"],
    ),
    Sabotage(
        "no-isolation",
        "F16: an exception in one slot loses the step of all",
        _no_isolation,
        [FAILURES + "test_f16_an_exception_in_one_slot_costs_the_others_nothing", ISOLATION],
    ),
    Sabotage(
        "error-behind-unsent-tokens",
        "F16: the error of an isolated request stands behind tokens that were not sent",
        _an_error_behind_tokens_that_were_not_sent,
        [
            f"{ISOLATION}[{wire}-StepResultProcessor-_record_metrics-after its work-early]"
            for wire in ("inproc", "zmq", "shm")
        ],
    ),
    Sabotage(
        "no-slot-needed",
        "F17: a request is admitted although no slot is free",
        _admit_without_a_slot,
        [FAILURES + "test_f17_nobody_is_admitted_without_a_slot"],
    ),
    Sabotage(
        "plans-share-lists",
        "F18: a plan in flight changes with the request",
        _plans_share_the_request_s_lists,
        [FAILURES + "test_f18_a_plan_in_flight_does_not_change_with_the_request"],
    ),
    Sabotage(
        "one-place-for-all-steps",
        "F18: the ring has one place, and the next step overwrites it",
        _one_place_for_all_steps,
        [SHM + "test_hello_plans_and_results_cross_in_order"],
    ),
    Sabotage(
        "no-checksum",
        "a half-written step is read",
        _no_checksum,
        [SHM + "test_a_result_that_was_not_finished_is_never_read"],
    ),
    Sabotage(
        "wrong-victim",
        "the first in line is preempted",
        _the_wrong_victim,
        [CORE + "test_the_oldest_of_the_highest_priority_never_loses_its_blocks"],
    ),
    Sabotage(
        "forget-before-publish",
        "the end of a request comes after it was forgotten",
        _forget_before_publish,
        [STAGES + "test_the_end_is_published_before_the_request_is_forgotten"],
    ),
    Sabotage(
        "holding-before-deltas",
        "what the engine holds is told before the tokens that led there",
        _holding_before_deltas,
        [
            STAGES + "test_the_end_is_published_before_the_request_is_forgotten",
            CORE + "test_what_the_engine_holds_is_told_behind_the_tokens_that_led_there",
        ],
    ),
    Sabotage(
        "min-tokens-ignored",
        "an end token ends the output before min_tokens",
        _ignore_min_tokens,
        [STAGES + "test_an_end_token_before_min_tokens_does_not_end_the_output"],
    ),
    Sabotage(
        "nothing-cut-behind-the-stop",
        "tokens behind the stop are delivered",
        _keep_what_lies_behind_the_stop,
        [STAGES + "test_tokens_behind_the_stop_in_the_same_event_are_cut_with_their_logprobs"],
    ),
    Sabotage(
        "stop-decided-twice",
        "the finish reason is decided again from the count of tokens",
        _decide_the_reason_again,
        [STAGES + "test_the_stop_comes_before_the_length_when_both_are_reached_at_once"],
    ),
    Sabotage(
        "cached-tokens-once",
        "only the first delta says what was cached",
        _say_what_was_cached_only_once,
        [STAGES + "test_every_delta_carries_its_place_the_prompt_s_length_and_what_was_cached"],
    ),
    Sabotage(
        "logprobs-lost-on-one-wire",
        "one wire carries less than the others",
        _lose_logprobs_in_the_rows,
        [
            DIFFERENTIAL + "test_recorded_traffic_is_answered_alike_on_every_wire",
            STAGES + "test_every_token_brings_its_own_logprobs[shm]",
        ],
    ),
    Sabotage(
        "logprobs-of-another-token",
        "a token comes with another one's logprobs",
        _logprobs_of_the_neighbour,
        [STAGES + "test_every_token_brings_its_own_logprobs"],
    ),
    Sabotage(
        "order-of-the-wire",
        "what the engine says depends on the order in which a wire brings events",
        _the_wire_s_order,
        [DIFFERENTIAL + "test_recorded_traffic_is_answered_alike_on_every_wire"],
    ),
    Sabotage(
        "engine-and-worker-disagree",
        "the worker's list is one token shorter than the engine's, and no check compares them",
        _a_reply_shorter_than_the_list,
        ["tests/conformance/test_preempted_output.py"],
    ),
    Sabotage(
        "older-submissions-accepted",
        "an older epoch replaces the newer one",
        _accept_an_older_submission,
        [CORE + "test_a_newer_epoch_replaces_the_older_one_and_an_older_one_is_dropped"],
    ),
    Sabotage(
        "first-token-timed-twice",
        "every token counts as the first one",
        _time_the_first_token_twice,
        [
            STAGES + "test_the_first_token_is_timed_from_scheduling_and_from_arrival_and_later_ones_from_each_other",
            STAGES + "test_a_resumed_request_s_first_token_is_not_counted_again",
        ],
    ),
]
