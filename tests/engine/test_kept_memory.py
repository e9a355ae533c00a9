"""KV memory that outlives its worker or its engine: only the steps in flight are computed again, and streams are exact."""

from collections.abc import Callable

import pytest

from onward.engine.core import EngineCore
from onward.engine.request import RequestStatus
from onward.engine.scheduling.persisted_block_hashes import PersistedBlockHashes, table_bytes
from onward.proto.engine import KvEventsReply, QueryKvEvents, TokenDelta
from onward.proto.sampling_params import Pooling
from onward.proto.step import AssignSlot, StepPlan, TokenLogprobs
from tests.engine.harness import API, Client, Harness
from tests.engine.test_recomputed_tokens import num_needed, num_planned, recomputed

ONE_STEP = {"max_steps_in_flight": 1, "prefix_caching": False}
"""What is planned is what is computed, as in `test_recomputed_tokens`."""


class LogprobsHarness(Harness):
    """Keeps the prompt logprobs that each client is sent."""

    def __init__(self, **config: object) -> None:
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        super().__init__(**config)  # type: ignore[arg-type]

    def _take(self, delta: TokenDelta) -> None:
        super()._take(delta)
        if delta.prompt_logprobs is not None:
            assert delta.request_id not in self.prompt_logprobs, "they are sent once"
            self.prompt_logprobs[delta.request_id] = delta.prompt_logprobs


class NamedHarness(Harness):
    """An engine that writes the hashes of its blocks beside the memory, where the next engine finds them."""

    def __init__(self, **config: object) -> None:
        super().__init__(**config)  # type: ignore[arg-type]
        self.hash_rows = bytearray(table_bytes(self.num_blocks))
        self._num_engines = 0
        self.replace_engine()

    def replace_engine(self, before_start: Callable[[], None] = lambda: None) -> None:
        """The engine is killed, and its worker with it; the first step in flight is written. The memory is kept."""
        if self.plans:
            self._result()
        self._lose_plans()
        before_start()
        self._num_engines += 1
        self.worker = self._new_worker(self.worker.memory)
        table = PersistedBlockHashes(memoryview(self.hash_rows), self.num_blocks)
        self.core = EngineCore(self.config, f"e{self._num_engines}", self.worker.hello(), table)

    def resubmit_all(self) -> None:
        for client in self.clients.values():
            if client.finish_reason is None:
                self.resubmit(client)


def fill(harness: Harness) -> None:
    """As many steps in flight as there may be."""
    while harness.plan() is not None:
        harness.check()


def run_steps(harness: Harness, count: int) -> None:
    for _ in range(count):
        fill(harness)
        harness.answer()
        harness.check()


def submit_many(harness: Harness, count: int = 4, num_prompt: int = 9, max_tokens: int = 16) -> list[Client]:
    return [
        harness.submit(f"r-{i}", list(range(i + 1, i + 1 + num_prompt)), max_tokens=max_tokens) for i in range(count)
    ]


def next_assigns(harness: Harness) -> dict[str, AssignSlot]:
    """Returns the assignments of the next plan, by request."""
    plan = harness.plan()
    assert plan is not None
    return {assign.request_id: assign for assign in plan.assign}


def finish(harness: Harness) -> None:
    harness.run_until_idle()
    harness.check()
    harness.core.audit_idle()
    harness.check_all_exact()


# The worker is killed.


def test_only_the_steps_in_flight_are_computed_again_when_a_worker_is_killed() -> None:
    harness = Harness(**ONE_STEP)
    submit_many(harness)
    run_steps(harness, 6)
    plan = harness.plan()
    assert plan is not None
    num_in_flight = sum(run.num_tokens for run in plan.run)
    harness.crash_worker(keeps_memory=True)
    finish(harness)
    assert num_in_flight == 4
    assert recomputed(harness) == {"worker": num_in_flight}
    assert num_planned(harness) == num_needed(harness) + num_in_flight


def test_nothing_is_computed_again_if_no_step_was_in_flight() -> None:
    harness = Harness(**ONE_STEP)
    submit_many(harness)
    run_steps(harness, 6)
    harness.crash_worker(keeps_memory=True)
    finish(harness)
    assert recomputed(harness) == {}
    assert num_planned(harness) == num_needed(harness)


