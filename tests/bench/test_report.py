import pytest

from onward.bench.load import RequestTiming
from onward.bench.openai_chunks import ChunkUsage, PromptDetails
from onward.bench.report import Percentiles, percentile, summarize


def record(started_s: float, text_s: list[float], ended_s: float, tokens: int) -> RequestTiming:
    return RequestTiming(started_s, text_s, ended_s, ChunkUsage(10, tokens, PromptDetails(4)))


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert [percentile(values, p) for p in (1, 50, 99, 100)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([7.0], 50) == percentile([7.0], 99) == 7.0
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.0


def test_rates_count_reported_tokens_over_the_whole_time() -> None:
    summary = summarize([record(100.0, [101.0, 102.0], 102.0, 30), record(100.5, [101.5, 103.5], 104.0, 50)])
    assert summary.duration_s == 4.0
    assert summary.output_tokens_per_s == pytest.approx(80 / 4)
    assert summary.requests_per_s == pytest.approx(2 / 4)
    assert (summary.prompt_tokens, summary.cached_tokens, summary.output_tokens) == (20, 8, 80)
    assert summary.tokens_per_event == 20.0


def test_latencies_are_taken_per_request() -> None:
    summary = summarize([record(0.0, [1.0, 1.5, 2.5], 3.0, 3), record(10.0, [12.0], 13.0, 1)])
    assert summary.ttft_s is not None and (summary.ttft_s.p50, summary.ttft_s.p99) == (1.0, 2.0)
    # No gap from one request's last event to another's first.
    assert summary.inter_token_s is not None and summary.inter_token_s.max == 1.0
    assert summary.inter_token_s.mean == pytest.approx(0.75)
    assert summary.request_s is not None and summary.request_s.mean == 3.0


def test_the_time_per_output_token_is_a_mean_of_each_request_by_the_servers_count() -> None:
    # Five tokens in three events: one second for each of the four after the first. A single token has no time per token.
    long, short = record(0.0, [1.0, 4.5, 5.0], 6.0, 5), record(0.0, [2.0], 3.0, 1)
    quick = record(0.0, [1.0, 1.5], 1.5, 2)
    assert summarize([long, short]).tpot_s == Percentiles(1.0, 1.0, 1.0, 1.0)
    both = summarize([long, short, quick])
    assert both.tpot_s is not None and (both.tpot_s.p50, both.tpot_s.p99) == (0.5, 1.0)
    in_one_event = record(0.0, [2.0], 3.0, 8)
    assert summarize([short, in_one_event]).tpot_s is None


def test_a_failed_request_counts_as_failed_and_for_nothing_else() -> None:
    failed = RequestTiming(0.0, [0.5], 8.0, None, "HTTP 500: oops")
    summary = summarize([record(0.0, [1.0, 2.0], 4.0, 40), failed])
    assert (summary.num_requests, summary.num_failed, summary.errors) == (2, 1, {"HTTP 500: oops": 1})
    assert summary.output_tokens_per_s == pytest.approx(40 / 8), "the time it took is not hidden"
    assert summary.ttft_s is not None and summary.ttft_s.max == 1.0


def test_nothing_measured_is_shown_as_nothing() -> None:
    summary = summarize([])
    assert (summary.output_tokens_per_s, summary.ttft_s, summary.tokens_per_event) == (0.0, None, None)
