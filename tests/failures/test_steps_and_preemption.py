"""Failures that other engines had with steps in flight and with preemption. The number is that of the failures page; each
docstring is the rule that keeps it out."""

import os

import pytest

from onward.engine.core import MAX_TOMBSTONES
from onward.engine.request import Request, RequestStatus
from onward.engine.scheduling import scheduling_policy
from onward.engine.step_result_processor import StepResultProcessor
from onward.proto.step import SlotAdvanced, SlotEvent, SlotPreempted, SlotTokens, StepPlan, StepResult
from onward.proto.worker_wire_address import ShmWireAddress
from onward.transport import shm_rows, shm_wire
from onward.transport.shm_wire import NUM_RING_ENTRIES, ShmEngineWireEnd, ShmWorkerWireEnd
from tests.engine.harness import Client, Harness


def fill(harness: Harness) -> None:
    """As many steps in flight as there may be."""
    while harness.plan() is not None:
        pass


def commit(harness: Harness, events: list[SlotEvent]) -> None:
    """The oldest plan's result has these events."""
    harness.core.commit(StepResult(harness.plans.popleft().step, events), harness.now_s)
    harness.deliver()


def preempting_low(**shape: object) -> tuple[Harness, Client]:
    """A harness in which the oldest plan preempts the request `low`, and another one runs."""
    harness = Harness(**({"num_blocks": 8, "block_size": 4, "max_num_seqs": 2} | shape))  # type: ignore[arg-type]
    low = harness.submit("low", [1] * 9, max_tokens=20, priority=5)
    harness.plan()
    harness.answer()
    harness.submit("high", [2] * 9, max_tokens=20)
    for _ in range(100):
        if harness.plans and harness.plans[0].preempt:
            return harness, low
        if not harness.core.scheduler.preempting:
            harness.plan()
        if not harness.plans[0].preempt:
            harness.answer()
    raise AssertionError("nobody is preempted")


def test_f01_each_value_has_one_meaning_and_a_reply_names_its_epoch() -> None:
    """An empty slot, an unfinished chunk and a preempted request are three values; only the epoch's own reply counts."""
    said: list[SlotEvent] = [SlotAdvanced(1, 7, 4), SlotPreempted(2, 8, 12), SlotTokens(3, 9, 0, 4, [0])]
    cells, side = shm_rows.encode(said, num_slots=4, max_tokens_per_row=2)
    assert shm_rows.decode(cells.tolist(), side, 2) == said, "slot 0 was not run, and says nothing"
    assert len({shm_rows.NO_TOKEN, shm_rows.PREEMPTED_TOKEN_ID, shm_rows.FAILED, 0}) == 4

    harness, _ = preempting_low()
    low = harness.core._live["low"]
    assert low.slot is not None
    stale = SlotPreempted(low.slot, low.slot_epoch - 1, len(low.token_ids))
    commit(harness, [stale, SlotAdvanced(low.slot, low.slot_epoch, low.num_computed)])
    assert low.status is RequestStatus.PREEMPTING
    assert harness.metric("stale", "preempted") == 1


def test_f02_a_plan_of_nothing_but_preempts_has_a_result() -> None:
    """A result for every plan."""
    harness = Harness(num_blocks=8, block_size=4, max_num_seqs=2)
    harness.submit("low", [1] * 20, max_tokens=8, priority=5)
    harness.plan()
    harness.answer()
    harness.submit("high", [2] * 20, max_tokens=8)
    fill(harness)
    while not harness.all_plans[-1].preempt:
        harness.answer()
        fill(harness)
    assert harness.all_plans[-1].run == []
    while harness.plans:
        harness.answer()
    assert harness.core._live["low"].status is RequestStatus.WAITING
    harness.run_until_idle()
    harness.check_all_exact()


