"""Requests charged with the worker's deaths: which ones are charged, and when a suspect, which runs alone, has its turn."""

from typing import Any

from onward.engine.request import RequestStatus
from onward.proto.step import StepPlan
from tests.engine.harness import Client, Harness
from tests.engine.pd_cluster import Cluster

SUSPECT: dict[str, Any] = {"worker_crashes": 2, "epoch": 2}
MAX_STEPS = 200


def fill(harness: Harness) -> None:
    """As many steps in flight as there may be."""
    while harness.plan() is not None:
        harness.check()


def assigned(plans: list[StepPlan]) -> list[str]:
    return [assign.request_id for plan in plans for assign in plan.assign]


def loaded(**suspect: Any) -> tuple[Harness, Client]:
    """Short requests run, and a long one that needs most of the blocks waits behind them."""
    harness = Harness(num_blocks=16, max_num_seqs=4)
    for index in range(4):
        harness.submit(f"running{index}", [index] * 5, max_tokens=6 + index)
    fill(harness)
    return harness, harness.submit("long", list(range(1, 41)), max_tokens=4, **suspect)


def run_under_load(harness: Harness, long: Client) -> None:
    """Later short requests keep coming until the long one has its first token."""
    for step in range(MAX_STEPS):
        harness.submit(f"later{step}", [step % 50] * 5, max_tokens=6)
        fill(harness)
        harness.answer()
        if long.tokens:
            return
    raise AssertionError(f"no token after {MAX_STEPS} steps: {len(assigned(harness.all_plans))} requests were admitted")


def test_a_suspect_that_waits_for_room_is_not_passed_by_later_requests() -> None:
    harness, long = loaded(**SUSPECT)
    run_under_load(harness, long)
    admitted = assigned(harness.all_plans)
    assert not [name for name in admitted[: admitted.index("long")] if name.startswith("later")]
    harness.run_until_idle()
    harness.check_all_exact()


def test_a_suspect_waits_no_longer_for_room_than_the_same_request_without_charges() -> None:
    """It lets the steps in flight finish before it runs, and that is all."""
    num_steps = {}
    for name, fields in {"plain": {}, "suspect": SUSPECT}.items():
        harness, long = loaded(**fields)
        run_under_load(harness, long)
        num_steps[name] = len(harness.all_plans)
    assert num_steps["suspect"] <= num_steps["plain"] + harness.config.max_steps_in_flight


def test_a_suspect_does_not_pass_earlier_requests_of_the_queue() -> None:
    harness = Harness(num_blocks=16, max_num_seqs=4)
    harness.submit("running", [1] * 20, max_tokens=8)
    fill(harness)
    harness.submit("earlier", [2] * 48, max_tokens=2)
    harness.submit("suspect", [3] * 5, max_tokens=2, **SUSPECT)
    harness.run_until_idle()
    assert assigned(harness.all_plans) == ["running", "earlier", "suspect"]
    harness.check_all_exact()


def test_two_suspects_come_in_the_queue_s_order() -> None:
    harness = Harness(num_blocks=16, max_num_seqs=4)
    harness.submit("running", [1] * 20, max_tokens=8)
    fill(harness)
    harness.submit("large", [2] * 48, max_tokens=2, **SUSPECT)
    harness.submit("small", [3] * 5, max_tokens=2, **SUSPECT)
    harness.run_until_idle()
    assert assigned(harness.all_plans) == ["running", "large", "small"]


def test_two_steps_stay_in_flight_while_a_suspect_waits_for_room() -> None:
    harness, _ = loaded(**SUSPECT)
    assert len(harness.plans) == 2
    harness.answer()
    fill(harness)
    assert harness.core._live["long"].status is RequestStatus.WAITING
    assert len(harness.plans) == 2


def test_a_suspect_runs_alone_also_after_waiting_under_load() -> None:
    harness, long = loaded(**SUSPECT)
    in_flight_beside: set[int] = set()
    for step in range(MAX_STEPS):
        harness.submit(f"later{step}", [step % 50] * 5, max_tokens=6)
        fill(harness)
        epoch = harness.core._live["long"].slot_epoch
        if epoch and any(run.slot_epoch == epoch for plan in harness.plans for run in plan.run):
            in_flight_beside |= {run.slot_epoch for plan in harness.plans for run in plan.run} - {epoch}
        harness.answer()
        if long.tokens:
            break
    assert long.tokens
    assert in_flight_beside == set()


