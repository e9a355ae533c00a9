"""The rules of the engine core, one by one."""

import msgspec

from onward.proto.engine import Abort, AbortByName
from onward.proto.step import SlotFailed, SlotTokens, StepResult
from tests.engine.harness import API, Harness


def test_one_request_gets_the_model_s_tokens() -> None:
    harness = Harness()
    client = harness.submit("a", [1, 2, 3], max_tokens=10)
    harness.run_until_idle()
    assert client.accepted
    assert client.finish_reason == "length"
    harness.check_all_exact()
    harness.core.audit_idle()


def test_a_step_is_planned_while_another_one_runs() -> None:
    harness = Harness()
    for i in range(4):
        harness.submit(f"r{i}", [i + 1] * 9, max_tokens=50)
    harness.run_until_idle()
    records = list(harness.core.step_log.records)
    assert sum(record.overlapped for record in records) >= 0.9 * len(records)
    harness.check_all_exact()


def test_a_small_pool_preempts_many_times_and_outputs_stay_the_same() -> None:
    harness = Harness(num_blocks=20, block_size=4, max_num_seqs=8)
    for i in range(12):
        harness.submit(f"r{i}", [i + 1, i + 2, i + 3], max_tokens=60, seed=i, temperature=float(i % 2))
    harness.run_until_idle()
    assert harness.metric("preemptions") >= 10
    harness.check_all_exact()
    harness.core.audit_idle()


def test_a_preempt_is_answered_in_a_step_in_which_nothing_runs() -> None:
    harness = Harness(num_blocks=8, block_size=4, max_num_seqs=2)
    harness.submit("low", [1] * 20, max_tokens=8, priority=5)
    harness.plan()
    harness.answer()
    harness.submit("high", [2] * 20, max_tokens=8, priority=0)
    while not harness.core.scheduler.preempting:
        harness.plan()
        if not harness.core.scheduler.preempting:
            harness.answer()
    assert harness.all_plans[-1].run == []
    while harness.plans:
        harness.answer()
    assert not harness.core.scheduler.preempting
    harness.run_until_idle()
    harness.check_all_exact()


def test_the_oldest_of_the_highest_priority_never_loses_its_blocks() -> None:
    harness = Harness(num_blocks=20, block_size=4)
    oldest = harness.submit("oldest", [9, 8, 7], max_tokens=70)
    for i in range(8):
        harness.submit(f"r{i}", [i + 1] * 6, max_tokens=60)
    request = harness.core._live["oldest"]
    while oldest.finish_reason is None:
        while harness.plan():
            pass
        harness.answer()
        assert request.num_preemptions == 0
    harness.run_until_idle()
    assert harness.metric("preemptions") > 0
    harness.check_all_exact()


def test_blocks_of_an_aborted_request_are_fenced_until_its_step_is_answered() -> None:
    harness = Harness()
    harness.submit("a", [1] * 8, max_tokens=20)
    harness.plan()
    harness.plan()
    harness.abort("a")
    assert harness.clients["a"].finish_reason == "abort"
    assert harness.core.scheduler.pool.count_by_state()["fenced"] > 0
    harness.answer()
    assert harness.core.scheduler.pool.count_by_state()["fenced"] > 0
    harness.answer()
    assert harness.core.scheduler.pool.count_by_state()["fenced"] == 0
    harness.core.audit_idle()


def test_abort_works_in_every_state_and_twice() -> None:
    harness = Harness(num_blocks=20, block_size=4, max_num_seqs=2)
    for name in ("running", "other", "waiting"):
        harness.submit(name, [len(name)] * 10, max_tokens=20)
    harness.plan()
    for name in ("waiting", "running", "running", "unknown"):
        if name in harness.clients:
            harness.abort(name)
    assert harness.clients["running"].finish_reason == harness.clients["waiting"].finish_reason == "abort"
    harness.run_until_idle()
    assert harness.clients["other"].tokens == harness.expected(harness.clients["other"])
    harness.core.audit_idle()


