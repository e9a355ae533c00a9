"""What the simulator has found once stays found: each scenario is clean now, and violates when its fault is put back."""

from pathlib import Path

import msgspec
import pytest

from onward.sim.scenario import Scenario
from onward.sim.simulation import run_scenario
from tests.sabotage.patches import Patches
from tests.sim import found

FILES = sorted((Path(__file__).parent / "regressions").glob("*.json"))


def scenario_in(file: Path) -> Scenario:
    return msgspec.json.decode(file.read_bytes(), type=Scenario)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_was_found_does_not_happen_again(file: Path) -> None:
    assert run_scenario(scenario_in(file)).violation is None


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_was_found_would_be_found_again(file: Path) -> None:
    patches = Patches()
    try:
        getattr(found, file.stem)(patches)
        assert run_scenario(scenario_in(file)).violation is not None
    finally:
        patches.undo()


def test_there_is_a_scenario_for_each_fault() -> None:
    faults = {name for name, value in vars(found).items() if getattr(value, "__module__", "") == found.__name__}
    assert faults == {file.stem for file in FILES}
