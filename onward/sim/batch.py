"""Runs many scenarios, in ranges of seeds and over several processes, and sums up their results.

A range is the unit of work, of progress, and of the state that is kept between calls. Sums can be added in any order.
"""

import contextlib
import gc
import math
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from types import FrameType

import msgspec

from onward.sim.scenario import SHAPES, RunResult, Scenario, Shape, Violation
from onward.sim.scenario_generator import FaultSelection, generate_scenario
from onward.sim.simulation import run_scenario
from onward.sim.vocabulary import DOOM, ENGINE_POISON, POISON

SHAPE_SHARES: dict[Shape, float] = {"engine": 0.85, "pd": 0.10, "cluster": 0.05}
"""Share of each shape in the runs of all shapes together, about inverse to the cost of one run."""
RUNS_PER_RANGE: dict[Shape, int] = {"engine": 24, "pd": 12, "cluster": 3}
"""Runs in a range: less than a second of work, so that a batch stops soon after it is told to."""
RUNS_BETWEEN_COLLECTIONS = 10
MAX_RUN_S = 120.0
"""Limit on the real time of a run. A run takes a fraction of a second."""
MAX_SEEDS_KEPT = 20
POLL_S = 0.25


class SeedRange(msgspec.Struct, frozen=True):
    shape: Shape
    start: int
    stop: int
    selection: FaultSelection = FaultSelection()
    keeps_going: bool = False
    """Whether the range continues after a violation or a failure."""


class FindingGroup(msgspec.Struct):
    """Runs that went wrong in the same way."""

    count: int
    seeds: list[int]
    """At most `MAX_SEEDS_KEPT` of their seeds."""
    example: str
    invariant: int | None = None


class RunTotals(
    msgspec.Struct,
    rename={"planned": "drawn", "triggered": "fired", "end_reasons": "ends", "hits": "strikes", "untriggered": "quiet"},
):
    """Sums over runs of one shape. Histograms map a value to the number of runs that had it."""

    num_runs: int = 0
    cpu_s: float = 0.0
    virtual_s: float = 0.0
    num_errors: int = 0
    num_resumes: int = 0
    planned: dict[str, int] = {}
    """Faults that scenarios contain, by kind."""
    triggered: dict[str, int] = {}
    """How often each kind took effect. One fault on a wire may hit many messages."""
    end_reasons: dict[str, int] = {}
    requests: dict[int, int] = {}
    tokens: dict[int, int] = {}
    faults: dict[int, int] = {}
    """Planned faults that took effect, each counted once."""
    hits: dict[int, int] = {}
    kinds: dict[int, int] = {}
    violations: dict[str, FindingGroup] = {}
    failures: dict[str, FindingGroup] = {}
    """Failures of the simulator itself."""
    untriggered: dict[str, FindingGroup] = {}
    """Kinds that were planned in a run and did not take effect. Counted only if kinds were selected."""


class StoppingRun(msgspec.Struct, frozen=True):
    """The run that ended a range early: a violation, or the traceback of a failure of the simulator itself."""

    shape: Shape
    seed: int
    violation: Violation | None = None
    failure: str = ""


class RangeResult(msgspec.Struct, frozen=True):
    """The completed part of a `SeedRange`, and the run that stopped it, if there was one."""

    shape: Shape
    start: int
    stop: int
    """End of the completed part, without the stopping run, which is not in the sums."""
    totals: RunTotals
    stopping_run: StoppingRun | None = None


class RunTimeout(KeyboardInterrupt):
    """A run does not end. Derives from KeyboardInterrupt, because event loops catch other exceptions."""


# One run.


def planned_faults(scenario: Scenario) -> Counter[str]:
    """Returns the number of faults of each kind in a scenario, including those of clients."""
    counts = Counter(fault.kind for fault in scenario.faults)
    for request in scenario.requests:
        counts["abort"] += request.abort_at_s is not None
        counts["leave"] += request.leave_at_s is not None
        counts["disconnect"] += len(request.disconnect_at_s)
        counts["deadline"] += request.deadline_ms is not None
        counts["detach"] += request.detach_s is not None
        counts["cancel"] += request.cancel_at_s is not None
        counts["poison"] += POISON in request.prompt
        counts["poison-engine"] += ENGINE_POISON in request.prompt
        counts["doom"] += DOOM in request.prompt
    return +counts


def triggered_faults(outcome: RunResult) -> Counter[str]:
    """Returns how often each kind took effect. Includes kinds that only the end reasons of requests show."""
    counts = Counter(outcome.triggered)
    counts["deadline"] = max(counts["deadline"], outcome.end_reasons.get("deadline_exceeded", 0))
    counts["doom"] = max(counts["doom"], outcome.end_reasons.get("invalid_logits", 0))
    return +counts


