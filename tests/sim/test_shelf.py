"""What the shelf is for, over many seeds: a client that comes back is known, whichever api process it reaches."""

import msgspec

from onward.sim.generate import Choice, scenario_of
from onward.sim.scenario import Fault, Outcome, Scenario
from onward.sim.world import run

ONLY_CLIENTS = Choice(kinds=frozenset({"disconnect"}))


def with_two_apis(seed: int, *faults: Fault) -> Scenario:
    scenario = scenario_of(seed, "engine", ONLY_CLIENTS)
    machines = [msgspec.structs.replace(machine, num_apis=2) for machine in scenario.machines]
    return msgspec.structs.replace(scenario, machines=machines, faults=list(faults))


def unknown(outcome: Outcome) -> list[str]:
    return [line for line in outcome.trace if "stream_unknown" in line]


def asked_again(outcome: Outcome) -> list[str]:
    """For responses, while nobody could say whether they are kept."""
    return [line for line in outcome.trace if "503 unavailable" in line]


def test_nobody_who_comes_back_is_unknown_in_either_process() -> None:
    num_back = 0
    for seed in range(25):
        outcome = run(with_two_apis(seed), keeps_lines=True)
        assert outcome.violation is None and not unknown(outcome)
        num_back += outcome.fired.get("disconnect", 0)
    assert num_back > 25


def test_a_shelf_that_dies_or_hangs_costs_a_second_question_and_no_token() -> None:
    num_unknown = num_killed = 0
    for seed in range(25):
        faults = [Fault("kill-shelf", "m0", at_s=2.0 + 0.4 * number) for number in range(3)]
        outcome = run(with_two_apis(seed, *faults, Fault("stop-shelf", "m0", 4.0, None, 2.0)), keeps_lines=True)
        assert outcome.violation is None and outcome.num_errors == len(asked_again(outcome))
        assert not [line for line in outcome.trace if "the events end" in line], "who follows a response waits with it"
        num_unknown += len(unknown(outcome))
        num_killed += outcome.fired["kill-shelf"]
    assert num_killed > 60, "short runs may be over before the third"
    assert num_unknown > 0, "what it kept was lost"