def test_f03_a_slot_that_is_missing_from_a_result_has_said_nothing() -> None:
    """Absence means nothing."""
    harness = Harness(max_num_seqs=2, max_steps_in_flight=1)
    harness.submit("keeper", [3] * 4, max_tokens=20)
    harness.submit("low", [1] * 4, max_tokens=20, priority=5)
    harness.plan()
    harness.answer()
    harness.submit("high", [2] * 4, max_tokens=20)
    harness.plan()
    low = harness.core._live["low"]
    result = harness.worker.step(harness.plans.popleft())
    [reply] = [event for event in result.events if event.slot_epoch == low.slot_epoch]
    harness.core.commit(StepResult(result.step, [e for e in result.events if e is not reply]), harness.now_s)
    harness.deliver()
    assert low.status is RequestStatus.PREEMPTING
    assert low.slot is not None, "it keeps its slot until the reply"
    harness.plan()
    late = harness.worker.step(harness.plans.popleft())
    harness.core.commit(StepResult(late.step, [reply, *late.events]), harness.now_s)
    harness.deliver()
    assert low.status is RequestStatus.WAITING
    harness.run_until_idle()
    harness.check_all_exact()


def test_f04_a_request_that_finished_is_not_requeued_by_the_reply_that_crossed_its_end() -> None:
    """Finish beats requeue, in one place."""
    harness = Harness(max_num_seqs=1)
    low = harness.submit("low", [1] * 4, max_tokens=2, priority=5)
    harness.plan()
    harness.answer()
    harness.plan()
    harness.submit("high", [2] * 4, max_tokens=3)
    crossing = harness.plan()
    assert crossing is not None
    assert len(crossing.preempt) == 1
    harness.answer()
    assert low.finish_reason == "length"
    harness.answer()
    assert "low" not in harness.core._live
    assert "low" not in {request.request_id for request in harness.core.scheduler.waiting}
    harness.run_until_idle()
    assert low.num_finishes == 1
    harness.check_all_exact()
    harness.core.audit_idle()


def test_f05_token_zero_is_a_token_everywhere() -> None:
    """Typed events: no number is tested for being a token."""
    cells, side = shm_rows.encode([SlotTokens(0, 0, 0, 0, [0])], 1, 1)
    assert shm_rows.decode(cells.tolist(), side, 1) == [SlotTokens(0, 0, 0, 0, [0])]
    harness = Harness(vocab_size=1)
    client = harness.submit("a", [0], max_tokens=5)
    harness.run_until_idle()
    assert client.tokens == [0] * 5


def test_f06_a_resumed_request_comes_back_with_its_whole_list() -> None:
    """A resubmission carries every token, also when only a chunk of them is computed next."""
    harness, low = preempting_low(max_num_batched_tokens=4)
    harness.answer()
    known = [1] * 9 + low.tokens
    assert len(low.tokens) >= 1
    harness.run_until_idle()
    [first, second, *_] = [a for plan in harness.all_plans for a in plan.assign if a.request_id == "low"]
    assert first.token_ids == [1] * 9
    assert second.token_ids == known
    assert second.num_prompt == 9
    harness.check_all_exact()


def test_f07_a_step_that_was_in_flight_at_the_preemption_changes_only_the_list() -> None:
    """Epochs instead of counters that are adjusted by hand."""
    harness = Harness(max_num_seqs=1)
    low = harness.submit("low", [1] * 4, max_tokens=9, priority=5)
    harness.plan()
    harness.answer()
    harness.plan()
    harness.submit("high", [2] * 4, max_tokens=3)
    harness.plan()
    request = harness.core._live["low"]
    assert request.status is RequestStatus.PREEMPTING
    harness.answer()
    assert len(low.tokens) == 2, "the token of the step in flight is kept"
    harness.answer()
    assert (request.status, request.num_computed, len(request.planned_runs)) == (RequestStatus.WAITING, 0, 0)
    assert request.planned_len == len(request.token_ids) == 6
    harness.run_until_idle()
    harness.check_all_exact()


def test_f07_what_an_older_epoch_still_brings_does_not_touch_the_newer_one() -> None:
    """Epochs instead of counters that are adjusted by hand."""
    harness = Harness()
    client = harness.submit("a", [1, 2, 3], max_tokens=9)
    harness.plan()
    harness.answer()
    fill(harness)
    harness.resubmit(client)
    harness.answer()
    assert harness.plan() is not None, "the new epoch runs while a step of the old one is in flight"
    harness.answer()
    assert harness.metric("stale", "tokens") == 2
    assert len(client.tokens) == 1
    harness.run_until_idle()
    assert client.tokens == harness.expected(client)