@pytest.mark.parametrize("num_steps", [1, 3, 6])
def test_the_next_worker_is_told_of_what_was_committed_and_of_the_same_blocks(num_steps: int) -> None:
    """With two steps in flight: what is planned is further along than what is committed. Prompts take several steps."""
    harness = Harness(max_num_batched_tokens=16)
    submit_many(harness, num_prompt=14)
    run_steps(harness, num_steps)
    fill(harness)
    running = {request.request_id: request for request in harness.core.scheduler.running}
    committed = {name: request.num_computed for name, request in running.items()}
    blocks = {name: list(request.block_ids) for name, request in running.items()}
    old_epochs = {request.slot_epoch for request in running.values()}
    assert any(request.planned_computed > request.num_computed for request in running.values())
    harness.crash_worker(keeps_memory=True)
    assigns: dict[str, AssignSlot] = {}
    for _ in range(4):
        assigns = next_assigns(harness) | assigns
        harness.answer()
    for name in running:
        assert assigns[name].num_computed == committed[name]
        assert assigns[name].block_ids[: len(blocks[name])] == blocks[name]
        assert assigns[name].slot_epoch not in old_epochs
    finish(harness)


def test_streams_are_exact_wherever_a_worker_is_killed() -> None:
    for num_steps in range(16):
        harness = Harness(num_blocks=24, max_num_batched_tokens=16)
        submit_many(harness, count=6, num_prompt=7, max_tokens=12)
        run_steps(harness, num_steps)
        fill(harness)
        harness.crash_worker(keeps_memory=True)
        finish(harness)


def test_memory_that_could_not_be_attached_after_all_is_computed_again() -> None:
    harness = Harness(**ONE_STEP)
    submit_many(harness)
    run_steps(harness, 6)
    num_lost = sum(request.num_computed for request in harness.core.scheduler.running)
    harness.lose_worker(keeps_memory=True)
    harness.start_worker(attaches=False)
    assert all(assign.num_computed == 0 for assign in next_assigns(harness).values())
    finish(harness)
    assert recomputed(harness) == {"worker": num_lost}
    assert num_planned(harness) == num_needed(harness) + num_lost


def test_cached_blocks_of_memory_that_could_not_be_attached_are_forgotten() -> None:
    harness = Harness()
    prompt = list(range(1, 20))
    harness.submit("before", prompt)
    harness.run_until_idle()
    harness.lose_worker(keeps_memory=True)
    harness.start_worker(attaches=False)
    after = harness.submit("after", prompt)
    finish(harness)
    assert after.cached == 0


def test_cached_blocks_of_kept_memory_are_still_found() -> None:
    harness = Harness()
    prompt = list(range(1, 20))
    harness.submit("before", prompt)
    harness.run_until_idle()
    harness.crash_worker(keeps_memory=True)
    after = harness.submit("after", prompt)
    finish(harness)
    assert after.cached == 16


def test_a_request_that_is_being_preempted_goes_back_to_the_queue_at_once() -> None:
    harness = Harness(num_blocks=12)
    submit_many(harness, count=6, max_tokens=24)
    for _ in range(200):
        fill(harness)
        if harness.core.scheduler.preempting:
            break
        harness.answer()
    preempting = list(harness.core.scheduler.preempting)
    assert preempting
    harness.lose_worker(keeps_memory=True)
    assert [request.status for request in preempting] == [RequestStatus.WAITING] * len(preempting)
    assert not harness.core.scheduler.preempting
    harness.check()
    harness.start_worker()
    finish(harness)


def test_blocks_of_requests_that_ended_in_a_step_in_flight_are_free_at_once() -> None:
    """No result of that step comes, so nothing else would lift their fences."""
    harness = Harness()
    submit_many(harness)
    run_steps(harness, 3)
    fill(harness)
    for name in list(harness.clients):
        harness.abort(name)
    assert harness.core.scheduler.pool.num_fenced > 0
    harness.lose_worker(keeps_memory=True)
    harness.core.audit_idle()
    assert harness.core.scheduler.slots.num_free == harness.config.max_num_seqs


def test_slots_of_requests_that_ended_in_a_step_in_flight_are_free_at_once() -> None:
    harness = Harness(max_num_seqs=2)
    submit_many(harness, count=2)
    fill(harness)
    for name in list(harness.clients):
        harness.abort(name)
    harness.clients.clear()
    harness.crash_worker(keeps_memory=True)
    harness.submit("next-0", [1] * 9)
    harness.submit("next-1", [2] * 9)
    assert next_assigns(harness).keys() == {"next-0", "next-1"}
    finish(harness)


def test_requests_that_are_aborted_while_there_is_no_worker_release_their_blocks() -> None:
    harness = Harness()
    submit_many(harness)
    run_steps(harness, 3)
    fill(harness)
    harness.lose_worker(keeps_memory=True)
    for name in ("r-0", "r-2"):
        harness.abort(name)
        harness.clients.pop(name)
    harness.check()
    harness.start_worker()
    assert next_assigns(harness).keys() == {"r-1", "r-3"}
    finish(harness)


