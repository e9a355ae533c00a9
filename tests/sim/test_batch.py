"""Ranges of runs: what they add up to, how they are divided, and where they stop."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onward.sim import batch
from onward.sim.batch import Job, Tally, added, drawn, fired, parts, plan, quiet_kinds, run_range, signature, wanted
from onward.sim.generate import Choice, scenario_of
from onward.sim.scenario import SHAPES, Ask, Fault, Machine, Outcome, Scenario, Shape, Violation
from onward.sim.vocabulary import DOOM, POISON
from onward.sim.world import run
from tests.sim.broken import break_restarts


def without_times(tally: Tally) -> dict[str, object]:
    """The last digits of sums of fractions depend on the order."""
    return msgspec.to_builtins(tally) | {"cpu_s": 0.0, "virtual_s": round(tally.virtual_s, 3)}


def outcome_of(scenario: Scenario, **changes: object) -> Outcome:
    whole = {"violation": None, "trace": [], "digest": "", "virtual_s": 1.0, "num_requests": 1, "num_tokens": 2}
    return Outcome(scenario=scenario, fired={}, ends={}, num_errors=0, **whole | changes)  # type: ignore[arg-type]


def eventful() -> Scenario:
    asks = [
        Ask("q0", 2.0, abort_at_s=1.0),
        Ask("q1", 2.0, leave_at_s=1.0),
        Ask("q2", 2.0, drop_at_s=[1.0, 2.0]),
        Ask("q3", 2.0, deadline_ms=5),
        Ask("q4", 2.0, prompt=f"a{POISON}"),
        Ask("q5", 2.0, prompt=f"a{DOOM}"),
        Ask("q6", 2.0, path="/v1/responses", background=True, detach_s=1.0),
        Ask("q7", 2.0, path="/v1/responses", background=True, cancel_at_s=1.0),
        Ask("q8", 2.0),
    ]
    return Scenario(1, "engine", [Machine("m0")], asks, [Fault("lose"), Fault("lose"), Fault("kill-api", "m0")])


def test_faults_of_clients_are_counted_with_the_others() -> None:
    once = dict.fromkeys(("abort", "leave", "deadline", "poison", "doom", "detach", "cancel", "kill-api"), 1)
    assert drawn(eventful()) == once | {"lose": 2, "disconnect": 2}


def test_what_shows_in_the_ends_only_has_fired_too() -> None:
    outcome = outcome_of(eventful())
    outcome = msgspec.structs.replace(outcome, fired={"lose": 9}, ends={"deadline_exceeded": 1, "invalid_logits": 2})
    assert fired(outcome) == {"lose": 9, "deadline": 1, "doom": 2}
    assert sorted(quiet_kinds(outcome)) == ["abort", "cancel", "detach", "disconnect", "kill-api", "leave", "poison"]


def test_a_fault_counts_once_however_many_messages_it_hits() -> None:
    tally = Tally()
    batch.count(tally, msgspec.structs.replace(outcome_of(eventful()), fired={"lose": 90, "kill-api": 1}))
    assert (tally.faults, tally.strikes, tally.kinds) == ({3: 1}, {91: 1}, {2: 1})


def test_violations_that_differ_in_names_and_numbers_only_have_one_signature() -> None:
    first = Violation(3, "q5: the cursor says 6, and 9 tokens have come", 1.0)
    second = Violation(3, "q12.2: the cursor says 16, and 0 tokens have come", 7.5)
    assert signature(first) == signature(second)
    assert signature(first) != signature(Violation(2, first.what, 1.0))
    assert signature(first) != signature(Violation(3, "choice 0 ends twice", 1.0))


def test_all_shapes_together_are_as_many_as_asked_for_and_each_has_its_share() -> None:
    seeds = wanted(SHAPES, 7, 200_000)
    assert {shape: len(whole) for shape, whole in seeds.items()} == {"engine": 170_000, "pd": 20_000, "cluster": 10_000}
    assert {whole.start for whole in seeds.values()} == {7}
    assert wanted(["pd"], 0, 5) == {"pd": range(5)}
    assert all(wanted(SHAPES, 0, 1).values()), "none is left out of a small batch"


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
    jobs = plan({"pd": range(start, start + num_runs)}, done, num_processes, Choice(), False)
    seeds = [seed for job in jobs for seed in range(job.start, job.stop)]
    covered = {seed for one in done["pd"] for seed in one}
    assert sorted(seeds) == [seed for seed in range(start, start + num_runs) if seed not in covered]


def test_shapes_advance_together() -> None:
    jobs = plan(wanted(SHAPES, 0, 4000), {}, 2, Choice(), False)
    half = jobs[: len(jobs) // 2]
    for shape in SHAPES:
        share = sum(job.shape == shape for job in half) / sum(job.shape == shape for job in jobs)
        assert 0.4 < share < 0.6


def test_sums_do_not_depend_on_how_runs_are_divided() -> None:
    whole = run_range(Job("engine", 0, 12)).tally
    divided = added([run_range(Job("engine", 5, 12)).tally, run_range(Job("engine", 0, 5)).tally])
    assert without_times(whole) == without_times(divided)
    assert whole.num_runs == 12


def test_several_processes_find_what_one_finds() -> None:
    jobs = plan({"engine": range(12)}, {}, 2, Choice(), False)
    assert len(jobs) > 2
    tallies = [added([part.tally for part in parts(jobs, num_processes)]) for num_processes in (1, 2)]
    assert without_times(tallies[0]) == without_times(tallies[1])


def test_nothing_new_is_begun_when_it_should_stop() -> None:
    jobs = [Job("engine", seed, seed + 1) for seed in range(12)]
    taken: list[int] = []
    for part in parts(jobs, 2, lambda: len(taken) >= 1):
        taken.append(part.start)
    assert 1 <= len(taken) < 12


def test_a_range_ends_before_the_run_that_violates_something(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = Choice(frozenset({"kill-worker"}))
    break_restarts(monkeypatch, priority=0)
    part = run_range(Job("engine", 0, 40, choice))
    assert part.stopper is not None and part.stopper.violation is not None
    assert part.stop == part.stopper.seed == part.start + part.tally.num_runs
    assert run(scenario_of(part.stop, "engine", choice)).violation == part.stopper.violation
    assert not part.tally.violations


def test_violations_are_grouped_by_what_is_violated_when_it_keeps_going(monkeypatch: pytest.MonkeyPatch) -> None:
    break_restarts(monkeypatch, priority=0)
    part = run_range(Job("engine", 0, 20, Choice(frozenset({"kill-worker"})), keeps_going=True))
    assert part.stopper is None
    assert part.tally.num_runs == 20
    assert part.tally.violations
    group = max(part.tally.violations.values(), key=lambda one: one.count)
    assert group.count == len(group.seeds) > 1
    assert group.invariant in (0, 2, 3)


def test_a_failure_of_the_simulator_itself_is_told_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(scenario: Scenario) -> Outcome:
        raise RuntimeError(f"seed {scenario.seed} is unlucky")

    monkeypatch.setattr(batch, "run", fail)
    part = run_range(Job("engine", 3, 9))
    assert part.stopper is not None and part.stopper.violation is None
    assert "Traceback" in part.stopper.failure and "seed 3 is unlucky" in part.stopper.failure
    kept = run_range(Job("engine", 3, 5, keeps_going=True)).tally.failures
    assert list(kept) == ["RuntimeError: seed 3 is unlucky", "RuntimeError: seed 4 is unlucky"]


def test_a_run_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def turn_in_circles(scenario: Scenario) -> Outcome:
        while True:
            pass

    monkeypatch.setattr(batch, "run", turn_in_circles)
    monkeypatch.setattr(batch, "MAX_RUN_S", 0.05)
    part = run_range(Job("engine", 0, 5))
    assert part.stopper is not None
    assert "has not ended" in part.stopper.failure


def test_kinds_that_were_asked_for_alone_and_did_not_strike_are_told_for_each_run() -> None:
    tally = run_range(Job("engine", 0, 30, Choice(frozenset({"deadline"})))).tally
    assert set(tally.drawn) == {"deadline"}
    assert tally.fired["deadline"] > 0
    quiet = tally.quiet.get("deadline")
    assert quiet is not None, "some deadlines are long enough"
    assert quiet.seeds[0] in range(30)
    assert not run_range(Job("engine", 0, 5)).tally.quiet, "with all kinds there is luck enough"
