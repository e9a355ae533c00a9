"""A violation that needs little is found with little around it."""

from collections.abc import Iterator

import pytest

from onward.sim.scenario import RunResult, Scenario
from onward.sim.shrink import ShrinkResult, shrink
from onward.sim.simulation import run_scenario
from tests.sim.broken import break_restarts, crowded


@pytest.fixture(scope="module")
def bug() -> Iterator[None]:
    assert run_scenario(crowded()).violation is None, "without the bug all is well"
    with pytest.MonkeyPatch.context() as patch:
        break_restarts(patch)
        yield


@pytest.fixture(scope="module")
def found(bug: None) -> RunResult:
    outcome = run_scenario(crowded())
    assert outcome.violation is not None
    assert (len(crowded().faults), len(crowded().requests)) == (8, 10)
    return outcome


@pytest.fixture(scope="module")
def shrunk(found: RunResult) -> ShrinkResult:
    return shrink(found, max_s=200.0)


def test_one_fault_and_one_request_are_left_of_a_crowd(shrunk: ShrinkResult) -> None:
    assert [fault.kind for fault in shrunk.scenario.faults] == ["kill-worker"]
    assert [ask.name for ask in shrunk.scenario.requests] == ["q6"]
    assert not shrunk.was_cut_short


def test_what_is_left_is_plain(shrunk: ShrinkResult) -> None:
    (ask,), (machine,) = shrunk.scenario.requests, shrunk.scenario.instances
    assert (ask.n, ask.stop, ask.wants_usage, ask.temperature) == (1, [], False, 0.0)
    assert ask.max_tokens < 30
    assert len(ask.prompt) < len("the sea 6 café")
    assert (machine.num_api_processes, machine.clock_rate) == (1, 1.0)


def test_what_is_left_violates_the_same_invariant_each_time(found: RunResult, shrunk: ShrinkResult) -> None:
    again = run_scenario(shrunk.scenario)
    assert again.violation is not None and found.violation is not None
    assert again.violation == shrunk.outcome.violation
    assert again.violation.invariant == found.violation.invariant


def test_the_number_of_runs_is_bounded_and_told(found: RunResult) -> None:
    told: list[tuple[int, Scenario]] = []
    shrunk = shrink(found, max_runs=5, on_run=lambda num_runs, smallest: told.append((num_runs, smallest)))
    assert shrunk.was_cut_short
    assert [num_runs for num_runs, _ in told] == [1, 2, 3, 4, 5]


def test_the_time_is_bounded(found: RunResult) -> None:
    seconds = iter(range(1000))
    shrunk = shrink(found, max_s=10.0, clock=lambda: float(next(seconds)))
    assert shrunk.was_cut_short
    assert 0 < shrunk.num_runs < 10