def test_an_api_process_ends_its_own_attempt_and_not_another_s_with_the_same_number() -> None:
    harness = Harness()
    client = harness.submit("a", [1, 2], max_tokens=6, epoch=3)
    harness.core.receive_from_api("api-other", Abort(1, "a", 3), harness.now_s)
    harness.deliver()
    assert client.finish_reason is None
    harness.run_until_idle()
    assert client.tokens == harness.expected(client)


def test_an_abort_that_is_said_again_spares_what_came_after_it() -> None:
    harness = Harness()
    harness.now_s = 25.0
    for name, waited_s in (("old-0", 15.0), ("new-0", 5.0)):
        harness.submit(name, [1, 2], max_tokens=9, client_request_id="mine", waited_s=waited_s)
    for names, everything in ((["mine"], False), ([], True)):
        harness.core.receive_from_api(API, AbortByName(harness.seq, 0, names, everything, 10.0), harness.now_s)
        harness.deliver()
        assert [client.finish_reason for client in harness.clients.values()] == ["abort", None]
    assert harness.abort_by_name("mine").aborted == ["mine"]
    assert [client.finish_reason for client in harness.clients.values()] == ["abort", "abort"]


def test_a_user_s_abort_leaves_a_tombstone_for_late_resubmissions() -> None:
    harness = Harness(tombstone_s=5.0)
    client = harness.submit("a", [1, 2], max_tokens=20)
    harness.abort("a")
    late = harness.submit("a", [1, 2], max_tokens=20, epoch=2)
    assert client.finish_reason == late.finish_reason == "abort"
    harness.now_s += 6
    harness.core.tick(harness.now_s)
    harness.deliver()
    again = harness.submit("a", [1, 2], max_tokens=3, epoch=3)
    harness.run_until_idle()
    assert again.tokens == harness.expected(again)


def test_a_second_prompt_reuses_the_blocks_of_the_first_and_of_its_answer() -> None:
    harness = Harness(block_size=4)
    first = harness.submit("a", list(range(1, 14)), max_tokens=12)
    harness.run_until_idle()
    second = harness.submit("b", list(range(1, 14)) + first.tokens + [60], max_tokens=4)
    harness.run_until_idle()
    # 13 + 12 + 1 tokens; the KV of the last generated token was never computed, so 24 are in full blocks.
    assert second.cached == 24
    harness.check_all_exact()


def test_a_follow_up_shares_blocks_that_are_still_fenced() -> None:
    harness = Harness(vocab_size=4)
    first = harness.submit("a", [1] * 9, max_tokens=50, end=(0, 1, 2, 3))
    harness.plan()
    harness.plan()
    harness.answer()
    assert first.finish_reason == "stop"
    assert harness.core.scheduler.pool.count_by_state()["fenced"] > 0
    harness.submit("b", [1] * 9, max_tokens=4)
    harness.run_until_idle()
    assert harness.clients["b"].cached == 8
    harness.check_all_exact()
    harness.core.audit_idle()


def test_another_salt_shares_nothing() -> None:
    harness = Harness()
    harness.submit("a", list(range(1, 20)), cache_salt="alice")
    harness.run_until_idle()
    other = harness.submit("b", list(range(1, 20)), cache_salt="bob")
    harness.run_until_idle()
    assert other.cached == 0


def test_min_tokens_and_end_tokens_decide_the_end() -> None:
    harness = Harness(vocab_size=8)
    early = harness.submit("a", [1, 2, 3], max_tokens=60, end=(4,))
    late = harness.submit("b", [1, 2, 3], max_tokens=60, end=(4,), min_tokens=30)
    harness.run_until_idle()
    assert early.finish_reason == "stop"
    assert early.tokens[-1] == 4
    assert len(late.tokens) > 30
    assert 4 not in late.tokens[:30]
    harness.check_all_exact()


def test_token_id_zero_is_a_token() -> None:
    harness = Harness(vocab_size=2)
    client = harness.submit("a", [0, 0, 1], max_tokens=40)
    harness.run_until_idle()
    assert 0 in client.tokens
    harness.check_all_exact()


