"""Callers with keys under faults: each gets its own streams to the end, and none can read another's."""

import msgspec
import pytest

from onward.sim import embedding_check
from onward.sim.scenario import RunResult, Scenario, Shape
from onward.sim.scenario_generator import generate_scenario
from onward.sim.simulation import run_scenario
from tests.sabotage import access_and_limits, responses

NUM_SEEDS: dict[Shape, int] = {"engine": 16, "cluster": 6}


def with_tenants(scenario: Scenario, max_in_flight: int | None = None) -> Scenario:
    names = ("ann", "bob")
    asks = [
        msgspec.structs.replace(
            ask, caller=names[number % 2], is_streaming=ask.path != embedding_check.PATH, seed=number
        )
        for number, ask in enumerate(scenario.requests)
    ]
    machines = [msgspec.structs.replace(machine, num_api_processes=2) for machine in scenario.instances]
    # If no client may see an error, no caller has a limit.
    limit = None if scenario.expects_no_errors else max_in_flight
    return msgspec.structs.replace(
        scenario, requests=asks, instances=machines, callers=list(names), max_in_flight=limit
    )


def runs(shape: Shape) -> list[RunResult]:
    return [run_scenario(with_tenants(generate_scenario(seed, shape), 4)) for seed in range(NUM_SEEDS[shape])]


@pytest.mark.parametrize("shape", NUM_SEEDS)
def test_whatever_fails_nobody_gets_at_the_stream_of_another(shape: Shape) -> None:
    outcomes = runs(shape)
    assert [one.violation for one in outcomes if one.violation] == []
    assert sum(one.triggered.get("pry", 0) for one in outcomes) > 10 * len(outcomes)


@pytest.mark.parametrize("name", ["ids-of-anybody", "tracker-aborts-all", "engine-aborts-all", "responses-of-anybody"])
def test_a_stranger_that_gets_through_is_noticed(name: str) -> None:
    [sabotage] = [one for one in (*access_and_limits.TABLE, *responses.TABLE) if one.name == name]
    shape: Shape = "engine"
    with sabotage.broken():
        seeds = (with_tenants(generate_scenario(seed, shape)) for seed in range(NUM_SEEDS[shape]))
        assert any(run_scenario(seed).violation is not None for seed in seeds)