def test_f08_blocks_are_not_reused_while_a_step_in_flight_may_write_them() -> None:
    """Fences."""
    harness = Harness(num_blocks=4, block_size=4, max_num_seqs=2, prefix_caching=False)
    harness.submit("a", [1] * 12, max_tokens=4)
    harness.plan()
    harness.answer()
    fill(harness)
    harness.abort("a")
    new = harness.submit("b", [2] * 12, max_tokens=4)
    assert harness.plan() is None, "all blocks are fenced"
    assert harness.core.scheduler.pool.num_fenced == 4
    harness.answer()
    assert harness.plan() is None, "one step may still write"
    harness.answer()
    assert harness.plan() is not None
    harness.run_until_idle()
    assert new.tokens == harness.expected(new)


def test_f09_blocks_that_are_only_fenced_are_waited_for() -> None:
    """The scheduler sees fences: no request is preempted for blocks that come back by themselves."""
    harness = Harness(num_blocks=16, block_size=4, max_num_seqs=4, prefix_caching=False)
    harness.submit("gone", [1] * 20, max_tokens=8)
    old = harness.submit("old", [2] * 15, max_tokens=16)
    harness.submit("young", [3] * 15, max_tokens=8)
    harness.plan()
    harness.answer()
    harness.plan()
    filler = harness.core.scheduler.pool
    while filler.num_available:
        filler.allocate(1)
    harness.abort("gone")
    fenced = filler.num_fenced
    assert fenced > 0
    for _ in range(3):
        harness.plan()
    assert harness.core._live["old"].planned_computed > 15
    assert not any(plan.preempt for plan in harness.all_plans)
    assert old.finish_reason is None


def test_f09_nobody_is_preempted_whose_blocks_are_all_shared() -> None:
    """Never a victim whose preemption frees nothing."""
    harness = Harness(num_blocks=16, block_size=4, max_num_seqs=3)
    harness.submit("needer", [1] * 9, max_tokens=9)
    for name in ("owning", "sharing"):
        harness.submit(name, [len(name)] * 9, max_tokens=9)
    harness.plan()
    needer, owning, sharing = (harness.core._live[name] for name in ("needer", "owning", "sharing"))
    pool = harness.core.scheduler.pool
    pool.start_sending(sharing.block_ids)
    shortage = scheduling_policy.CapacityShortage(pool.num_available + 2)

    def choose(running: list[Request]) -> list[Request]:
        return scheduling_policy.choose_victims(needer, running, shortage, pool.estimate_reclaim(), same_priority=True)

    assert choose([sharing, owning]) == [owning]
    assert choose([sharing]) == []


def test_f10_two_requests_share_a_block_by_its_hash_and_in_no_other_way() -> None:
    """Sharing is decided by hash and owner only; a fence is neither."""
    harness = Harness(vocab_size=4, block_size=4)
    harness.submit("first", [1] * 9, max_tokens=50, end=(0, 1, 2, 3))
    fill(harness)
    blocks = list(harness.core._live["first"].block_ids)
    harness.answer()
    pool = harness.core.scheduler.pool
    assert pool.count_by_state()["fenced"] == len(blocks)
    harness.submit("same", [1] * 9, max_tokens=4)
    harness.submit("other", [2] * 9, max_tokens=4)
    harness.submit("salted", [1] * 9, max_tokens=4, cache_salt="s")
    harness.plan()
    tables = {name: harness.core._live[name].block_ids for name in ("same", "other", "salted")}
    assert tables["same"][:2] == blocks[:2]
    assert not set(tables["other"]) & {*blocks, *tables["same"], *tables["salted"]}
    assert not set(tables["salted"]) & {*blocks, *tables["same"]}
    reclaim = pool.estimate_reclaim()
    reclaim.num_blocks = 0
    reclaim.add(tables["same"])
    assert reclaim.num_blocks == len(tables["same"]), "one holder each: a fence holds nothing"
    harness.check()
    harness.run_until_idle()
    harness.core.audit_idle()


