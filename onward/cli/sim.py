"""`onward sim`: whole clusters under faults, in one thread and virtual time; the same seed is always the same run.

Exit status 0: all is well. 1: an invariant is violated. 3: a requested fault never took effect. 4: the simulator itself
failed.
"""

import argparse
import os
import traceback
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from onward.cli import sim_batch
from onward.cli.sim_batch import FAILED, QUIET, SOME_UNTRIGGERED, VIOLATED
from onward.errors import InvalidRequest
from onward.sim import batch, report
from onward.sim.fault_kinds import FAULT_KINDS, kinds_of
from onward.sim.scenario import SHAPES, RunResult, Scenario, Shape
from onward.sim.scenario_generator import FaultSelection, generate_scenario
from onward.sim.simulation import run_scenario as run_scenario

DEFAULT_RUNS = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    run_choice = parser.add_mutually_exclusive_group()
    run_choice.add_argument("--seed", type=int, metavar="N", help="one run of this seed, with a trace")
    run_choice.add_argument(
        "--runs", type=int, metavar="K", help=f"number of runs, each with another seed [{DEFAULT_RUNS}]"
    )
    run_choice.add_argument("--replay", type=Path, metavar="FILE", help="one run of a scenario that --save has written")
    run_choice.add_argument("--scenario", metavar="NAME", help="one run of a scenario of the catalogue, such as F20")
    run_choice.add_argument("--list-scenarios", action="store_true", help="list the catalogue of scenarios")
    run_choice.add_argument("--list-faults", action="store_true", help="list the kinds of faults")
    parser.add_argument(
        "--shape",
        choices=(*SHAPES, "all"),
        help="engine: one instance; pd: decode and prefill; cluster: with routers (default: engine with --seed, else all)",
    )
    parser.add_argument("--start", type=int, default=0, metavar="S", help="the first seed of --runs [%(default)s]")
    parser.add_argument("--messages", action="store_true", help="show every message in the trace")
    parser.add_argument(
        "--only", action="append", default=[], metavar="KIND", help="inject only this kind of fault; may be repeated"
    )
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="KIND=RATE",
        help="relative frequency of a kind of fault, by default 1; may be repeated",
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="number of processes for --runs (default: one per core)")
    parser.add_argument(
        "--keep-going", action="store_true", help="continue after a violation, and group all violations"
    )
    parser.add_argument(
        "--state", type=Path, metavar="FILE", help="file for the progress of --runs, from which the next call continues"
    )
    parser.add_argument(
        "--any-code", action="store_true", help="also count runs in --state that were made with other code"
    )
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="file to which the scenario of a violation is written"
    )
    parser.add_argument(
        "--shrink",
        action=argparse.BooleanOptionalAction,
        help="shrink the scenario of a violation (default: with --runs)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to which the figures of --runs are written")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="file to which they are written as tables")


def run(args: argparse.Namespace) -> int:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if args.list_faults:
        return _list_faults(console)
    if args.list_scenarios:
        return _list_scenarios(console)
    if args.scenario is not None:
        return _run_catalogued(console, args)
    if args.replay is not None:
        return _show_run(console, _scenario_in(args.replay), args)
    selection = choice_of(args.only, args.fault)
    shapes = shapes_of(args.shape or ("engine" if args.seed is not None else "all"), selection)
    if args.seed is not None:
        return max(_show_run(console, generate_scenario(args.seed, shape, selection), args) for shape in shapes)
    return sim_batch.run(console, batch_args(args), shapes, selection)


def batch_args(args: argparse.Namespace) -> argparse.Namespace:
    args.runs = args.runs if args.runs is not None else DEFAULT_RUNS
    args.jobs = args.jobs if args.jobs is not None else len(os.sched_getaffinity(0))
    for name in ("runs", "jobs"):
        if getattr(args, name) < 1:
            raise InvalidRequest(f"--{name} must be at least 1", param=name)
    if args.start < 0:
        raise InvalidRequest("--start must not be negative", param="start")
    return args


# Selection of faults.