def test_a_list_that_has_ended_finishes_without_a_step() -> None:
    harness = Harness()
    full = harness.submit("a", [1, 2], max_tokens=3)
    harness.run_until_idle()
    steps = len(harness.all_plans)
    again = harness.submit("b", [1, 2], max_tokens=3, generated=full.tokens, epoch=2)
    assert again.finish_reason == "length"
    assert len(harness.all_plans) == steps
    assert harness.core.idle


def test_a_request_that_may_produce_nothing_is_refused() -> None:
    harness = Harness()
    client = harness.submit("a", [1, 2], max_tokens=0)
    assert not client.accepted
    assert client.error_code == "invalid_request"
    assert harness.core.idle


def test_a_request_that_can_never_fit_is_refused_and_told_by_how_much() -> None:
    harness = Harness(num_blocks=4, block_size=4)
    client = harness.submit("a", [1] * 10, max_tokens=9)
    assert client.error_code == "context_length_exceeded"
    assert not client.accepted
    assert harness.core.idle


def test_a_full_queue_refuses_new_requests_but_not_resumed_ones() -> None:
    harness = Harness(max_queue=2, max_num_seqs=1)
    for i in range(3):
        assert harness.submit(f"r{i}", [1, 2, i]).accepted, "one for the slot, two for the queue"
    assert harness.submit("late", [5]).error_code == "overloaded"
    assert harness.submit("resumed", [5, 6], epoch=2).accepted
    harness.clients.pop("late")
    harness.run_until_idle()
    harness.check_all_exact()


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    harness = Harness(max_num_seqs=1)
    running = harness.submit("a", [1, 2], max_tokens=50, deadline_in_s=1.0)
    waiting = harness.submit("b", [1, 2], max_tokens=50, deadline_in_s=2.0)
    harness.plan()
    harness.answer()
    harness.now_s = 1.5
    harness.core.tick(harness.now_s)
    harness.deliver()
    assert running.error_code == "deadline_exceeded"
    assert len(running.tokens) == 1
    assert waiting.finish_reason is None
    harness.now_s = 2.5
    harness.core.tick(harness.now_s)
    harness.deliver()
    assert waiting.error_code == "deadline_exceeded"
    harness.run_until_idle()
    harness.core.audit_idle()


def test_one_slot_s_failure_is_that_request_s_alone() -> None:
    harness = Harness()
    bad = harness.submit("bad", [1, 2], max_tokens=9)
    good = harness.submit("good", [3, 4], max_tokens=9)
    harness.plan()
    result = harness.worker.step(harness.plans.popleft())
    slot = harness.core._live["bad"].slot
    events = [SlotFailed(e.slot, e.slot_epoch, "bad_logits", "NaN") if e.slot == slot else e for e in result.events]
    harness.core.commit(StepResult(result.step, events), harness.now_s)
    harness.deliver()
    harness.run_until_idle()
    assert bad.error_code == "bad_logits"
    assert good.tokens == harness.expected(good)
    harness.core.audit_idle()


def test_a_fault_of_the_engine_itself_ends_only_the_request_that_met_it() -> None:
    harness = Harness()
    bad = harness.submit("bad", [1, 2], max_tokens=9)
    good = harness.submit("good", [3, 4], max_tokens=9)
    harness.plan()
    result = harness.worker.step(harness.plans.popleft())
    slot = harness.core._live["bad"].slot
    # A gap cannot happen on an ordered wire; if it does, it must not cost anyone else a token.
    events = [SlotTokens(e.slot, e.slot_epoch, 7, 2, [1]) if e.slot == slot else e for e in result.events]
    harness.core.commit(StepResult(result.step, events), harness.now_s)
    harness.deliver()
    harness.run_until_idle()
    assert bad.error_code == "internal_error"
    assert bad.tokens == []
    assert good.tokens == harness.expected(good)


def test_a_doubled_token_is_dropped_and_counted() -> None:
    harness = Harness()
    client = harness.submit("a", [1, 2], max_tokens=4)
    harness.plan()
    result = harness.worker.step(harness.plans.popleft())
    harness.core.commit(StepResult(result.step, result.events * 2), harness.now_s)
    harness.deliver()
    harness.run_until_idle()
    assert harness.metric("stale", "position") == 1
    assert client.tokens == harness.expected(client)