def test_a_request_that_comes_while_there_is_no_worker_runs_beside_those_that_were_kept() -> None:
    harness = Harness()
    submit_many(harness)
    run_steps(harness, 3)
    fill(harness)
    harness.lose_worker(keeps_memory=True)
    harness.submit("late", [9] * 9)
    harness.start_worker()
    finish(harness)


@pytest.mark.parametrize("num_steps_between", [0, 1, 2])
def test_two_kills_in_a_row_lose_two_times_the_steps_in_flight(num_steps_between: int) -> None:
    harness = Harness(**ONE_STEP)
    submit_many(harness, max_tokens=24)
    run_steps(harness, 5)
    for _ in range(2):
        harness.plan()
        harness.crash_worker(keeps_memory=True)
        run_steps(harness, num_steps_between)
    finish(harness)
    num_lost = num_planned(harness) - num_needed(harness)
    assert recomputed(harness) == {"worker": num_lost}
    assert 4 <= num_lost <= 8


def test_a_kill_before_the_next_worker_has_taken_a_step_loses_nothing_more() -> None:
    harness = Harness(**ONE_STEP)
    submit_many(harness)
    run_steps(harness, 5)
    harness.plan()
    for _ in range(3):
        harness.crash_worker(keeps_memory=True)
    finish(harness)
    assert recomputed(harness) == {"worker": 4}


def test_a_crash_after_a_kill_ends_the_memory_that_was_kept() -> None:
    harness = Harness(**ONE_STEP)
    submit_many(harness)
    run_steps(harness, 5)
    harness.crash_worker(keeps_memory=True)
    run_steps(harness, 2)
    num_lost = sum(request.num_computed for request in harness.core.scheduler.running)
    harness.crash_worker()
    finish(harness)
    assert recomputed(harness) == {"worker": num_lost}


def test_streams_with_drafts_are_exact_wherever_a_worker_is_killed() -> None:
    for num_steps in range(16):
        harness = Harness(num_draft_tokens=4)
        submit_many(harness, max_tokens=40)
        run_steps(harness, num_steps)
        fill(harness)
        harness.crash_worker(keeps_memory=True)
        finish(harness)
        assert recomputed(harness).get("worker", 0) <= 2 * harness.config.max_num_batched_tokens


# What only the worker has.


@pytest.mark.parametrize(("pooling", "num_computed"), [("mean", 0), ("last", 24)])
def test_a_mean_starts_again_and_a_last_row_goes_on(pooling: Pooling, num_computed: int) -> None:
    harness = Harness(max_num_batched_tokens=8, prefix_caching=False)
    client = harness.submit("vector", list(range(1, 41)), max_tokens=0, pooling=pooling)
    run_steps(harness, 3)
    fill(harness)
    harness.crash_worker(keeps_memory=True)
    assert next_assigns(harness)["vector"].num_computed == num_computed
    harness.run_until_idle()
    assert client.embedding == harness.expected_vector(client)
    harness.core.audit_idle()


def prompt_logprobs_with_kill(num_steps: int | None) -> tuple[LogprobsHarness, list[TokenLogprobs]]:
    """`num_steps`: after which the worker is killed; None: it is not."""
    harness = LogprobsHarness(max_num_batched_tokens=8)
    harness.submit("scored", list(range(1, 31)), prompt_logprobs=2)
    if num_steps is not None:
        run_steps(harness, num_steps)
        fill(harness)
        harness.crash_worker(keeps_memory=True)
    finish(harness)
    return harness, harness.prompt_logprobs["scored"]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 5])
def test_prompt_logprobs_that_were_gathered_before_a_kill_are_kept_and_complete(num_steps: int) -> None:
    _, undisturbed = prompt_logprobs_with_kill(None)
    assert len(undisturbed) == 29
    harness, disturbed = prompt_logprobs_with_kill(num_steps)
    assert disturbed == undisturbed
    num_in_flight = harness.config.max_steps_in_flight * harness.config.max_num_batched_tokens
    assert recomputed(harness).get("worker", 0) <= num_in_flight


# Charges.


def test_a_request_in_flight_at_three_kills_fails_and_others_do_not() -> None:
    harness = Harness()
    killer = harness.submit("killer", [1] * 9, max_tokens=8)
    others = [harness.submit(f"other-{i}", [i + 2] * 9, max_tokens=8) for i in range(3)]
    num_kills = 0
    for _ in range(500):
        while harness.plan() is not None:
            pass
        if not harness.plans:
            break
        if "killer" in requests_of(harness, harness.plans[0]):
            num_kills += 1
            harness.crash_worker(keeps_memory=True)
        else:
            harness.answer()
        harness.check()
    assert num_kills == 3
    assert killer.error_code == "crashed_worker"
    for other in others:
        assert other.finish_reason == "length"
        assert other.tokens == harness.expected(other)
    harness.core.audit_idle()


