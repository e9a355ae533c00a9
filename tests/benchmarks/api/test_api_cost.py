import pytest

from benchmarks.api.api_cost import ApiCostSample, StreamCost, ThreadTimes, streamed_rows, whole_rows


def task(thread_id: int, name: str, user_ticks: int, system_ticks: int) -> str:
    """A line as the kernel writes it: a name may hold anything."""
    return f"{thread_id} ({name}) S 1 1 1 0 -1 4194304 9 0 0 0 {user_ticks} {system_ticks} 0 0 20 0 3 0 1 2"


def sample(num_requests: int, tokens_each: int, loop_s: float, zmq_s: float = 0.0) -> ApiCostSample:
    num_tokens = num_requests * tokens_each
    return ApiCostSample(num_requests, num_tokens, num_tokens, ThreadTimes(loop_s, 0.0, zmq_s))


def test_threads_are_told_apart_by_what_they_are_for() -> None:
    tasks = [
        task(70, "python", 300, 100),
        task(71, "text_0 (a)", 20, 0),
        task(72, "ZMQbg/IO/0", 5, 5),
        task(73, "text_1", 1, 2),
    ]
    times = ThreadTimes.of_tasks(70, tasks, 100)
    assert (times.loop_s, times.text_s, times.zmq_s) == pytest.approx((4.0, 0.23, 0.1))
    assert times.all_s == pytest.approx(4.33)
    assert times.since(ThreadTimes(1.0, 0.2, 0.1)) == ThreadTimes(3.0, pytest.approx(0.03), 0.0)


def test_two_lengths_tell_the_cost_of_a_stream_from_that_of_its_tokens() -> None:
    request_s, token_s, zmq_s = 0.002, 0.00002, 0.000001
    short = sample(512, 16, 512 * (request_s + 16 * token_s), 512 * 16 * zmq_s)
    long = sample(256, 512, 256 * (request_s + 512 * token_s), 256 * 512 * zmq_s)
    measured = StreamCost(20.0, short, long)
    assert measured.us_per_token == pytest.approx(21)
    assert measured.zmq_us_per_token == pytest.approx(1)
    assert measured.ms_per_request == pytest.approx(2)


def test_a_row_is_the_median_of_the_rounds_and_over_its_bar_if_that_is() -> None:
    short = sample(100, 16, 0.1)
    rounds = [StreamCost(20.0, short, sample(100, 116, 0.1 + 100 * 100 * us / 1e6)) for us in (24.0, 90.0, 20.0)]
    first = streamed_rows("load", rounds)[0]
    assert (first.value, first.lowest, first.highest) == pytest.approx((24.0, 20.0, 90.0))
    assert not first.is_over
    assert streamed_rows("load", rounds[1:2])[0].is_over


def test_a_short_request_counts_all_threads() -> None:
    rows = whole_rows("load", [ApiCostSample(100, 1600, 0, ThreadTimes(0.2, 0.3, 0.1))])
    assert [row.value for row in rows] == pytest.approx([6.0, 3.0, 1.0])
    assert rows[0].is_over and not rows[1].is_over
