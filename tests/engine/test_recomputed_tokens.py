"""`onward_recomputed_tokens_total` says how many tokens were computed twice, and why."""

import pytest

from tests.engine.harness import Harness

ONE_STEP = {"max_steps_in_flight": 1, "prefix_caching": False}
"""No token is computed in vain, and none comes from the cache: what is planned is what is computed."""


def recomputed(harness: Harness) -> dict[str, float]:
    [family] = [one for one in harness.core.registry.snapshot() if one.name == "onward_recomputed_tokens_total"]
    return {entry.labels["cause"]: entry.value for entry in family.series if entry.value}


def num_planned(harness: Harness) -> int:
    return sum(run.num_tokens for plan in harness.all_plans for run in plan.run)


def num_needed(harness: Harness) -> int:
    """Each token of a request is computed once, but for the last one, which nothing follows."""
    clients = harness.clients.values()
    return sum(len(client.submit.prompt_token_ids) + len(client.tokens) - 1 for client in clients)


def test_every_cause_is_shown_before_it_occurs() -> None:
    [family] = [one for one in Harness().core.registry.snapshot() if one.name == "onward_recomputed_tokens_total"]
    causes = ("preemption", "worker", "engine", "lost", "resume")
    assert {entry.labels["cause"]: entry.value for entry in family.series} == dict.fromkeys(causes, 0.0)


def test_an_undisturbed_run_computes_nothing_twice() -> None:
    harness = Harness(**ONE_STEP)
    for index in range(5):
        harness.submit(f"r-{index}", [index + 1] * 9, max_tokens=12)
    harness.run_until_idle()
    assert recomputed(harness) == {}
    assert num_planned(harness) == num_needed(harness)


def test_preempted_requests_compute_again_what_they_had() -> None:
    harness = Harness(num_blocks=12, **ONE_STEP)
    for index in range(6):
        harness.submit(f"r-{index}", [index + 1] * 9, max_tokens=24)
    harness.run_until_idle()
    assert harness.metric("preemptions") > 3
    assert recomputed(harness) == {"preemption": num_planned(harness) - num_needed(harness)}


def test_a_dead_worker_takes_the_kv_of_all_running_requests_along() -> None:
    harness = Harness(**ONE_STEP)
    for index in range(4):
        harness.submit(f"r-{index}", [index + 1] * 9, max_tokens=12)
    for _ in range(6):
        harness.plan()
        harness.answer()
    num_lost = sum(request.num_computed for request in harness.core.scheduler.running)
    assert num_lost > 30
    harness.crash_worker()
    harness.run_until_idle()
    assert recomputed(harness) == {"worker": num_lost}
    assert num_planned(harness) == num_needed(harness) + num_lost


@pytest.mark.parametrize(("fields", "cause"), [({}, "resume"), ({"restart_cause": "engine"}, "engine")])
def test_a_request_that_comes_with_tokens_has_been_computed_elsewhere(fields: dict[str, str], cause: str) -> None:
    harness = Harness(**ONE_STEP)
    harness.submit("r-0", [1] * 9, max_tokens=12)
    harness.run_until_idle()
    given = harness.clients["r-0"].tokens[:5]
    harness.submit("r-1", [1] * 9, max_tokens=12, generated=given, **fields)
    harness.run_until_idle()
    assert recomputed(harness) == {cause: 9 + 5 - 1}


def test_a_resubmission_without_tokens_counts_nothing() -> None:
    harness = Harness(**ONE_STEP)
    harness.submit("r-0", [1] * 9, max_tokens=12, restart_cause="engine")
    harness.run_until_idle()
    assert recomputed(harness) == {}


def test_tokens_that_the_prefix_cache_still_has_are_not_computed_again() -> None:
    harness = Harness()
    harness.submit("r-0", [1] * 9, max_tokens=12)
    harness.run_until_idle()
    given = harness.clients["r-0"].tokens[:5]
    harness.submit("r-1", [1] * 9, max_tokens=12, generated=given)
    harness.run_until_idle()
    # 13 tokens had been computed; the three full blocks of four among them are found again.
    assert recomputed(harness) == {"resume": 1}