def test_f11_a_token_is_taken_at_its_position_once() -> None:
    """Positions: the next one is taken, an old one is dropped and counted, one too far ahead is a fault."""
    harness = Harness(max_steps_in_flight=1)
    client = harness.submit("a", [1, 2], max_tokens=6)
    harness.plan()
    result = harness.worker.step(harness.plans.popleft())
    harness.core.commit(StepResult(result.step, result.events * 2), harness.now_s)
    harness.deliver()
    assert len(client.tokens) == 1
    assert harness.metric("stale", "position") == 1
    harness.run_until_idle()
    assert client.tokens == harness.expected(client)


def test_f12_a_slot_has_no_new_tenant_while_a_surplus_step_of_the_last_one_is_in_flight() -> None:
    """Slots are fenced like blocks."""
    harness = Harness(vocab_size=4, max_num_seqs=1)
    first = harness.submit("first", [1] * 5, max_tokens=50, end=(0, 1, 2, 3))
    fill(harness)
    next_ = harness.submit("next", [2] * 5, max_tokens=3)
    harness.answer()
    assert first.finish_reason == "stop"
    assert harness.plan() is None, "the surplus step still speaks for the slot"
    harness.answer()
    assert harness.plan() is not None
    harness.run_until_idle()
    assert next_.tokens == harness.expected(next_)


def test_f13_only_what_was_computed_is_cached() -> None:
    """A request preempted in its prefill leaves in the cache what is computed, and no token of its output beyond."""
    harness = Harness(num_blocks=13, block_size=4, max_num_seqs=2, max_num_batched_tokens=4, max_steps_in_flight=1)
    harness.submit("high", [50] * 4, max_tokens=30)
    harness.plan()
    harness.answer()
    harness.plan()
    harness.answer()
    harness.submit("low", list(range(1, 9)), generated=list(range(20, 52)), max_tokens=36, epoch=2, priority=5)
    low, computed = harness.core._live["low"], 0
    for _ in range(100):
        harness.plan()
        computed = low.num_computed
        preempts = bool(harness.plans[0].preempt)
        harness.answer()
        if preempts:
            break
    assert low.status is RequestStatus.WAITING
    assert 8 < computed < 40, "in the middle of computing the output that it came with"
    assert harness.core.scheduler.pool.count_cached_prefix(low.compute_block_hashes(4, 10))[0] == computed // 4
    harness.run_until_idle()
    harness.core.audit_idle()


@pytest.mark.parametrize("state", ["waiting", "prefilling", "running", "preempting", "finished", "unknown"])
def test_f14_an_abort_is_answered_in_every_state_and_twice(state: str) -> None:
    """Abort in every state, idempotent; what it leaves behind is bounded."""
    harness = Harness(num_blocks=10, block_size=4, max_num_seqs=1, max_num_batched_tokens=4, tombstone_s=5.0)
    if state == "waiting":
        harness.submit("first", [3] * 5, max_tokens=4)
        harness.plan()
    if state != "unknown":
        harness.submit("a", [1] * 10, max_tokens=2 if state == "finished" else 20, priority=1)
    for _ in range({"prefilling": 1, "running": 4, "preempting": 4}.get(state, 0)):
        harness.plan()
        harness.answer()
    if state == "preempting":
        harness.submit("high", [2] * 4, max_tokens=4)
        harness.plan()
    if state == "finished":
        harness.run_until_idle()
    request = harness.core._live.get("a")
    status = {"waiting": RequestStatus.WAITING, "prefilling": RequestStatus.RUNNING, "running": RequestStatus.RUNNING}
    status["preempting"] = RequestStatus.PREEMPTING
    assert (request.status if request else None) == status.get(state)
    for _ in range(2):
        harness.abort("a")
    if state != "unknown":
        assert harness.clients["a"].finish_reason == ("length" if state == "finished" else "abort")
        assert harness.clients["a"].num_finishes == 1
    assert "a" not in harness.core._live
    harness.run_until_idle()
    harness.core.audit_idle()
    harness.tick(6.0)
    assert not harness.core._tombstones