def test_a_crash_without_progress_is_charged_and_the_third_one_fails_the_request() -> None:
    harness = Harness()
    client = harness.submit("a", [1, 2, 3], max_tokens=9)
    for charges in (1, 2):
        harness.plan()
        harness.crash_worker()
        assert client.worker_crashes == charges
    harness.plan()
    harness.crash_worker()
    assert client.error_code == "crashed_worker"
    assert harness.core.idle


def test_progress_clears_the_charge() -> None:
    harness = Harness()
    client = harness.submit("a", [1, 2, 3], max_tokens=30)
    for _ in range(8):
        harness.plan()
        harness.answer()
        harness.plan()
        harness.crash_worker()
    harness.run_until_idle()
    assert harness.metric("worker_losses") == 8
    assert client.tokens == harness.expected(client)


def test_a_request_charged_twice_runs_alone_in_its_step() -> None:
    harness = Harness()
    harness.submit("poison", [1, 2, 3], max_tokens=5)
    for _ in range(2):
        harness.plan()
        harness.crash_worker()
    harness.submit("other", [4, 5], max_tokens=5)
    plan = harness.plan()
    assert plan is not None
    assert [assign.request_id for assign in plan.assign] == ["poison"]
    assert harness.plan() is None, "no other step is in flight beside it"
    harness.crash_worker()
    assert harness.clients["poison"].error_code == "crashed_worker"
    assert harness.clients["other"].worker_crashes == 0
    harness.run_until_idle()
    assert harness.clients["other"].tokens == harness.expected(harness.clients["other"])


def test_a_suspect_that_finds_no_room_does_not_hold_up_the_one_that_has_it() -> None:
    """After an engine's death they may come back in any order: the later one runs already when the first one comes."""
    harness = Harness(num_blocks=8, max_num_batched_tokens=8)
    suspect = {"max_tokens": 4, "worker_crashes": 2, "epoch": 2}
    harness.submit("later", list(range(1, 20)), waited_s=0.0, **suspect)
    harness.plan()
    harness.answer()
    harness.submit("first", list(range(20, 40)), waited_s=1.0, **suspect)
    plan = harness.plan()
    assert plan is not None and len(plan.run) == 1, "still alone"
    assert harness.plan() is None
    harness.run_until_idle()
    harness.check_all_exact()


def test_charges_travel_with_a_resubmission_to_another_engine() -> None:
    harness = Harness()
    client = harness.submit("a", [1, 2, 3], max_tokens=9)
    for _ in range(2):
        harness.plan()
        harness.crash_worker()
    harness.crash_engine()
    assert harness.core.scheduler.suspects
    harness.plan()
    harness.crash_worker()
    assert client.error_code == "crashed_worker"


def test_the_engine_says_each_second_what_it_holds() -> None:
    harness = Harness()
    harness.submit("a", [1, 2, 3], max_tokens=9)
    harness.plan()
    harness.answer()
    harness.core.tick(1.5)
    harness.deliver()
    harness.core.tick(1.6)
    harness.deliver()
    [holding] = harness.holding
    assert holding.seq == harness.seq
    assert [(h.request_id, h.epoch, h.position) for h in holding.held] == [("a", 1, 1)]


def test_what_the_engine_holds_is_told_behind_the_tokens_that_led_there() -> None:
    harness = Harness()
    harness.submit("a", [1, 2, 3], max_tokens=1)
    harness.core.tick(0.5)
    harness.core.take_api_messages()
    harness.plan()
    harness.core.commit(harness.worker.step(harness.plans.popleft()), 2.0)
    harness.core.tick(2.0)
    # Were the list read first, the api would take the finished request for lost and send it again.
    assert [type(message).__name__ for _, message in harness.core.take_api_messages()] == [
        "TokenDeltas",
        "HeldRequestsReport",
    ]


def test_the_requests_of_a_dead_api_process_are_aborted() -> None:
    harness = Harness()
    harness.submit("a", [1, 2, 3], max_tokens=9)
    harness.plan()
    harness.core.on_api_lost("api-1", harness.now_s)
    harness.answer()
    harness.run_until_idle()
    assert harness.metric("finished", "abort") == 1
    harness.core.audit_idle()


