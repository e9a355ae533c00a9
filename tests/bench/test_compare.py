import pytest

from onward.bench.compare import SummaryPair, compare
from onward.bench.report import Percentiles, Summary


def summary(tokens_per_s: float, ttft_s: float | None = 0.1) -> Summary:
    times = None if ttft_s is None else Percentiles(ttft_s, 2 * ttft_s, ttft_s, 3 * ttft_s)
    return Summary(8, 0, {}, 1.0, 80, 0, 64, tokens_per_s, 2.0, 1.0, times, times, times, times)


def test_the_median_of_the_ratios_is_not_the_ratio_of_the_medians() -> None:
    """A machine that is slow during one pair is slow for both."""
    pairs = [SummaryPair(summary(a), summary(b)) for a, b in [(100, 50), (10, 5), (40, 40), (90, 30), (80, 20)]]
    rows = {row.figure: row for row in compare(pairs)}
    row = rows["output tokens/s"]
    assert (row.first, row.second) == (80, 30)
    assert (row.ratio, row.lowest, row.highest) == (2.0, 1.0, 4.0)
    assert rows["time to first token, p99 (ms)"].first == pytest.approx(200.0)


def test_a_figure_that_a_run_does_not_have_is_left_out() -> None:
    pairs = [SummaryPair(summary(100), summary(50)), SummaryPair(summary(100), summary(50, None))]
    assert "output tokens/s" in {row.figure for row in compare(pairs)}
    assert not any("first token" in row.figure for row in compare(pairs))
    assert not any(row.figure == "output tokens/s" for row in compare([SummaryPair(summary(0), summary(50))]))
