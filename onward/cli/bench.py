"""`onward bench`: loads any OpenAI server with streams and measures how fast it is. `onward bench offline` has no
server."""

import argparse
import asyncio
import secrets
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from onward.bench import environment, load, plot
from onward.bench.compare import (
    MIN_PAIRS,
    FigureComparison,
    SummaryPair,
    compare,
    lines_of_comparison,
    table_of_comparison,
)
from onward.bench.load import BenchRequest, BenchTarget, LoadProgress, RequestTiming
from onward.bench.prompts import random_words
from onward.bench.report import Summary, lines_of, summarize, table_of
from onward.cli import bench_offline
from onward.cli.api_keys import add_api_key_file, api_key_from_args
from onward.cli.server_url import checked_url
from onward.errors import InvalidRequest
from onward.obs.tables import print_table

SCHEMA = 1
PLOT_SUFFIXES = (".svg", ".html")
_AT_LEAST_ONE = ("streams", "requests", "prompt_tokens", "output_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options]\n       %(prog)s offline MODEL [options]"
    parser.description = (
        "Sends load to the server at --url and prints how fast it is. `%(prog)s offline MODEL` measures a model in this "
        "process instead, without a server; see `%(prog)s offline --help`."
    )
    modes = parser.add_subparsers(dest="bench", metavar="offline", title="without a server", prog=parser.prog)
    without_server = modes.add_parser("offline", help="measure a model in this process, without a server")
    bench_offline.add_arguments(without_server)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server [%(default)s]")
    parser.add_argument("--model", metavar="ID", help="model name (default: the first one of the server)")
    parser.add_argument("--api-key", metavar="KEY", help="API key of the server")
    add_api_key_file(parser)
    parser.add_argument("--endpoint", choices=tuple(load.PATHS), default="chat", help="which API to use [%(default)s]")
    parser.add_argument(
        "--streams", type=int, default=8, metavar="N", help="number of requests at the same time [%(default)s]"
    )
    parser.add_argument("--requests", type=int, metavar="N", help="total number of requests (default: four per stream)")
    parser.add_argument(
        "--prompt-tokens", type=int, default=110, metavar="N", help="approximate length of a prompt [%(default)s]"
    )
    parser.add_argument("--output-tokens", type=int, default=128, metavar="N", help="length of an output [%(default)s]")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="sampling temperature [%(default)s]"
    )
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="generate the full length; use --no-ignore-eos for servers that do not support the field",
    )
    parser.add_argument(
        "--seed",
        metavar="TEXT",
        help="seed of the prompts (default: another one for each run, so that no prompt is in a prefix cache)",
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="time limit of a request [%(default)s]"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file to which all figures are written")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="file for a drawing of distributions and tokens per second: FILE.svg, or a page FILE.html",
    )
    parser.add_argument(
        "--compare",
        metavar="URL",
        help="second server (B), measured in turn with --url (A B A B …); prints the ratios of the pairs and their range",
    )
    parser.add_argument(
        "--pairs",
        type=int,
        metavar="N",
        help=f"with --compare: number of pairs of runs, at least {MIN_PAIRS} [{MIN_PAIRS}]",
    )
    parser.add_argument(
        "--compare-model", metavar="ID", help="with --compare: model name at B (default: the first one)"
    )
    parser.add_argument(
        "--compare-api-key", metavar="KEY", help="with --compare: API key of B; A's key is not sent to B"
    )


def run(args: argparse.Namespace) -> int:
    """Returns 1 if any request failed, so that scripts notice."""
    if args.bench == "offline":
        return bench_offline.run(args)
    args.requests = args.requests if args.requests is not None else 4 * args.streams
    for name in _AT_LEAST_ONE:
        if getattr(args, name) < 1:
            raise InvalidRequest(f"--{name.replace('_', '-')} must be at least 1", param=name)
    _check_files(args)
    args.seed = args.seed or secrets.token_hex(4)
    target = BenchTarget(
        checked_url(args.url, "--url"), args.model or "", args.endpoint, api_key_from_args(args), args.timeout
    )
    return _run_alone(target, args) if args.compare is None else _run_comparison(target, args)


def _check_files(args: argparse.Namespace) -> None:
    for name in ("pairs", "compare_model", "compare_api_key"):
        if args.compare is None and getattr(args, name) is not None:
            raise InvalidRequest(f"--{name.replace('_', '-')} is about --compare URL, which is missing", param=name)
    args.pairs = MIN_PAIRS if args.pairs is None else args.pairs
    if args.pairs < MIN_PAIRS:
        raise InvalidRequest(f"--pairs must be at least {MIN_PAIRS}: the range of fewer says little", param="pairs")
    if args.plot is not None and args.plot.suffix not in PLOT_SUFFIXES:
        raise InvalidRequest(f"--plot {args.plot} must end with {' or '.join(PLOT_SUFFIXES)}", param="plot")
    for flag, file in (("--json", args.json), ("--plot", args.plot)):
        if file is not None:
            make_folder_of(file, flag)


