"""How many instances a load asks for."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.supervisor.cluster_load import load_by_model
from onward.supervisor.scaling_policy import LoadFigures, ScalingLimits, ScalingPolicy

LIMITS = ScalingLimits(minimum=1, maximum=4, up_after_s=5.0, down_after_s=60.0)


def load(num_ready: int, running: int, waiting: int = 0, kv_usage: float = 0.0) -> LoadFigures:
    """The load of instances with ten slots each."""
    return LoadFigures(num_ready, running, waiting, 10 * num_ready, kv_usage)


def test_instances_are_added_when_the_load_has_been_high_for_a_while() -> None:
    policy = ScalingPolicy(LIMITS)
    assert policy.target(1, load(1, 9), 0.0) == 1
    assert policy.target(1, load(1, 9), 4.9) == 1
    assert policy.target(1, load(1, 9), 5.0) == 2


def test_a_load_that_is_high_for_a_moment_changes_nothing() -> None:
    policy = ScalingPolicy(LIMITS)
    assert policy.target(1, load(1, 9), 0.0) == 1
    assert policy.target(1, load(1, 6), 4.0) == 1
    assert policy.target(1, load(1, 9), 5.0) == 1
    assert policy.target(1, load(1, 9), 9.9) == 1


def test_requests_that_wait_ask_for_as_many_instances_as_they_need() -> None:
    policy = ScalingPolicy(LIMITS)
    policy.target(1, load(1, 10, waiting=8), 0.0)
    assert policy.target(1, load(1, 10, waiting=8), 5.0) == 3
    policy.target(1, load(1, 10, waiting=90), 10.0)
    assert policy.target(1, load(1, 10, waiting=90), 15.0) == 4, "and not more than --max"


def test_a_full_kv_memory_is_a_high_load_too() -> None:
    policy = ScalingPolicy(LIMITS)
    policy.target(2, load(2, 2, kv_usage=0.9), 0.0)
    assert policy.target(2, load(2, 2, kv_usage=0.9), 5.0) == 3


def test_instances_are_removed_one_at_a_time_when_the_others_have_room() -> None:
    policy = ScalingPolicy(LIMITS)
    assert policy.target(3, load(3, 0), 0.0) == 3
    assert policy.target(3, load(3, 0), 59.0) == 3
    assert policy.target(3, load(3, 0), 60.0) == 2
    assert policy.target(2, load(2, 0), 61.0) == 2, "the time begins anew"
    assert policy.target(2, load(2, 0), 121.0) == 1
    policy.target(1, load(1, 0), 122.0)
    assert policy.target(1, load(1, 0), 1000.0) == 1


def test_without_figures_only_the_limits_count() -> None:
    policy = ScalingPolicy(ScalingLimits(2, 4))
    assert policy.target(1, None, 0.0) == 2
    assert policy.target(3, None, 100.0) == 3
    assert policy.target(5, None, 100.0) == 4
    assert policy.target(3, LoadFigures(0), 200.0) == 3, "instances that are not ready say nothing about the load"


def test_figures_that_are_missing_for_a_moment_begin_the_time_anew() -> None:
    policy = ScalingPolicy(LIMITS)
    policy.target(1, load(1, 9), 0.0)
    policy.target(1, None, 3.0)
    assert policy.target(1, load(1, 9), 5.0) == 1


@given(st.integers(0, 400), st.floats(0, 1), st.integers(1, 4))
def test_a_constant_load_reaches_a_number_and_stays_there(requests: int, kv_per_instance: float, start: int) -> None:
    """Requests spread evenly, and each holds its part of the KV memory wherever it runs."""
    policy, number, seen = ScalingPolicy(LIMITS), start, []
    for second in range(0, 1200, 5):
        waiting = max(0, requests - 10 * number)
        kv_usage = min(1.0, kv_per_instance * start / number)
        number = policy.target(number, load(number, requests - waiting, waiting, kv_usage), float(second))
        assert LIMITS.minimum <= number <= LIMITS.maximum
        seen.append(number)
    changes = sum(one != other for one, other in pairwise(seen))
    assert changes <= LIMITS.maximum - LIMITS.minimum
    assert seen == sorted(seen) or seen == sorted(seen, reverse=True), "it never goes back and forth"


def status(role: str, state: str = "ready", model: str = "m", **more: int) -> dict:
    return {"role": role, "state": state, "model": model, "load": more}


def test_the_load_of_a_model_is_that_of_its_ready_instances_that_take_requests() -> None:
    document = {
        "instances": [
            status("decode", running=3, waiting=1, max_running=8, free_blocks=60, num_blocks=100),
            status("decode", running=5, waiting=0, max_running=8, free_blocks=20, num_blocks=100),
            status("decode", "draining", running=8, max_running=8),
            status("prefill", running=8, max_running=8),
            status("mixed", model="other", running=1, max_running=2),
        ],
        "waiting": {"m": 2},
    }
    loads = load_by_model(document)
    assert loads["m"] == LoadFigures(2, 8, 3, 16, pytest.approx(0.6))  # type: ignore[arg-type]
    assert loads["other"].usage == 0.5
