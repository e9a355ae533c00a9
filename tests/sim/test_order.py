"""Under a load that never ends, no request is overtaken by many: the simulator notices when one is."""

from collections.abc import Callable

import pytest

from onward.sim.scenario import Ask, Fault, Machine, Scenario
from onward.sim.world import run
from tests.sabotage_kinds import Patches
from tests.sim import sabotage_bugs as bugs


def load(count: int, every_s: float, first_s: float) -> list[Ask]:
    return [Ask(f"q{i}", round(first_s + i * every_s, 3), prompt="the sea", max_tokens=8, seed=i) for i in range(count)]


MACHINE = Machine("m0", max_num_seqs=2, step_s=0.06, num_blocks=200)
QUEUE = Scenario(1, "engine", [MACHINE], load(30, 0.1, 2.0), [])
WRONG_CLOCK = Scenario(
    2,
    "cluster",
    [MACHINE],
    load(40, 0.1, 3.0),
    [Fault("clock", target="r1", at_s=0.5, duration_s=60.0, rate=0.0)],
    num_routers=2,
)


@pytest.mark.parametrize("scenario", [QUEUE, WRONG_CLOCK], ids=["queue", "clock"])
def test_requests_are_served_in_order_under_load(scenario: Scenario) -> None:
    outcome = run(scenario)
    assert outcome.violation is None, outcome.violation
    assert outcome.ends == {"complete": len(scenario.asks)}


@pytest.mark.parametrize(
    ("scenario", "bug"),
    [(QUEUE, bugs.the_last_is_first), (WRONG_CLOCK, bugs.a_router_s_wall_clock_counts)],
    ids=["last-come-first-served", "wall-clock-of-a-router"],
)
def test_requests_that_are_served_out_of_order_are_noticed(scenario: Scenario, bug: Callable[[Patches], None]) -> None:
    patches = Patches()
    try:
        bug(patches)
        violation = run(scenario).violation
    finally:
        patches.undo()
    assert violation is not None and violation.invariant == 9, violation
