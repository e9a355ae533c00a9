"""Seeds of all shapes, each one a run under faults: nothing may go wrong. `make sim` runs two hundred times as many."""

import os

import pytest

from onward.sim.batch import plan_ranges, run_ranges, seeds_by_shape, sum_totals
from onward.sim.report import group_lines, never_triggered, percentile
from onward.sim.scenario import SHAPES
from onward.sim.scenario_generator import FaultSelection

NUM_RUNS = 1000


@pytest.mark.timeout(900)  # all cores for half a minute, and longer where others use them too
def test_a_thousand_seeds_violate_nothing_and_are_full_of_faults() -> None:
    num_processes = len(os.sched_getaffinity(0))
    seeds = seeds_by_shape(SHAPES, 0, NUM_RUNS)
    done = list(run_ranges(plan_ranges(seeds, {}, num_processes, FaultSelection(), True), num_processes))
    tallies = {shape: sum_totals([part.totals for part in done if part.shape == shape]) for shape in SHAPES}
    total = sum_totals(list(tallies.values()))
    trouble = [line for shape, one in tallies.items() for line in group_lines(shape, one.violations | one.failures)]
    assert not trouble, "\n".join(trouble)
    assert total.num_runs == sum(map(len, seeds.values())) >= NUM_RUNS
    assert not never_triggered(total)
    cluster = tallies["cluster"]
    median = [
        percentile(histogram, 50) for histogram in (cluster.requests, cluster.tokens, cluster.faults, cluster.kinds)
    ]
    assert all(value >= least for value, least in zip(median, (12, 300, 4, 2), strict=True)), median