def untriggered_kinds(outcome: RunResult) -> list[str]:
    """Returns the planned kinds that did not take effect in this run."""
    triggered = triggered_faults(outcome)
    return [kind for kind in planned_faults(outcome.scenario) if not triggered[kind]]


def violation_signature(violation: Violation) -> str:
    """Returns a description without names, numbers and received values. It is equal for violations that are likely the
    same bug."""
    what = re.sub(r"\[.*\]|'.*'|\b\w*\d[\w./-]*|\"[^\"]*\"", "#", violation.description)
    return f"{violation.invariant}: {what[:120]}"


@contextlib.contextmanager
def gc_between_runs() -> Iterator[Callable[[], None]]:
    """Turns automatic garbage collection off, because a run must not depend on it. Yields a function to call between
    runs, which collects in some of its calls."""
    was_enabled = gc.isenabled()
    gc.disable()
    count = 0

    def collect_sometimes() -> None:
        nonlocal count
        count += 1
        if count % RUNS_BETWEEN_COLLECTIONS == 0:
            gc.collect()

    try:
        yield collect_sometimes
    finally:
        gc.collect()  # a short range may not have reached the count
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _run_timeout() -> Iterator[None]:
    """Raises `RunTimeout` in a run that does not end. Does nothing outside the main thread, because only the main
    thread handles signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(_: int, frame: FrameType | None) -> None:
        raise RunTimeout(f"the run has not ended after {MAX_RUN_S:g} s")

    before = signal.signal(signal.SIGALRM, give_up)
    # The timer repeats, because the cleanup after a run may be stuck as well.
    signal.setitimer(signal.ITIMER_REAL, MAX_RUN_S, MAX_RUN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


# A range of runs.


def run_range(job: SeedRange) -> RangeResult:
    tally = RunTotals()
    with gc_between_runs() as collect_sometimes:
        for seed in range(job.start, job.stop):
            began_s = time.process_time()
            result = run_seed(job, seed)
            collect_sometimes()
            if isinstance(result, RunResult):
                add_run(tally, result, counts_untriggered=job.selection.kinds is not None)
            elif job.keeps_going:
                _group(tally.failures, result.failure.strip().rpartition("\n")[2][:120], seed, result.failure)
            else:
                return RangeResult(job.shape, job.start, seed, tally, result)
            tally.cpu_s += time.process_time() - began_s
    return RangeResult(job.shape, job.start, job.stop, tally)


def run_seed(job: SeedRange, seed: int) -> RunResult | StoppingRun:
    """Runs one seed. A `RunResult` has a violation only if the job keeps going; otherwise the result is a
    `StoppingRun`."""
    try:
        with _run_timeout():
            outcome = run_scenario(generate_scenario(seed, job.shape, job.selection))
    except (Exception, RunTimeout):
        return StoppingRun(job.shape, seed, failure=traceback.format_exc())
    stops = outcome.violation is not None and not job.keeps_going
    return StoppingRun(job.shape, seed, outcome.violation) if stops else outcome


def add_run(tally: RunTotals, outcome: RunResult, *, counts_untriggered: bool = False) -> None:
    planned, triggered, violation = planned_faults(outcome.scenario), triggered_faults(outcome), outcome.violation
    seed = outcome.scenario.seed
    if violation is not None:
        _group(tally.violations, violation_signature(violation), seed, violation.description, violation.invariant)
    for kind in untriggered_kinds(outcome) if counts_untriggered else []:
        _group(tally.untriggered, kind, seed, "")
    tally.num_runs += 1
    tally.virtual_s += outcome.virtual_s
    tally.num_errors += outcome.num_errors
    tally.num_resumes += outcome.num_resumes
    for sums, more in (
        (tally.planned, planned),
        (tally.triggered, triggered),
        (tally.end_reasons, outcome.end_reasons),
    ):
        _add(sums, more)
    _one_more(tally.requests, outcome.num_requests)
    _one_more(tally.tokens, outcome.num_tokens)
    _one_more(tally.faults, sum(min(triggered[kind], number) for kind, number in planned.items()))
    _one_more(tally.hits, triggered.total())
    _one_more(tally.kinds, len(triggered))


def _group(groups: dict[str, FindingGroup], name: str, seed: int, example: str, invariant: int | None = None) -> None:
    group = groups.setdefault(name, FindingGroup(0, [], example, invariant))
    group.count += 1
    group.seeds = [*group.seeds, seed][:MAX_SEEDS_KEPT]


def _one_more(histogram: dict[int, int], value: int) -> None:
    histogram[value] = histogram.get(value, 0) + 1


def _add(sums: dict, more: Mapping) -> None:  # type: ignore[type-arg]
    for key, value in more.items():
        sums[key] = sums.get(key, 0) + value


def sum_totals(tallies: Sequence[RunTotals]) -> RunTotals:
    """Returns the sum of all totals."""
    total = RunTotals()
    for tally in tallies:
        for name in ("num_runs", "cpu_s", "virtual_s", "num_errors", "num_resumes"):
            setattr(total, name, getattr(total, name) + getattr(tally, name))
        for name in ("planned", "triggered", "end_reasons", "requests", "tokens", "faults", "hits", "kinds"):
            _add(getattr(total, name), getattr(tally, name))
        for name in ("violations", "failures", "untriggered"):
            _add_groups(getattr(total, name), getattr(tally, name))
    return total


def _add_groups(groups: dict[str, FindingGroup], more: dict[str, FindingGroup]) -> None:
    for name, group in more.items():
        merged = groups.setdefault(name, FindingGroup(0, [], group.example, group.invariant))
        merged.count += group.count
        merged.seeds = sorted({*merged.seeds, *group.seeds})[:MAX_SEEDS_KEPT]


# Many ranges.


def seeds_by_shape(shapes: Sequence[Shape], start: int, num_runs: int) -> dict[Shape, range]:
    """Returns the seeds to run. Each shape gets its share, and all shapes together have at least `num_runs` seeds."""
    total = sum(SHAPE_SHARES[shape] for shape in shapes)
    return {shape: range(start, start + _share(num_runs, SHAPE_SHARES[shape] / total)) for shape in shapes}


def _share(num_runs: int, share: float) -> int:
    """Returns the number of runs, rounded up. A floating-point error does not add a run."""
    return max(1, math.ceil(round(num_runs * share, 6)))


def plan_ranges(
    seeds: Mapping[Shape, range],
    done: Mapping[Shape, Sequence[range]],
    num_processes: int,
    choice: FaultSelection,
    keeps_going: bool,
) -> list[SeedRange]:
    """Returns the remaining seeds in ranges. All shapes advance together, so that the remaining time can be
    estimated."""
    ordered: list[tuple[float, SeedRange]] = []
    for shape, whole in seeds.items():
        left = _left(whole, done.get(shape, ()))
        num_left = sum(len(gap) for gap in left)
        size = max(1, min(RUNS_PER_RANGE[shape], -(-num_left // (4 * num_processes))))
        chunks = [range(at, min(at + size, gap.stop)) for gap in left for at in range(gap.start, gap.stop, size)]
        for index, chunk in enumerate(chunks):
            job = SeedRange(shape, chunk.start, chunk.stop, choice, keeps_going)
            ordered.append(((index + 0.5) / len(chunks), job))
    return [job for _, job in sorted(ordered, key=lambda item: (item[0], SHAPES.index(item[1].shape)))]


def _left(whole: range, done: Sequence[range]) -> list[range]:
    """Returns the parts of `whole` that no range of `done` covers."""
    gaps, at = [], whole.start
    for completed in sorted(done, key=lambda completed: completed.start):
        if completed.stop <= at or completed.start >= whole.stop:
            continue
        if completed.start > at:
            gaps.append(range(at, completed.start))
        at = completed.stop
    return [*gaps, range(at, whole.stop)] if at < whole.stop else gaps


def run_ranges(
    jobs: Sequence[SeedRange], num_processes: int, should_stop: Callable[[], bool] = lambda: False
) -> Iterator[RangeResult]:
    """Yields the results of jobs as they complete. When `should_stop` returns True, running jobs are still finished."""
    if num_processes == 1:
        for job in jobs:
            if should_stop():
                return
            yield run_range(job)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(num_processes, len(jobs) or 1), context, _prepare_process) as pool:
        waiting, under_way = iter(jobs), set[Future[RangeResult]]()
        while True:
            while len(under_way) < 2 * num_processes and not should_stop() and (job := next(waiting, None)):
                under_way.add(pool.submit(run_range, job))
            if should_stop():
                under_way = {one for one in under_way if not one.cancel()}
            if not under_way:
                return
            finished, under_way = wait(under_way, POLL_S, FIRST_COMPLETED)
            yield from (one.result() for one in finished)


def _prepare_process() -> None:
    """Ignores Ctrl-C in a pool process, because the parent handles it and lets running jobs finish. Exits when the
    parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