def test_a_step_beside_an_aborted_suspect_s_step_is_not_planned() -> None:
    """The step is in flight still, and may still kill the worker: other requests must not be charged with that."""
    harness = Harness()
    harness.submit("suspect", [1, 2, 3], max_tokens=5, **SUSPECT)
    other = harness.submit("other", [4, 5], max_tokens=5)
    harness.plan()
    harness.abort("suspect")
    assert harness.plan() is None
    harness.crash_worker()
    assert other.worker_crashes == 0
    harness.run_until_idle()
    assert other.tokens == harness.expected(other)


def test_a_suspect_of_a_higher_priority_takes_the_place_of_lower_ones() -> None:
    harness = Harness(num_blocks=8, max_num_seqs=1)
    low = harness.submit("low", [1] * 9, max_tokens=20, priority=1)
    fill(harness)
    suspect = harness.submit("suspect", [2] * 9, max_tokens=4, **SUSPECT)
    while suspect.finish_reason is None:
        fill(harness)
        harness.answer()
    assert low.finish_reason is None
    harness.run_until_idle()
    harness.check_all_exact()


def test_a_suspect_whose_prompt_is_computed_here_is_not_passed_by_those_whose_prompts_peers_compute() -> None:
    """A decode instance: the suspect's only peer is gone, and a peer that works brings the KV of later requests."""
    cluster = Cluster(num_prefill=2, num_blocks=32, prefill={"num_blocks": 256}, handoff_timeout_s=5.0)
    cluster.peers["p1"].kill()
    big = cluster.submit("big", list(range(1, 81)), max_tokens=9, prefill_peers=["p1"], **SUSPECT)
    request = cluster.decode.core._live["big"]
    for step in range(2 * MAX_STEPS):
        cluster.submit(f"later{step}", [step % 60, *range(1, 12)], max_tokens=12, prefill_peers=["p0"])
        cluster.turn()
        cluster.pass_time(0.05)
        if big.tokens:
            break
    assert request.prefill_locally, "its prompt was computed here"
    assert big.tokens, "later requests were served, and this one was not"
    cluster.settle(2.0)
    assert big.tokens == cluster.decode.expected(big)


def preempted_in_the_only_step() -> tuple[Harness, Client, Client]:
    """The step in flight preempts `low` and runs `other`, and `low` has no other part in a step."""
    harness = Harness(num_blocks=12, max_num_seqs=3, max_steps_in_flight=1)
    low = harness.submit("low", [1] * 9, max_tokens=20, priority=5)
    other = harness.submit("other", [3], max_tokens=40)
    harness.plan()
    harness.answer()
    harness.submit("high", [2] * 9, max_tokens=20)
    for _ in range(MAX_STEPS):
        plan = harness.plan()
        assert plan is not None
        if plan.preempt:
            assert harness.core._live["low"].slot_epoch not in {run.slot_epoch for run in plan.run}
            return harness, low, other
        harness.answer()
    raise AssertionError("no request is preempted")


def test_a_request_that_was_only_preempted_in_a_step_is_not_charged_with_the_worker_s_death() -> None:
    harness, low, other = preempted_in_the_only_step()
    harness.crash_worker()
    assert low.worker_crashes == 0
    assert other.worker_crashes == 1, "it ran"
    harness.run_until_idle()
    harness.check_all_exact()


def test_a_preempted_request_is_charged_for_an_earlier_step_in_flight_in_which_it_ran() -> None:
    harness = Harness(num_blocks=8, max_num_seqs=1)
    low = harness.submit("low", [1] * 9, max_tokens=20, priority=5)
    harness.plan()
    harness.submit("high", [2] * 9, max_tokens=4)
    plan = harness.plan()
    assert plan is not None and plan.preempt
    harness.crash_worker()
    assert low.worker_crashes == 1
    harness.run_until_idle()
    harness.check_all_exact()


def test_a_request_under_which_two_engines_died_runs_alone_until_it_has_a_token() -> None:
    harness = Harness()
    harness.submit("other", [1] * 5, max_tokens=4)
    suspect = harness.submit("suspect", [2] * 5, max_tokens=4, engine_crashes=2, epoch=3)
    names: list[str | None] = []
    while not suspect.tokens:
        names.append(harness.core.next_isolated_id())
        while (plan := harness.plan()) is not None:
            if "suspect" in assigned([plan]):
                assert len(plan.run) == 1 and harness.core.runs_alone and harness.core.next_isolated_id() == "suspect"
        harness.answer()
    assert "suspect" in names, "it is named before it is planned"
    assert harness.core.next_isolated_id() is None and not harness.core.scheduler.suspects
    harness.run_until_idle()
    harness.check_all_exact()
