"""`onward sim --runs`: runs a batch with a progress bar, saves its state, and shows its result at the end."""

import argparse
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import FrameType

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from onward.obs.tables import print_table
from onward.sim import batch, batch_state, report
from onward.sim.batch import RangeResult, RunTotals, StoppingRun
from onward.sim.batch_state import BatchState, CompletedRange
from onward.sim.scenario import RunResult, Scenario, Shape
from onward.sim.scenario_generator import FaultSelection, generate_scenario
from onward.sim.shrink import MAX_RUNS, shrink
from onward.sim.simulation import run_scenario as run_scenario

VIOLATED, QUIET, FAILED, INTERRUPTED = 1, 3, 4, 130
SOME_UNTRIGGERED = f"no invariant is violated, but not all that was asked for was tested: exit status {QUIET}"
SAVE_INTERVAL_S = 5.0
LOG_INTERVAL_S = 30.0
MAX_LINES_SHOWN = 400


def run(console: Console, args: argparse.Namespace, shapes: list[Shape], selection: FaultSelection) -> int:
    seeds = batch.seeds_by_shape(shapes, args.start, args.runs)
    # Reading every module takes most of a second, and only these two files show the digest.
    code = batch_state.code_digest() if args.state is not None or args.json is not None else ""
    state = batch_state.load(args.state, selection) if args.state is not None else BatchState(selection)
    _forget_other_code(console, state, code, args.any_code)
    jobs = batch.plan_ranges(seeds, state.ranges(), args.jobs, selection, args.keep_going)
    batch_run = _BatchRun(console, args, state, code)
    batch_run.run(jobs)
    return batch_run.conclude()


def _forget_other_code(console: Console, state: BatchState, code: str, keeps_runs: bool) -> None:
    others = state.of_other_code(code)
    if not others:
        return
    count = sum(completed.totals.num_runs for completed in others)
    if keeps_runs:
        console.print(f"{count:,} runs were made by other code, and are kept")
    else:
        console.print(f"{count:,} runs were made by other code, and are made again (--any-code keeps them)")
        state.done = [completed for completed in state.done if completed.code == code]


