"""Seeds lead to a large suspect that waits under load, and show it if later requests pass it by."""

from onward.sim.scenario import Scenario
from onward.sim.scenario_generator import generate_scenario
from onward.sim.simulation import run_scenario
from tests.sabotage.table import TABLE

NUM_SEEDS = 400


def with_a_suspect() -> list[Scenario]:
    scenarios = [generate_scenario(seed, "engine") for seed in range(NUM_SEEDS)]
    return [one for one in scenarios if any(ask.name == "large" for ask in one.requests)]


def test_seeds_with_a_suspect_under_load_violate_nothing() -> None:
    scenarios = with_a_suspect()
    assert len(scenarios) >= NUM_SEEDS / 100
    for scenario in scenarios:
        outcome = run_scenario(scenario)
        assert outcome.violation is None, outcome.violation
        assert outcome.triggered == {"kill-worker": 2}
        assert outcome.end_reasons == {"complete": len(scenario.requests)}


def test_seeds_show_later_requests_that_pass_a_suspect_by() -> None:
    bug = next(sabotage for sabotage in TABLE if sabotage.name == "suspects-passed-by")
    with bug.broken():
        violations = [run_scenario(scenario).violation for scenario in with_a_suspect()]
    assert 9 in [violation.invariant for violation in violations if violation is not None]
