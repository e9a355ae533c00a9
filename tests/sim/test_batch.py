"""Ranges of runs: what they add up to, how they are divided, and where they stop."""

import gc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.engine.core import EngineCore
from onward.sim import batch
from onward.sim.batch import (
    RunTotals,
    SeedRange,
    plan_ranges,
    planned_faults,
    run_range,
    run_ranges,
    seeds_by_shape,
    sum_totals,
    triggered_faults,
    untriggered_kinds,
    violation_signature,
)
from onward.sim.scenario import SHAPES, FaultSpec, RunResult, Scenario, Shape, SimInstanceSpec, SimRequest, Violation
from onward.sim.scenario_generator import FaultSelection, generate_scenario
from onward.sim.simulation import run_scenario
from onward.sim.vocabulary import DOOM, POISON
from tests.sim.broken import break_restarts


def without_times(tally: RunTotals) -> dict[str, object]:
    """The last digits of sums of fractions depend on the order."""
    return msgspec.to_builtins(tally) | {"cpu_s": 0.0, "virtual_s": round(tally.virtual_s, 3)}


def outcome_of(scenario: Scenario, **changes: object) -> RunResult:
    whole = {"violation": None, "trace": [], "digest": "", "virtual_s": 1.0, "num_requests": 1, "num_tokens": 2}
    return RunResult(scenario=scenario, triggered={}, end_reasons={}, num_errors=0, **whole | changes)  # type: ignore[arg-type]


def eventful() -> Scenario:
    asks = [
        SimRequest("q0", 2.0, abort_at_s=1.0),
        SimRequest("q1", 2.0, leave_at_s=1.0),
        SimRequest("q2", 2.0, disconnect_at_s=[1.0, 2.0]),
        SimRequest("q3", 2.0, deadline_ms=5),
        SimRequest("q4", 2.0, prompt=f"a{POISON}"),
        SimRequest("q5", 2.0, prompt=f"a{DOOM}"),
        SimRequest("q6", 2.0, path="/v1/responses", background=True, detach_s=1.0),
        SimRequest("q7", 2.0, path="/v1/responses", background=True, cancel_at_s=1.0),
        SimRequest("q8", 2.0),
    ]
    return Scenario(
        1, "engine", [SimInstanceSpec("m0")], asks, [FaultSpec("lose"), FaultSpec("lose"), FaultSpec("kill-api", "m0")]
    )


def test_faults_of_clients_are_counted_with_the_others() -> None:
    once = dict.fromkeys(("abort", "leave", "deadline", "poison", "doom", "detach", "cancel", "kill-api"), 1)
    assert planned_faults(eventful()) == once | {"lose": 2, "disconnect": 2}


def test_what_shows_in_the_ends_only_has_fired_too() -> None:
    outcome = outcome_of(eventful())
    outcome = msgspec.structs.replace(
        outcome, triggered={"lose": 9}, end_reasons={"deadline_exceeded": 1, "invalid_logits": 2}
    )
    assert triggered_faults(outcome) == {"lose": 9, "deadline": 1, "doom": 2}
    assert sorted(untriggered_kinds(outcome)) == [
        "abort",
        "cancel",
        "detach",
        "disconnect",
        "kill-api",
        "leave",
        "poison",
    ]


def test_a_fault_counts_once_however_many_messages_it_hits() -> None:
    tally = RunTotals()
    batch.add_run(tally, msgspec.structs.replace(outcome_of(eventful()), triggered={"lose": 90, "kill-api": 1}))
    assert (tally.faults, tally.hits, tally.kinds) == ({3: 1}, {91: 1}, {2: 1})


def test_violations_that_differ_in_names_and_numbers_only_have_one_signature() -> None:
    first = Violation(3, "q5: the cursor says 6, and 9 tokens have come", 1.0)
    second = Violation(3, "q12.2: the cursor says 16, and 0 tokens have come", 7.5)
    assert violation_signature(first) == violation_signature(second)
    assert violation_signature(first) != violation_signature(Violation(2, first.description, 1.0))
    assert violation_signature(first) != violation_signature(Violation(3, "choice 0 ends twice", 1.0))


def test_all_shapes_together_are_as_many_as_asked_for_and_each_has_its_share() -> None:
    seeds = seeds_by_shape(SHAPES, 7, 200_000)
    assert {shape: len(whole) for shape, whole in seeds.items()} == {"engine": 170_000, "pd": 20_000, "cluster": 10_000}
    assert {whole.start for whole in seeds.values()} == {7}
    assert seeds_by_shape(["pd"], 0, 5) == {"pd": range(5)}
    assert all(seeds_by_shape(SHAPES, 0, 1).values()), "none is left out of a small batch"


@given(
    start=st.integers(0, 50),
    num_runs=st.integers(1, 400),
    num_processes=st.integers(1, 4),
    edges=st.lists(st.tuples(st.integers(0, 500), st.integers(1, 60)), max_size=5),
)
def test_what_is_left_is_planned_once_and_what_is_done_is_not(
    start: int, num_runs: int, num_processes: int, edges: list[tuple[int, int]]
) -> None:
    done: dict[Shape, list[range]] = {"pd": [range(at, at + size) for at, size in edges]}
    jobs = plan_ranges({"pd": range(start, start + num_runs)}, done, num_processes, FaultSelection(), False)
    seeds = [seed for job in jobs for seed in range(job.start, job.stop)]
    covered = {seed for one in done["pd"] for seed in one}
    assert sorted(seeds) == [seed for seed in range(start, start + num_runs) if seed not in covered]