def test_what_a_dead_api_process_said_last_is_not_begun() -> None:
    """It was on its way when the process died, and the engine hears of the death first."""
    harness = Harness()
    client = harness.submit("a", [1, 2, 3], max_tokens=9)
    harness.core.on_api_lost("api-1", harness.now_s)
    harness.core.receive_from_api("api-1", msgspec.structs.replace(client.submit, request_id="b"), harness.now_s)
    assert harness.core.idle
    assert harness.metric("stale", "owner") == 1
    harness.core.tick(5.0)
    assert harness.core.take_api_messages() == [], "nobody is told each second what is held for it"


def test_a_newer_epoch_replaces_the_older_one_and_an_older_one_is_dropped() -> None:
    harness = Harness()
    client = harness.submit("a", [1, 2, 3], max_tokens=9)
    harness.plan()
    harness.answer()
    harness.plan()
    harness.resubmit(client)
    old = client.submit
    harness.core.receive_from_api("api-1", old, harness.now_s)
    assert harness.metric("stale", "submit") == 1
    harness.run_until_idle()
    assert client.tokens == harness.expected(client)
    harness.core.audit_idle()


def test_a_stop_string_cuts_the_output_and_ends_with_that_reason() -> None:
    harness = Harness()
    harness.submit("a", [1, 2, 3], max_tokens=9)
    for _ in range(3):
        harness.plan()
        harness.answer()
    harness.abort("a", epoch=1, reason="stop", num_tokens=2)
    harness.run_until_idle()
    assert harness.metric("finished", "stop") == 1
    assert harness.metric("finished", "abort") == 0


def test_a_higher_priority_takes_the_place_of_a_lower_one() -> None:
    harness = Harness(max_num_seqs=1)
    low = harness.submit("low", [1, 2, 3], max_tokens=30, priority=3)
    harness.plan()
    harness.answer()
    high = harness.submit("high", [4, 5], max_tokens=5, priority=0)
    while high.finish_reason is None:
        while harness.plan():
            pass
        harness.answer()
    assert low.finish_reason is None
    harness.run_until_idle()
    assert harness.metric("preemptions") == 1
    harness.check_all_exact()


def test_a_higher_priority_does_not_wait_for_a_long_prompt_of_a_lower_one() -> None:
    harness = Harness(num_blocks=200, max_num_batched_tokens=8)
    harness.submit("long", [1] * 400, max_tokens=2, priority=1)
    harness.plan()
    harness.answer()
    urgent = harness.submit("urgent", [2, 3], max_tokens=2, priority=0)
    harness.plan()
    harness.answer()
    assert len(urgent.tokens) == 1
    harness.run_until_idle()
    harness.check_all_exact()


def test_fenced_blocks_are_waited_for_instead_of_preempting_the_next_one() -> None:
    harness = Harness(num_blocks=18, block_size=4, max_num_seqs=3)
    for i in range(3):
        harness.submit(f"r{i}", [i + 1] * 17, max_tokens=30)
    harness.run_until_idle()
    assert 0 < harness.metric("preemptions") < 12
    harness.check_all_exact()


def test_who_waits_for_rows_with_logits_holds_up_nobody_who_needs_none() -> None:
    """A step has few of them, so long prompts whose logprobs are asked for are computed one after the other."""
    harness = Harness(max_num_batched_tokens=256, num_blocks=256)
    for i in range(3):
        harness.submit(f"scored{i}", [i, *range(1, 200)], max_tokens=2, prompt_logprobs=1)
    plain = harness.submit("plain", [1, 2, 3], max_tokens=2)
    plan = harness.plan()
    assert plan is not None and [assign.request_id for assign in plan.assign] == ["scored0", "plain"]
    harness.run_until_idle()
    harness.check_all_exact()
    order = [assign.request_id for plan in harness.all_plans for assign in plan.assign]
    assert order == ["scored0", "plain", "scored1", "scored2"]
    assert len(plain.tokens) == 2
