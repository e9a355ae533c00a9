"""How fast work went lately, and what a client that is turned away is told of it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from onward.engine.scheduling import scheduling_policy
from onward.engine.service_rates import WINDOW_S, RecentRate


def test_a_rate_is_that_of_the_last_seconds_and_of_no_earlier_ones() -> None:
    rate = RecentRate()
    for second in range(100):
        rate.add(1000 if second < 50 else 20, float(second))
    assert rate.per_s(100.0) == 20


def test_nothing_is_known_before_there_was_work_and_long_after_it() -> None:
    rate = RecentRate()
    assert rate.per_s(5.0) is None
    rate.add(30, 5.0)
    assert rate.per_s(5.0 + WINDOW_S) is not None
    assert rate.per_s(6.0 + WINDOW_S) is None


def test_the_first_moments_of_a_burst_are_no_rate() -> None:
    rate = RecentRate()
    rate.add(100, 7.001)
    assert rate.per_s(7.002) == 100, "in a whole second, not in a thousandth of one"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 1000)), min_size=1, max_size=200))
def test_a_rate_is_never_more_than_all_work_of_the_window_and_its_memory_is_bounded(work: list) -> None:
    rate, now_s, done = RecentRate(), 0.0, list[tuple[float, int]]()
    for pause_s, amount in work:
        now_s += pause_s
        rate.add(amount, now_s)
        done.append((now_s, amount))
        recent = sum(amount for at_s, amount in done if at_s >= now_s - WINDOW_S - 1)
        assert 0 <= (rate.per_s(now_s) or 0) <= recent
        assert len(rate._sums) <= WINDOW_S + 2


def test_a_client_is_told_when_the_excess_is_worked_off_within_bounds() -> None:
    assert scheduling_policy.retry_after_s(excess=500, per_s=100) == 5
    assert scheduling_policy.retry_after_s(excess=1, per_s=100) == scheduling_policy.MIN_RETRY_S
    assert scheduling_policy.retry_after_s(excess=1e9, per_s=1) == scheduling_policy.MAX_RETRY_S
    assert scheduling_policy.retry_after_s(excess=1e9, per_s=None) == scheduling_policy.MIN_RETRY_S, "nothing is known"
    assert scheduling_policy.retry_after_s(excess=1e9, per_s=0.0) == scheduling_policy.MIN_RETRY_S
