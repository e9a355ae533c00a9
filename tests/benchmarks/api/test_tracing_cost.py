import pytest

from benchmarks.api.tracing_cost import OFF, SideSample, rows_of, table_of


def test_ratios_are_those_of_one_round() -> None:
    """A machine that is slow during one round is slow for all sides."""
    rounds = [
        {OFF: SideSample(10.0, 1.0), "1 %": SideSample(10.1, 1.0)},
        {OFF: SideSample(20.0, 2.0), "1 %": SideSample(20.0, 2.1)},
        {OFF: SideSample(12.0, 1.0), "1 %": SideSample(12.0, 1.0)},
    ]
    off, sampled = rows_of(rounds)
    assert (off.token_ratios, off.us_per_token) == ([1.0, 1.0, 1.0], 12.0)
    assert sampled.token_ratios == pytest.approx([1.01, 1.0, 1.0])
    assert sampled.request_ratios == pytest.approx([1.0, 1.05, 1.0])
    assert table_of([off, sampled]).row_count == 2
