import pytest

from benchmarks.router.router_cost import RouterCost, RouterCostSample, median_cost, separate, settings


def sample(events_each: int, num_requests: int, cpu_s: float) -> RouterCostSample:
    return RouterCostSample(events_each, num_requests, num_reads=events_each * num_requests, cpu_s=cpu_s)


def test_two_lengths_tell_the_cost_of_a_request_from_that_of_its_events() -> None:
    request_s, event_s = 0.001, 0.00004
    short = sample(8, 100, 100 * (request_s + 8 * event_s))
    long = sample(512, 10, 10 * (request_s + 512 * event_s))
    cost = separate(short, long)
    assert cost.us_per_event == pytest.approx(40)
    assert cost.ms_per_request == pytest.approx(1)


def test_a_cost_is_within_the_bars_only_if_both_parts_are() -> None:
    assert RouterCost(50, 1.5).is_within_bars
    assert not RouterCost(50.1, 0.1).is_within_bars
    assert not RouterCost(1, 1.6).is_within_bars


def test_the_median_of_rounds_is_taken_for_each_part_by_itself() -> None:
    assert median_cost([RouterCost(10, 3), RouterCost(20, 1), RouterCost(90, 2)]) == RouterCost(20, 2)


def test_every_setting_differs_between_short_and_long_streams_in_their_length_alone() -> None:
    for setting in settings(1):
        short, long = setting.short, setting.long
        assert (short.num_streams, short.interval_ms) == (long.num_streams, long.interval_ms)
        assert short.events_each < long.events_each


def test_a_greater_scale_means_more_requests_of_the_same_kind() -> None:
    for once, thrice in zip(settings(1), settings(3), strict=True):
        assert thrice.long.num_events == 3 * once.long.num_events
        assert thrice.name == once.name