def choice_of(only: list[str], rates: list[str]) -> FaultSelection:
    kinds = frozenset(_check_kind(kind, "only") for kind in only) if only else None
    parsed: dict[str, float] = {}
    for rate_text in rates:
        kind, _, rate = rate_text.partition("=")
        try:
            parsed[_check_kind(kind, "fault")] = float(rate)
        except ValueError:
            raise InvalidRequest(f"--fault {rate_text}: write KIND=RATE, as kill-worker=3", param="fault") from None
        if not 0 <= parsed[kind] < float("inf"):
            raise InvalidRequest(f"--fault {rate_text}: the rate must be a number from 0 on", param="fault")
    return FaultSelection(kinds, parsed)


def _check_kind(kind: str, param: str) -> str:
    if kind not in FAULT_KINDS:
        raise InvalidRequest(f"--{param}: there is no fault {kind!r}; there are {', '.join(FAULT_KINDS)}", param=param)
    return kind


def shapes_of(shape_name: str, selection: FaultSelection) -> list[Shape]:
    """Returns the shapes in which any of the requested faults can happen."""
    named = [*(selection.kinds or ()), *selection.rates]
    shapes: list[Shape] = [shape for shape in SHAPES if shape_name in (shape, "all")]
    matching_shapes: list[Shape] = [
        shape for shape in shapes if not named or any(kind in kinds_of(shape) for kind in named)
    ]
    if not matching_shapes:
        kinds = ", ".join(sorted(set(named)))
        raise InvalidRequest(f"--shape {shape_name} knows no fault of the kind {kinds}", param="shape")
    return matching_shapes


def _list_faults(console: Console) -> int:
    for kind, fault_kind in FAULT_KINDS.items():
        console.print(
            Text.assemble((f"{kind:14}", "bold"), f"{fault_kind.help}  ", (", ".join(fault_kind.shapes), "dim"))
        )
    return 0


# One run.


def _show_run(console: Console, scenario: Scenario, args: argparse.Namespace) -> int:
    try:
        with batch.gc_between_runs():
            result = run_scenario(scenario, keeps_lines=True, keeps_messages=args.messages)
    except Exception:
        console.print(f"the simulator itself failed:\n{traceback.format_exc()}")
        return FAILED
    for line in result.trace:
        console.print(report.styled(line))
    console.print()
    for line in report.summary_of(result):
        console.print(line)
    if result.violation is not None:
        console.print(Text(report.describe_violation(result.violation), "bold red"))
        if args.shrink:
            sim_batch.show_smallest(console, result, args.save)
        elif args.save is not None:
            sim_batch.save_scenario(args.save, result.scenario)
        return VIOLATED
    return _report_untriggered(console, result, is_narrowed=bool(args.only))


def _report_untriggered(console: Console, result: RunResult, *, is_narrowed: bool) -> int:
    untriggered = batch.untriggered_kinds(result)
    if is_narrowed and untriggered:
        console.print(Text(f"never struck: {', '.join(untriggered)}", "bold red"))
        console.print(Text(SOME_UNTRIGGERED, "bold"))
        return QUIET
    console.print(Text("no invariant is violated", "bold green"))
    return 0


def _scenario_in(path: Path) -> Scenario:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Scenario)
    except (OSError, msgspec.MsgspecError) as fault:
        raise InvalidRequest(f"--replay {path}: {fault}", param="replay") from None


# The catalogue.


def _run_catalogued(console: Console, args: argparse.Namespace) -> int:
    from onward.sim.catalogue import SCENARIOS

    entry = SCENARIOS.get(args.scenario)
    if entry is None:
        known = ", ".join(SCENARIOS)
        raise InvalidRequest(f"--scenario: there is no {args.scenario!r}; there are {known}", param="scenario")
    console.print(Text(f"{args.scenario}  {entry.title}", "bold"))
    if entry.scenario is None:
        console.print(f"no simulation can show this; {entry.covered_by} does")
        return 0
    return _show_run(console, entry.scenario, args)


def _list_scenarios(console: Console) -> int:
    from onward.sim.catalogue import SCENARIOS

    width = max(len(name) for name in SCENARIOS)
    for name, entry in SCENARIOS.items():
        covered_by = entry.scenario.shape if entry.scenario is not None else entry.covered_by
        console.print(Text.assemble((f"{name:{width}}  ", "bold"), f"{entry.title}  ", (covered_by, "dim")))
    return 0
