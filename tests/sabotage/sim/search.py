"""A deliberate bug, and the search for a seed by which the simulator notices it: the proof that it can fail.

The bugs are in `table`; `make sim-sabotage` searches for all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import msgspec

from onward.sim.catalogue import SCENARIOS
from onward.sim.catalogue_entry import find_mismatch
from onward.sim.scenario import RunResult, Scenario, Shape
from onward.sim.scenario_generator import FaultSelection, generate_scenario
from onward.sim.simulation import run_scenario
from tests.sabotage.patches import Patches, Sabotage


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    breaks: str
    apply: Callable[[Patches], None]
    shape: Shape
    max_seeds: int
    only: frozenset[str] | None = None
    """Kinds of faults that the runs are narrowed to."""
    scenario: str = ""
    """A scenario of the catalogue, if the situation is too rare in random runs."""

    def scenario_of(self, seed: int) -> Scenario:
        if self.scenario:
            written = SCENARIOS[self.scenario].scenario
            assert written is not None, "a scenario that can be run"
            return msgspec.structs.replace(written, seed=seed)
        return generate_scenario(seed, self.shape, FaultSelection(kinds=self.only))

    def problem(self, outcome: RunResult) -> str | None:
        """What a run shows to be wrong."""
        if outcome.violation is not None:
            return f"{outcome.violation.invariant}: {outcome.violation.description}"
        missed = find_mismatch(SCENARIOS[self.scenario], outcome) if self.scenario else None
        return None if missed is None else f"scenario: {missed}"


@dataclass(frozen=True, slots=True)
class Found:
    seed: int
    problem: str
    seconds: float


def search(row: Row) -> Found | None:
    """The first seed whose run goes wrong with the bug and goes well without it."""
    began_s = perf_counter()
    sabotage = Sabotage(row.name, row.breaks, row.apply, [])
    for seed in range(row.max_seeds):
        scenario = row.scenario_of(seed)
        with sabotage.broken():
            problem = row.problem(_run(row, scenario))
        if problem is not None and row.problem(_run(row, scenario)) is None:
            return Found(seed, problem, perf_counter() - began_s)
    return None


def _run(row: Row, scenario: Scenario) -> RunResult:
    has_to_be_read = bool(row.scenario)
    return run_scenario(scenario, keeps_lines=has_to_be_read, keeps_messages=has_to_be_read)