def test_shapes_advance_together() -> None:
    jobs = plan_ranges(seeds_by_shape(SHAPES, 0, 4000), {}, 2, FaultSelection(), False)
    half = jobs[: len(jobs) // 2]
    for shape in SHAPES:
        share = sum(job.shape == shape for job in half) / sum(job.shape == shape for job in jobs)
        assert 0.4 < share < 0.6


def test_sums_do_not_depend_on_how_runs_are_divided() -> None:
    whole = run_range(SeedRange("engine", 0, 12)).totals
    divided = sum_totals([run_range(SeedRange("engine", 5, 12)).totals, run_range(SeedRange("engine", 0, 5)).totals])
    assert without_times(whole) == without_times(divided)
    assert whole.num_runs == 12


def test_several_processes_find_what_one_finds() -> None:
    jobs = plan_ranges({"engine": range(12)}, {}, 2, FaultSelection(), False)
    assert len(jobs) > 2
    tallies = [sum_totals([part.totals for part in run_ranges(jobs, num_processes)]) for num_processes in (1, 2)]
    assert without_times(tallies[0]) == without_times(tallies[1])


def test_nothing_new_is_begun_when_it_should_stop() -> None:
    jobs = [SeedRange("engine", seed, seed + 1) for seed in range(12)]
    taken: list[int] = []
    for part in run_ranges(jobs, 2, lambda: len(taken) >= 1):
        taken.append(part.start)
    assert 1 <= len(taken) < 12


def test_a_range_ends_before_the_run_that_violates_something(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = FaultSelection(frozenset({"kill-worker"}))
    break_restarts(monkeypatch, priority=0)
    part = run_range(SeedRange("engine", 0, 40, choice))
    assert part.stopping_run is not None and part.stopping_run.violation is not None
    assert part.stop == part.stopping_run.seed == part.start + part.totals.num_runs
    assert run_scenario(generate_scenario(part.stop, "engine", choice)).violation == part.stopping_run.violation
    assert not part.totals.violations


def test_violations_are_grouped_by_what_is_violated_when_it_keeps_going(monkeypatch: pytest.MonkeyPatch) -> None:
    break_restarts(monkeypatch, priority=0)
    part = run_range(SeedRange("engine", 0, 20, FaultSelection(frozenset({"kill-worker"})), keeps_going=True))
    assert part.stopping_run is None
    assert part.totals.num_runs == 20
    assert part.totals.violations
    group = max(part.totals.violations.values(), key=lambda one: one.count)
    assert group.count == len(group.seeds) > 1
    assert group.invariant in (0, 2, 3)


def test_a_failure_of_the_simulator_itself_is_told_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(scenario: Scenario) -> RunResult:
        raise RuntimeError(f"seed {scenario.seed} is unlucky")

    monkeypatch.setattr(batch, "run_scenario", fail)
    part = run_range(SeedRange("engine", 3, 9))
    assert part.stopping_run is not None and part.stopping_run.violation is None
    assert "Traceback" in part.stopping_run.failure and "seed 3 is unlucky" in part.stopping_run.failure
    kept = run_range(SeedRange("engine", 3, 5, keeps_going=True)).totals.failures
    assert list(kept) == ["RuntimeError: seed 3 is unlucky", "RuntimeError: seed 4 is unlucky"]


def test_a_run_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def turn_in_circles(scenario: Scenario) -> RunResult:
        while True:
            pass

    monkeypatch.setattr(batch, "run_scenario", turn_in_circles)
    monkeypatch.setattr(batch, "MAX_RUN_S", 0.05)
    part = run_range(SeedRange("engine", 0, 5))
    assert part.stopping_run is not None
    assert "has not ended" in part.stopping_run.failure


def test_kinds_that_were_asked_for_alone_and_did_not_strike_are_told_for_each_run() -> None:
    tally = run_range(SeedRange("engine", 0, 30, FaultSelection(frozenset({"deadline"})))).totals
    assert set(tally.planned) == {"deadline"}
    assert tally.triggered["deadline"] > 0
    quiet = tally.untriggered.get("deadline")
    assert quiet is not None, "some deadlines are long enough"
    assert quiet.seeds[0] in range(30)
    assert not run_range(SeedRange("engine", 0, 5)).totals.untriggered, "with all kinds there is luck enough"


@pytest.mark.parametrize("shape", SHAPES)
def test_the_objects_of_a_range_are_freed_behind_it(shape: Shape) -> None:
    run_range(SeedRange(shape, 1, 2))  # imports, and whatever is made once
    gc.collect()
    num_frozen, num_before = (
        gc.get_freeze_count(),
        sum(type(candidate) is EngineCore for candidate in gc.get_objects()),
    )

    run_range(SeedRange(shape, 2, 5))

    assert gc.get_freeze_count() <= num_frozen, "the garbage collector never frees a frozen object"
    assert sum(type(candidate) is EngineCore for candidate in gc.get_objects()) <= num_before
