"""The end of a run whose engine has planned what no worker can execute: a violation, and no fault of the simulator."""

from tests.sabotage.sim.search import search
from tests.sabotage.sim.table import TABLE


def test_workers_with_a_broken_plan_are_torn_down() -> None:
    [row] = [row for row in TABLE if row.name == "no-slot-needed"]
    assert search(row) is not None
