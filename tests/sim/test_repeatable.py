"""The same seed is the same run: here, in another process, and whatever seed Python's own hashes have."""

import subprocess
import sys

import pytest

from onward.sim import simulation
from onward.sim.scenario import Shape
from onward.sim.scenario_generator import generate_scenario
from onward.sim.simulation import run_scenario

SEEDS: dict[Shape, range] = {"engine": range(8), "pd": range(5), "cluster": range(2)}
IN_ANOTHER_PROCESS = """
import hashlib, sys
from onward.sim import http, wire
from onward.sim.scenario_generator import generate_scenario
from onward.sim.simulation import run_scenario

def hashed(owner, name):
    original = getattr(owner, name)
    def call(self, data):
        contents.update(data)
        original(self, data)
    setattr(owner, name, call)

hashed(wire.SimWire, "_arrive")
hashed(http.SimHttpResponse, "feed")
for word in sys.argv[1:]:
    shape, seed = word.split("/")
    contents = hashlib.sha256()
    outcome = run_scenario(generate_scenario(int(seed), shape), keeps_lines=True, keeps_messages=True)
    print(word, outcome.digest, contents.hexdigest(), *outcome.trace, sep="\\n")
"""


@pytest.mark.parametrize("shape", SEEDS)
def test_a_seed_is_the_same_run_each_time(shape: Shape) -> None:
    for seed in SEEDS[shape]:
        first, second = (
            run_scenario(generate_scenario(seed, shape), keeps_lines=True, keeps_messages=True) for _ in range(2)
        )
        assert first.trace, "something happened"
        assert first == second


def test_a_run_does_not_depend_on_runs_before_it_in_the_process() -> None:
    simulation._shared_text_processor.cache_clear()  # as in a new process
    first, second = (run_scenario(generate_scenario(0, "cluster"), keeps_lines=True) for _ in range(2))
    assert first == second


def test_what_is_kept_of_a_trace_changes_nothing_in_the_run() -> None:
    outcomes = [run_scenario(generate_scenario(3, "pd"), keeps_lines=keeps) for keeps in (True, False)]
    assert outcomes[0].digest == outcomes[1].digest
    assert outcomes[0].num_tokens == outcomes[1].num_tokens


def test_other_seeds_are_other_runs() -> None:
    assert len({run_scenario(generate_scenario(seed, "engine")).digest for seed in range(8)}) == 8


def test_processes_with_different_hash_seeds_see_the_same_runs_down_to_each_message() -> None:
    words = [f"{shape}/{seed}" for shape, seeds in SEEDS.items() for seed in seeds]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", IN_ANOTHER_PROCESS, *words],
            env={"PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for hash_seed in ("1", "2001")
    ]
    first, second = (process.communicate()[0] for process in running)
    assert [process.returncode for process in running] == [0, 0]
    assert first.count("StepPlan") > 100
    assert first == second
