"""A violation that needs little is found with little around it."""

from collections.abc import Iterator

import pytest

from onward.sim.scenario import Outcome, Scenario
from onward.sim.shrink import Shrunk, shrink
from onward.sim.world import run
from tests.sim.broken import break_restarts, crowded


@pytest.fixture(scope="module")
def bug() -> Iterator[None]:
    assert run(crowded()).violation is None, "without the bug all is well"
    with pytest.MonkeyPatch.context() as patch:
        break_restarts(patch)
        yield


@pytest.fixture(scope="module")
def found(bug: None) -> Outcome:
    outcome = run(crowded())
    assert outcome.violation is not None
    assert (len(crowded().faults), len(crowded().asks)) == (8, 10)
    return outcome


@pytest.fixture(scope="module")
def shrunk(found: Outcome) -> Shrunk:
    return shrink(found, max_s=200.0)


def test_one_fault_and_one_request_are_left_of_a_crowd(shrunk: Shrunk) -> None:
    assert [fault.kind for fault in shrunk.scenario.faults] == ["kill-worker"]
    assert [ask.name for ask in shrunk.scenario.asks] == ["q6"]
    assert not shrunk.was_cut_short


def test_what_is_left_is_plain(shrunk: Shrunk) -> None:
    (ask,), (machine,) = shrunk.scenario.asks, shrunk.scenario.machines
    assert (ask.n, ask.stop, ask.wants_usage, ask.temperature) == (1, [], False, 0.0)
    assert ask.max_tokens < 30
    assert len(ask.prompt) < len("the sea 6 café")
    assert (machine.num_apis, machine.clock_rate) == (1, 1.0)


def test_what_is_left_violates_the_same_invariant_each_time(found: Outcome, shrunk: Shrunk) -> None:
    again = run(shrunk.scenario)
    assert again.violation is not None and found.violation is not None
    assert again.violation == shrunk.outcome.violation
    assert again.violation.invariant == found.violation.invariant


def test_the_number_of_runs_is_bounded_and_told(found: Outcome) -> None:
    told: list[tuple[int, Scenario]] = []
    shrunk = shrink(found, max_runs=5, on_run=lambda num_runs, smallest: told.append((num_runs, smallest)))
    assert shrunk.was_cut_short
    assert [num_runs for num_runs, _ in told] == [1, 2, 3, 4, 5]


def test_the_time_is_bounded(found: Outcome) -> None:
    seconds = iter(range(1000))
    shrunk = shrink(found, max_s=10.0, clock=lambda: float(next(seconds)))
    assert shrunk.was_cut_short
    assert 0 < shrunk.num_runs < 10
