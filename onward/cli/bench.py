"""`onward bench`: loads any OpenAI server with streams and says how fast it is. `onward bench offline` has no server."""

import argparse
import asyncio
import secrets
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from onward.bench import environment, load
from onward.bench.load import BenchRequest, BenchTarget, LoadProgress, RequestTiming
from onward.bench.prompts import random_words
from onward.bench.report import Summary, summarize, table_of
from onward.cli import bench_offline
from onward.cli.api_keys import add_api_key_file, api_key_from_args
from onward.cli.server_url import checked_url
from onward.errors import InvalidRequest
from onward.obs.tables import print_table

SCHEMA = 1
_AT_LEAST_ONE = ("streams", "requests", "prompt_tokens", "output_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options]\n       %(prog)s offline MODEL [options]"
    parser.description = (
        "Alone, it loads the server at --url with streams, by the options below. With the word offline it measures "
        "a model in this process instead, without a server: see `%(prog)s offline --help`."
    )
    modes = parser.add_subparsers(dest="bench", metavar="offline", title="without a server", prog=parser.prog)
    without_server = modes.add_parser(
        "offline", help="measure a model, or a shape with random weights, in this process"
    )
    bench_offline.add_arguments(without_server)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server [%(default)s]")
    parser.add_argument("--model", metavar="ID", help="the model to ask for (default: the first one offered)")
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    add_api_key_file(parser)
    parser.add_argument("--endpoint", choices=tuple(load.PATHS), default="chat", help="[%(default)s]")
    parser.add_argument("--streams", type=int, default=8, metavar="N", help="requests at once [%(default)s]")
    parser.add_argument("--requests", type=int, metavar="N", help="requests in all (default: four for each stream)")
    parser.add_argument("--prompt-tokens", type=int, default=110, metavar="N", help="about [%(default)s]")
    parser.add_argument("--output-tokens", type=int, default=128, metavar="N", help="per request [%(default)s]")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="[%(default)s]")
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on to the full length; servers that do not know the field need --no-ignore-eos",
    )
    parser.add_argument(
        "--seed",
        metavar="TEXT",
        help="chooses the prompts (default: another one for each run, so that none finds its prompts in a prefix cache)",
    )
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="per request [%(default)s]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes all figures there")


def run(args: argparse.Namespace) -> int:
    """1 if any request failed, so that scripts notice."""
    if args.bench == "offline":
        return bench_offline.run(args)
    args.requests = args.requests if args.requests is not None else 4 * args.streams
    for name in _AT_LEAST_ONE:
        if getattr(args, name) < 1:
            raise InvalidRequest(f"--{name.replace('_', '-')} must be at least 1", param=name)
    if args.json is not None:
        make_folder_of(args.json)
    args.seed = args.seed or secrets.token_hex(4)
    target = BenchTarget(
        checked_url(args.url, "--url"), args.model or "", args.endpoint, api_key_from_args(args), args.timeout
    )
    console = Console()
    target, records = asyncio.run(_measure(target, args, console))
    summary = summarize(records)
    title = f"{target.model} at {target.url}, {args.streams} streams, seed {args.seed}"
    print_table(console, table_of(summary, title))
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(_document(target, args, summary, records))))
    return 1 if summary.num_failed else 0


def make_folder_of(file: Path) -> None:
    """Before anything is measured, so that the figures have somewhere to go."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise InvalidRequest(f"cannot write --json {file}: {fault.strerror}", param="json") from None


async def _measure(
    target: BenchTarget, args: argparse.Namespace, console: Console
) -> tuple[BenchTarget, list[RequestTiming]]:
    async with load.new_session(target) as session:
        if not target.model:
            target = replace(target, model=await load.first_model(session, target.url))
        num_words = await load.calibrate_prompt_words(session, target, args.prompt_tokens, args.seed)
        jobs = [
            BenchRequest(
                random_words(num_words, f"{args.seed} {n}"), args.output_tokens, args.temperature, args.ignore_eos
            )
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


def _document(
    target: BenchTarget, args: argparse.Namespace, summary: Summary, records: list[RequestTiming]
) -> dict[str, Any]:
    started_s = min(record.started_s for record in records)
    parameters = {name: getattr(args, name) for name in (*_AT_LEAST_ONE, "temperature", "ignore_eos", "seed")}
    return {
        "schema": SCHEMA,
        "environment": environment.describe_machine(),
        "target": {key: value for key, value in asdict(target).items() if key != "api_key"},
        "asked": parameters,
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
