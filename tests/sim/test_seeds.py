"""Seeds of all shapes, each one a run under faults: nothing may go wrong. `make sim` runs a hundred times as many."""

import os

import pytest

from onward.sim.batch import added, parts, plan, wanted
from onward.sim.generate import Choice
from onward.sim.report import group_lines, never_fired, percentile
from onward.sim.scenario import SHAPES

NUM_RUNS = 2000


@pytest.mark.timeout(900)  # all cores for about a minute, and longer where others use them too
def test_two_thousand_seeds_violate_nothing_and_are_full_of_faults() -> None:
    num_processes = len(os.sched_getaffinity(0))
    seeds = wanted(SHAPES, 0, NUM_RUNS)
    done = list(parts(plan(seeds, {}, num_processes, Choice(), True), num_processes))
    tallies = {shape: added([part.tally for part in done if part.shape == shape]) for shape in SHAPES}
    total = added(list(tallies.values()))
    trouble = [line for shape, one in tallies.items() for line in group_lines(shape, one.violations | one.failures)]
    assert not trouble, "\n".join(trouble)
    assert total.num_runs == sum(map(len, seeds.values())) >= NUM_RUNS
    assert not never_fired(total)
    cluster = tallies["cluster"]
    median = [
        percentile(histogram, 50) for histogram in (cluster.requests, cluster.tokens, cluster.faults, cluster.kinds)
    ]
    assert all(value >= least for value, least in zip(median, (12, 300, 4, 2), strict=True)), median
