"""The bench of the worker's step."""

import pytest

from benchmarks.cpu.step_cost import StepBench
from onward.config import DEFAULT_MODEL


def test_a_step_is_timed_and_its_time_is_divided_among_kinds_of_work() -> None:
    bench = StepBench(DEFAULT_MODEL, threads=None, max_streams=2, context=20)
    for cost in bench.decode(2, 20):
        assert cost.step_ms > 0
        assert sum(cost.share(kind) for kind in cost.cycles) == pytest.approx(1.0)
        assert cost.share("gate/up") > 0


def test_a_step_with_wrong_guesses_computes_them_and_gives_one_token_each() -> None:
    bench = StepBench(DEFAULT_MODEL, threads=None, max_streams=2, context=20)
    assert all(cost.step_ms > 0 for cost in bench.decode(2, 20, num_drafts=3))