class _BatchRun:
    def __init__(self, console: Console, args: argparse.Namespace, state: BatchState, code: str) -> None:
        self._console, self._args, self._state, self._code = console, args, state, code
        self._stopping_runs: list[StoppingRun] = []
        self._is_interrupted, self._pool_error = False, ""
        self._num_runs = self._num_tokens = 0
        self._started_s = self._reported_s = time.monotonic()
        self._saved_s = -SAVE_INTERVAL_S

    # While it runs.

    def run(self, jobs: list[batch.SeedRange]) -> None:
        total = sum(job.stop - job.start for job in jobs)
        columns = (
            SpinnerColumn(),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        with _interrupts_to(self._interrupt), Progress(*columns, console=self._console, transient=True) as progress:
            bar = progress.add_task("", total=total)
            try:
                for result in batch.run_ranges(jobs, self._args.jobs, self._should_stop):
                    self._add_result(result)
                    progress.update(bar, completed=self._num_runs, description=self._rate())
                    self._log_progress(total)
            except BrokenProcessPool as fault:
                self._pool_error = str(fault)
            finally:
                self._state.wall_s += time.monotonic() - self._started_s
                self._save(at_once=True)

    def _should_stop(self) -> bool:
        return self._is_interrupted or bool(self._stopping_runs)

    def _interrupt(self) -> None:
        self._is_interrupted = True

    def _add_result(self, result: RangeResult) -> None:
        if result.stopping_run is not None:
            self._stopping_runs.append(result.stopping_run)
        if result.stop > result.start:
            self._num_runs += result.totals.num_runs
            self._num_tokens += report.total_of(result.totals.tokens)
            self._state.add(CompletedRange(result.shape, result.start, result.stop, self._code, result.totals))
        self._save()

    def _save(self, *, at_once: bool = False) -> None:
        now_s = time.monotonic()
        if self._args.state is not None and (at_once or now_s - self._saved_s > SAVE_INTERVAL_S):
            self._saved_s = now_s
            batch_state.save(self._args.state, self._state)

    def _log_progress(self, total: int) -> None:
        """Prints a line every LOG_INTERVAL_S where the output is not a terminal and so has no progress bar."""
        now_s = time.monotonic()
        if not self._console.is_terminal and now_s - self._reported_s > LOG_INTERVAL_S:
            self._reported_s = now_s
            self._console.print(f"{self._num_runs:,} of {total:,} runs, {self._rate()}")

    def _rate(self) -> str:
        seconds = time.monotonic() - self._started_s
        return f"{self._num_runs / seconds:.1f} runs/s, {self._num_tokens / seconds:,.0f} tokens/s"

    # At its end.

    def conclude(self) -> int:
        tallies = self._state.tallies()
        total = batch.sum_totals(list(tallies.values()))
        if total.num_runs:
            self._show(tallies, total)
        if self._stopping_runs:
            return self._show_stopper(
                min(self._stopping_runs, key=lambda stopping_run: (stopping_run.seed, stopping_run.shape))
            )
        if self._pool_error:
            self._console.print(Text(f"the simulator itself failed: {self._pool_error}", "bold red"))
            return FAILED
        if self._is_interrupted:
            self._console.print(self._continuation())
            return INTERRUPTED
        return self._judge(tallies, total)

    def _show(self, tallies: dict[Shape, RunTotals], total: RunTotals) -> None:
        rates = self._rates(total)
        for rows in (report.shape_rows, report.distribution_rows, report.fault_rows, report.end_rows):
            print_table(self._console, report.table_of(rows(tallies)))
            self._console.print()
        self._console.print(report.rates_line(rates))
        if self._args.json is not None:
            document = msgspec.json.encode(report.document_of(tallies, rates, self._state.num_runs_by_code()))
            _write(self._args.json, msgspec.json.format(document))
        if self._args.markdown is not None:
            _write(self._args.markdown, report.markdown_of(tallies, rates).encode())

    def _rates(self, total: RunTotals) -> report.BatchRates:
        return report.BatchRates(self._state.wall_s, self._args.jobs, total.num_runs, report.total_of(total.tokens))

    def _continuation(self) -> str:
        if self._args.state is None:
            return "stopped; with --state FILE the next call would go on from here"
        return f"stopped; what is done is in {self._args.state}, and the same call goes on"

    def _judge(self, tallies: dict[Shape, RunTotals], total: RunTotals) -> int:
        for name, title in (("violations", "violations"), ("failures", "failures of the simulator itself")):
            if getattr(total, name):
                self._console.print(Text(f"\n{title}", "bold red"))
            for shape, tally in tallies.items():
                for line in report.group_lines(shape, getattr(tally, name)):
                    self._console.print(line)
        if total.violations or total.failures:
            return FAILED if total.failures else VIOLATED
        return self._judge_faults(total)

    def _judge_faults(self, total: RunTotals) -> int:
        for kind, group in total.untriggered.items():
            self._console.print(Text(f"{kind} never struck in {group.count:,} runs, as seed {group.seeds[0]}", "red"))
        never = [] if total.untriggered else report.never_triggered(total)
        for kind in never:
            self._console.print(Text(f"{kind} was drawn {total.planned[kind]:,} times, and never struck", "bold red"))
        if total.untriggered or never:
            self._console.print(Text(SOME_UNTRIGGERED, "bold"))
            return QUIET
        self._console.print(Text("no invariant is violated", "bold green"))
        return 0

    def _show_stopper(self, stopping_run: StoppingRun) -> int:
        self._console.print()
        name = f"seed {stopping_run.seed} of shape {stopping_run.shape}"
        if stopping_run.violation is None:
            self._console.print(Text(f"{name}: the simulator itself failed", "bold red"))
            self._console.print(stopping_run.failure)
            return FAILED
        self._console.print(Text(f"{name}: {report.describe_violation(stopping_run.violation)}", "bold red"))
        scenario = generate_scenario(stopping_run.seed, stopping_run.shape, self._state.selection)
        result = run_scenario(scenario)
        if result.violation is None:
            self._console.print("run again here, it is not violated: the run is not repeatable")
            return FAILED
        show_smallest(self._console, result, self._args.save, shrinks=self._args.shrink is not False)
        narrowed = "".join(f" --only {kind}" for kind in self._args.only)
        narrowed += "".join(f" --fault {word}" for word in self._args.fault)
        self._console.print(f"as found: onward sim --seed {stopping_run.seed} --shape {stopping_run.shape}{narrowed}")
        return VIOLATED


def show_smallest(console: Console, result: RunResult, path: Path | None, *, shrinks: bool = True) -> None:
    """Shows and saves the smallest scenario with this violation that can be found: its trace, and how to run it
    again."""
    scenario = result.scenario
    if shrinks:
        scenario = _shrunk(console, result)
    final = run_scenario(scenario, keeps_lines=True)
    assert final.violation is not None, "it was found so"
    for line in final.trace[-MAX_LINES_SHOWN:]:
        console.print(report.styled(line))
        if "VIOLATION" in line:
            break
    console.print(Text(report.describe_violation(final.violation), "bold red"))
    path = path or Path(f"sim-{result.scenario.shape}-{result.scenario.seed}.json")
    save_scenario(path, scenario)
    console.print(f"again:    onward sim --replay {path}")


def _shrunk(console: Console, result: RunResult) -> Scenario:
    columns = (SpinnerColumn(), TextColumn("looking for a smaller one"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=MAX_RUNS)

        def show(num_runs: int, smallest: Scenario) -> None:
            progress.update(bar, completed=num_runs, description=report.described(smallest))

        shrunk = shrink(result, on_run=show)
    before, after = result.scenario, shrunk.scenario
    more = "; more may be possible" if shrunk.was_cut_short else ""
    console.print(f"found as: {report.described(before)}")
    console.print(f"smaller:  {report.described(after)} ({shrunk.num_runs} runs, {shrunk.seconds:.1f} s{more})")
    return after


def save_scenario(path: Path, scenario: Scenario) -> None:
    _write(path, msgspec.json.format(msgspec.json.encode(scenario)))


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@contextlib.contextmanager
def _interrupts_to(on_interrupt: Callable[[], None]) -> Iterator[None]:
    """Makes the first Ctrl-C in the context call `on_interrupt`, so that runs in progress finish. The second one
    interrupts them."""

    def handle(_: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        on_interrupt()

    previous_handler = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