def test_f14_the_marks_of_aborted_requests_are_bounded() -> None:
    """Abort in every state, idempotent; what it leaves behind is bounded."""
    harness = Harness()
    for number in range(MAX_TOMBSTONES + 10):
        harness.abort(f"unknown-{number}")
    assert len(harness.core._tombstones) == MAX_TOMBSTONES


def test_f15_a_name_matches_itself_and_nothing_else() -> None:
    """Exact ids."""
    harness = Harness()
    for name in ("chat-1-0", "chat-1-1", "chat-11-0"):
        harness.submit(name, [1, 2], max_tokens=9, client_request_id="mine" if name == "chat-11-0" else "")
    answer = harness.abort_by_name("", "c", "chat", "chat-", "min")
    assert (answer.aborted, answer.unknown) == ([], ["", "c", "chat", "chat-", "min"])
    harness.abort("chat-1")
    harness.abort("")
    assert all(client.finish_reason is None for client in harness.clients.values())
    answer = harness.abort_by_name("chat-1")
    assert answer.aborted == ["chat-1"]
    assert [c.finish_reason for c in harness.clients.values()] == ["abort", "abort", None]
    assert harness.abort_by_name("mine").aborted == ["mine"]


def test_f16_an_exception_in_one_slot_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Per-request isolation."""
    harness = Harness()
    bad = harness.submit("bad", [1, 2], max_tokens=9)
    good = [harness.submit(f"good{i}", [3, i], max_tokens=9) for i in range(3)]
    process = StepResultProcessor._process

    def raise_for_bad(self: StepResultProcessor, request, *rest) -> None:
        if request.request_id == "bad" and request.num_generated == 2:
            raise ZeroDivisionError
        process(self, request, *rest)

    monkeypatch.setattr(StepResultProcessor, "_process", raise_for_bad)
    harness.run_until_idle()
    assert (bad.error_code, len(bad.tokens)) == ("internal_error", 2)
    assert all(client.tokens == harness.expected(client) for client in good)
    assert harness.metric("isolated_errors") == 1
    harness.core.audit_idle()


def test_f17_nobody_is_admitted_without_a_slot() -> None:
    """Slots are a resource with an owner."""
    harness = Harness(num_blocks=200, max_num_seqs=3)
    for i in range(20):
        harness.submit(f"r{i}", [i + 1, 2], max_tokens=5)
    for _ in range(500):
        fill(harness)
        seated = [r.slot for r in harness.core._live.values() if r.slot is not None]
        assert len(set(seated)) == len(seated) <= 3
        harness.check()
        if not harness.plans:
            break
        harness.answer()
    assert all(assign.slot < 3 for plan in harness.all_plans for assign in plan.assign)
    harness.check_all_exact()


def test_f18_a_result_that_was_taken_is_not_overwritten_by_later_steps() -> None:
    """Buffers have owners: what was read is a copy, and a place of the ring is written again only when it was read."""
    wire = ShmWireAddress("w1", num_slots=2, max_tokens_per_row=2, plan_bytes=1000, extras_bytes=1000)
    memory, ours, theirs = shm_wire.create_ring(wire)
    engine, worker = ShmEngineWireEnd(wire, os.dup(memory), ours), ShmWorkerWireEnd(wire, memory, theirs)
    taken = []
    for step in range(1, 3 * NUM_RING_ENTRIES):
        engine.send(StepPlan(step))
        assert worker.receive() == StepPlan(step)
        worker.send(StepResult(step, [SlotTokens(0, step, step, step, [step, step])]))
        taken.append(engine.receive())
    assert taken == [StepResult(s, [SlotTokens(0, s, s, s, [s, s])]) for s in range(1, 3 * NUM_RING_ENTRIES)]
    engine.close()
    worker.close()


def test_f18_a_plan_in_flight_does_not_change_with_the_request() -> None:
    """Buffers have owners: what a plan carries is its own."""
    harness = Harness()
    harness.submit("a", [1] * 5, max_tokens=30)
    plan = harness.plan()
    assert plan is not None
    [assign] = plan.assign
    token_ids, block_ids = list(assign.token_ids), list(assign.block_ids)
    harness.answer()
    for _ in range(10):
        harness.plan()
        harness.answer()
    assert (assign.token_ids, assign.block_ids) == (token_ids, block_ids)