def _run_alone(target: BenchTarget, args: argparse.Namespace) -> int:
    console = Console()
    target, records = asyncio.run(_measure(target, args, console, args.seed))
    summary = summarize(records)
    title = f"{target.model} at {target.url}, {args.streams} streams, seed {args.seed}"
    print_table(console, table_of(summary, title))
    if args.json is not None:
        _write(args.json, "--json", msgspec.json.format(msgspec.json.encode(_document(target, args, summary, records))))
    if args.plot is not None:
        contents = plot.render_file(args.plot.suffix, title, {target.model: [records]}, lines_of(summary))
        _write(args.plot, "--plot", contents.encode())
    return 1 if summary.num_failed else 0


def _run_comparison(first: BenchTarget, args: argparse.Namespace) -> int:
    """Compares two servers: measures both with the same prompts, pair by pair, and prints the figures. Each pair has
    prompts of its own, so that no prefix cache has them. Returns the exit status."""
    console = Console()
    second = replace(
        first,
        url=checked_url(args.compare, "--compare"),
        model=args.compare_model or "",
        api_key=args.compare_api_key,
    )
    targets, runs = [first, second], ([], [])
    pairs: list[SummaryPair] = []
    for number in range(args.pairs):
        for side in (0, 1):
            targets[side], records = asyncio.run(_measure(targets[side], args, console, f"{args.seed} {number}"))
            runs[side].append(records)
        pairs.append(SummaryPair(summarize(runs[0][-1]), summarize(runs[1][-1])))
        [row, *_] = compare(pairs[-1:]) or [None]
        if row is not None:
            console.print(f"pair {number + 1} of {args.pairs}: {row.figure} {row.first:.4g} : {row.second:.4g}")
    rows = compare(pairs)
    title = f"A: {targets[0].model} at {targets[0].url}, B: {targets[1].model} at {targets[1].url}"
    title += f", {args.pairs} pairs, {args.streams} streams, seed {args.seed}"
    print_table(console, table_of_comparison(rows, title))
    if args.json is not None:
        document = _comparison_document(targets, args, pairs, rows)
        _write(args.json, "--json", msgspec.json.format(msgspec.json.encode(document)))
    if args.plot is not None:
        named_runs = {"A": runs[0], "B": runs[1]}
        contents = plot.render_file(args.plot.suffix, title, named_runs, lines_of_comparison(rows))
        _write(args.plot, "--plot", contents.encode())
    num_failed = sum(pair.first.num_failed + pair.second.num_failed for pair in pairs)
    if num_failed:
        console.print(f"{num_failed} requests failed", style="red")
    return 1 if num_failed else 0


def make_folder_of(file: Path, flag: str = "--json") -> None:
    """Creates the folder of a file. Called before anything is measured, so that the figures can be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise _cannot_write(file, flag, fault) from None


def _write(file: Path, flag: str, contents: bytes) -> None:
    try:
        file.write_bytes(contents)
    except OSError as fault:
        raise _cannot_write(file, flag, fault) from None


def _cannot_write(file: Path, flag: str, fault: OSError) -> InvalidRequest:
    return InvalidRequest(f"cannot write {flag} {file}: {fault.strerror}", param=flag.removeprefix("--"))


async def _measure(
    target: BenchTarget, args: argparse.Namespace, console: Console, seed: str
) -> tuple[BenchTarget, list[RequestTiming]]:
    async with load.new_session(target) as session:
        if not target.model:
            target = replace(target, model=await load.first_model(session, target.url))
        num_words = await load.calibrate_prompt_words(session, target, args.prompt_tokens, seed)
        jobs = [
            BenchRequest(random_words(num_words, f"{seed} {n}"), args.output_tokens, args.temperature, args.ignore_eos)
            for n in range(args.requests)
        ]
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]} failed"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("requests", total=len(jobs), failed=0)

            def show(snapshot: LoadProgress) -> None:
                progress.update(task, completed=snapshot.num_done, failed=snapshot.num_failed)

            return target, await load.run(session, target, jobs, args.streams, show)


def _comparison_document(
    targets: list[BenchTarget], args: argparse.Namespace, pairs: list[SummaryPair], rows: list[FigureComparison]
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "environment": environment.describe_machine(),
        "targets": [_target_fields(target) for target in targets],
        "asked": _parameters(args) | {"pairs": args.pairs},
        "ratios": rows,
        "pairs": pairs,
    }


def _parameters(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in (*_AT_LEAST_ONE, "temperature", "ignore_eos", "seed")}


def _target_fields(target: BenchTarget) -> dict[str, Any]:
    return {key: value for key, value in asdict(target).items() if key != "api_key"}


def _document(
    target: BenchTarget, args: argparse.Namespace, summary: Summary, records: list[RequestTiming]
) -> dict[str, Any]:
    started_s = min(record.started_s for record in records)
    return {
        "schema": SCHEMA,
        "environment": environment.describe_machine(),
        "target": _target_fields(target),
        "asked": _parameters(args),
        "summary": summary,
        "requests": [_line_of(record, started_s) for record in records],
    }


def _line_of(record: RequestTiming, started_s: float) -> dict[str, Any]:
    return {
        "started_s": record.started_s - started_s,
        "ended_s": record.ended_s - started_s,
        "text_s": [moment - started_s for moment in record.text_at_s],
        "usage": record.usage,
        "error": record.error,
    }
