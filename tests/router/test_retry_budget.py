"""Retries are a bounded share of the traffic; resumes after progress are spread out, never refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.router.retry_budget import (
    MAX_PACE_S,
    MIN_RETRIES_PER_WINDOW,
    PACE_BURST,
    PACED_PER_S,
    WINDOW_S,
    RetryBudget,
)


def granted(budget: RetryBudget, asked: int, now_s: float, caller: str = "") -> int:
    return sum(budget.try_spend(caller, now_s) for _ in range(asked))


def test_a_small_cluster_may_retry_although_a_share_of_few_is_none() -> None:
    assert granted(RetryBudget(0.2), 100, 0.0) == MIN_RETRIES_PER_WINDOW


def test_an_outage_does_not_become_a_storm() -> None:
    budget = RetryBudget(0.2)
    for number in range(1000):
        budget.record_request("", number / 100)
    assert granted(budget, 1000, 10.0) == 200


def test_what_was_spent_comes_back_after_a_minute() -> None:
    budget = RetryBudget(0.2)
    granted(budget, 100, 0.5)
    assert not budget.try_spend("", 0.5 + WINDOW_S / 2)
    assert budget.try_spend("", 1.0 + WINDOW_S)


def test_requests_of_long_ago_allow_nothing_now() -> None:
    budget = RetryBudget(0.2)
    for _ in range(1000):
        budget.record_request("", 0.0)
    assert granted(budget, 1000, WINDOW_S + 1) == MIN_RETRIES_PER_WINDOW


def test_a_share_of_zero_leaves_the_floor_and_without_it_nothing() -> None:
    assert granted(RetryBudget(0.0), 100, 0.0) == MIN_RETRIES_PER_WINDOW
    assert granted(RetryBudget(0.0, floor=0), 100, 0.0) == 0


def test_the_retries_of_one_caller_leave_those_of_another() -> None:
    budget = RetryBudget(0.2)
    for number in range(1000):
        budget.record_request("flood", number / 100)
    for number in range(100):
        budget.record_request("other", number / 10)
    assert granted(budget, 1000, 10.0, "flood") == 200
    assert granted(budget, 1000, 10.0, "other") == 20


def test_callers_without_requests_for_a_minute_are_forgotten_and_their_spending_is_not_before() -> None:
    budget = RetryBudget(0.2)
    for number in range(1000):
        granted(budget, MIN_RETRIES_PER_WINDOW, 0.0, f"caller {number}")
    assert granted(budget, 1, WINDOW_S - 1, "caller 7") == 0
    assert granted(budget, 1, 2 * WINDOW_S, "caller 7") == 1
    assert budget.num_callers == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.floats(0, 5)), max_size=300), st.floats(0, 1))
def test_within_any_minute_no_more_is_granted_than_floor_and_share(
    events: list[tuple[bool, float]], share: float
) -> None:
    budget, now_s = RetryBudget(share), 0.0
    requests, retries = [], []
    for is_request, pause_s in events:
        now_s += pause_s
        if is_request:
            budget.record_request("", now_s)
            requests.append(now_s)
        elif budget.try_spend("", now_s):
            retries.append(now_s)
            # Whole seconds are counted: a request may count for up to one longer than the window.
            recent = sum(at_s > now_s - WINDOW_S - 1 for at_s in requests)
            assert sum(at_s > now_s - WINDOW_S + 1 for at_s in retries) <= max(MIN_RETRIES_PER_WINDOW, share * recent)


def test_the_first_resumes_start_at_once_and_the_others_one_after_another() -> None:
    budget = RetryBudget(0.2)
    waits = [budget.pacing_delay_s(5.0) for _ in range(PACE_BURST + 3)]
    assert waits[:PACE_BURST] == [0.0] * PACE_BURST
    assert waits[PACE_BURST:] == pytest.approx([1 / PACED_PER_S, 2 / PACED_PER_S, 3 / PACED_PER_S])


def test_no_resume_waits_longer_than_the_bound_however_many_there_are() -> None:
    budget = RetryBudget(0.0, floor=0)
    assert max(budget.pacing_delay_s(0.0) for _ in range(10_000)) == MAX_PACE_S


def test_once_the_wave_is_over_nobody_waits() -> None:
    budget = RetryBudget(0.2)
    for _ in range(10_000):
        budget.pacing_delay_s(0.0)
    assert budget.pacing_delay_s(MAX_PACE_S + 1) == 0.0
