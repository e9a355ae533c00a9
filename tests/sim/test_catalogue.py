"""Every failure of the catalogue is there; where it can be simulated, its run is clean, and what should go wrong does."""

import pytest

from onward.sim.catalogue import SCENARIOS, CatalogueEntry
from onward.sim.catalogue_entry import find_mismatch
from onward.sim.fault_kinds import FAULT_KINDS
from onward.sim.simulation import run_scenario
from tests.failures.test_named_tests_exist import is_there

NUMBERS = [*range(1, 19), *range(20, 38), *range(40, 52)]
SEVERAL_MODELS = ["two-versions"]
UNDER_LOAD = ["wrong-clock", "suspect-under-load", "preemption-in-vain", "engine-deaths", "hung-worker"]
RUNNABLE = [name for name, entry in SCENARIOS.items() if entry.scenario is not None]


def test_every_failure_has_an_entry() -> None:
    assert list(SCENARIOS) == [*(f"F{number:02d}" for number in NUMBERS), *SEVERAL_MODELS, *UNDER_LOAD]


def test_nearly_all_can_be_simulated() -> None:
    assert set(SCENARIOS) - set(RUNNABLE) == {"F18", "F31", "F35"}


@pytest.mark.parametrize("entry", SCENARIOS.values(), ids=SCENARIOS)
def test_the_test_that_an_entry_names_is_there(entry: CatalogueEntry) -> None:
    path, _, name = entry.covered_by.partition("::")
    assert is_there(path, name)


@pytest.mark.parametrize("name", RUNNABLE)
def test_its_run_is_clean_and_what_should_go_wrong_does(name: str) -> None:
    entry = SCENARIOS[name]
    assert entry.scenario is not None
    assert entry.scenario.name == name
    assert {fault.kind for fault in entry.scenario.faults} <= FAULT_KINDS.keys()
    outcome = run_scenario(entry.scenario, keeps_lines=True, keeps_messages=True)
    assert outcome.violation is None
    assert find_mismatch(entry, outcome) is None
    assert sum(outcome.end_reasons.values()) == len(entry.scenario.requests)