def requests_of(harness: Harness, plan: StepPlan) -> set[str]:
    found = [harness.core.scheduler.request_of_slot_epoch(run.slot_epoch) for run in plan.run]
    return {request.request_id for request in found if request is not None}


def test_a_request_that_made_progress_between_kills_is_not_charged_for_the_earlier_ones() -> None:
    harness = Harness()
    submit_many(harness, max_tokens=40)
    for _ in range(5):
        run_steps(harness, 4)
        fill(harness)
        harness.crash_worker(keeps_memory=True)
    finish(harness)


# The engine is killed.


def test_a_new_engine_finds_the_blocks_of_the_last_one_and_computes_one_block_again_at_most() -> None:
    harness = NamedHarness()
    clients = submit_many(harness, num_prompt=15, max_tokens=24)
    run_steps(harness, 9)
    fill(harness)
    assert all(len(client.tokens) > 4 for client in clients)
    harness.replace_engine()
    harness.resubmit_all()
    finish(harness)
    assert 0 < recomputed(harness)["resume"] <= harness.block_size * len(clients)


def test_streams_are_exact_wherever_an_engine_is_killed() -> None:
    for num_steps in range(16):
        harness = NamedHarness(num_blocks=24, max_num_batched_tokens=16)
        submit_many(harness, count=6, num_prompt=7, max_tokens=12)
        run_steps(harness, num_steps)
        fill(harness)
        harness.replace_engine()
        harness.resubmit_all()
        finish(harness)


def test_a_third_engine_finds_what_the_first_has_named() -> None:
    harness = NamedHarness()
    prompt = list(range(1, 20))
    harness.submit("first", prompt)
    harness.run_until_idle()
    harness.replace_engine()
    harness.replace_engine()
    third = harness.submit("third", prompt)
    finish(harness)
    assert third.cached == 16


def test_names_that_are_given_after_a_worker_was_killed_reach_the_next_engine() -> None:
    harness = NamedHarness()
    harness.crash_worker(keeps_memory=True)
    prompt = list(range(1, 20))
    harness.submit("first", prompt)
    harness.run_until_idle()
    harness.replace_engine()
    second = harness.submit("second", prompt)
    finish(harness)
    assert second.cached == 16


def test_a_row_whose_seal_does_not_fit_is_not_adopted() -> None:
    harness = NamedHarness()
    harness.submit("first", list(range(1, 20)))
    harness.run_until_idle()
    sealed = dict(PersistedBlockHashes(memoryview(harness.hash_rows), harness.num_blocks).sealed())
    assert len(sealed) >= 4
    row_bytes = table_bytes(1)

    def damage_names() -> None:
        for block in sealed:
            harness.hash_rows[block * row_bytes] ^= 1

    harness.replace_engine(damage_names)
    assert not harness.core.scheduler.pool.cached_hashes
    second = harness.submit("second", list(range(1, 20)))
    finish(harness)
    assert second.cached == 0


def test_a_block_that_was_handed_out_again_is_not_adopted_by_the_next_engine() -> None:
    """Its first tokens are overwritten, and its new owner has not computed it to its end."""
    harness = NamedHarness(num_blocks=6)
    prompt = list(range(1, 20))
    harness.submit("first", prompt, max_tokens=1)
    harness.run_until_idle()
    harness.clients.clear()
    assert len(harness.core.scheduler.pool.cached_hashes) == 4
    harness.submit("second", [40 + i for i in range(19)], max_tokens=2)
    harness.plan()
    harness.replace_engine()  # the step is written, and its result does not reach the engine
    harness.clients.clear()
    third = harness.submit("third", prompt, max_tokens=3)
    finish(harness)
    assert third.cached is not None
    assert third.cached < 16


def test_an_engine_without_a_prefix_cache_adopts_nothing() -> None:
    harness = NamedHarness(prefix_caching=False)
    prompt = list(range(1, 20))
    harness.submit("first", prompt)
    harness.run_until_idle()
    harness.replace_engine()
    assert not harness.core.scheduler.pool.cached_hashes
    second = harness.submit("second", prompt)
    finish(harness)
    assert second.cached == 0


def test_a_reader_of_kv_events_is_told_of_adopted_blocks() -> None:
    harness = NamedHarness()
    harness.submit("first", list(range(1, 20)))
    harness.run_until_idle()
    known = set(harness.core.scheduler.pool.cached_hashes)
    harness.replace_engine()
    harness.core.receive_from_api(API, QueryKvEvents(1, 1, 0), harness.now_s)
    [events] = [message.events for _, message in harness.core.take_api_messages() if isinstance(message, KvEventsReply)]
    assert {name for is_known, name in events.changes if is_known} == known
    assert known
