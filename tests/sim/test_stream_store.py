"""What the stream store is for, over many seeds: a client that comes back is known, whichever api process it reaches."""

import msgspec

from onward.sim.scenario import FaultSpec, RunResult, Scenario
from onward.sim.scenario_generator import FaultSelection, generate_scenario
from onward.sim.simulation import run_scenario

ONLY_CLIENTS = FaultSelection(kinds=frozenset({"disconnect"}))


def with_two_apis(seed: int, *faults: FaultSpec) -> Scenario:
    scenario = generate_scenario(seed, "engine", ONLY_CLIENTS)
    machines = [msgspec.structs.replace(machine, num_api_processes=2) for machine in scenario.instances]
    return msgspec.structs.replace(scenario, instances=machines, faults=list(faults))


def unknown(outcome: RunResult) -> list[str]:
    return [line for line in outcome.trace if "stream_unknown" in line]


def asked_again(outcome: RunResult) -> list[str]:
    """Returns the queries for responses during which the store could not be reached."""
    return [line for line in outcome.trace if "503 unavailable" in line]


def test_nobody_who_comes_back_is_unknown_in_either_process() -> None:
    num_back = 0
    for seed in range(25):
        outcome = run_scenario(with_two_apis(seed), keeps_lines=True)
        assert outcome.violation is None and not unknown(outcome)
        num_back += outcome.triggered.get("disconnect", 0)
    assert num_back > 25


def test_a_stream_store_that_dies_or_hangs_costs_a_second_question_and_no_token() -> None:
    num_unknown = num_killed = 0
    for seed in range(25):
        faults = [FaultSpec("kill-shelf", "m0", at_s=2.0 + 0.4 * number) for number in range(3)]
        outcome = run_scenario(
            with_two_apis(seed, *faults, FaultSpec("stop-shelf", "m0", 4.0, None, 2.0)), keeps_lines=True
        )
        assert outcome.violation is None and outcome.num_errors == len(asked_again(outcome))
        assert not [line for line in outcome.trace if "the events end" in line], "who follows a response waits with it"
        num_unknown += len(unknown(outcome))
        num_killed += outcome.triggered["kill-shelf"]
    assert num_killed > 60, "short runs may be over before the third"
    assert num_unknown > 0, "what it kept was lost"
