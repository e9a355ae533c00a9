"""`onward run-batch in.jsonl out.jsonl`: answers a file of requests, as OpenAI's batches have them, and goes on where it
stopped when it is run again."""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from onward.cli import flag_groups
from onward.cli.api_keys import add_api_key_file, api_key_from_args
from onward.cli.batch_files import BatchOutputFile, BatchResult, check_input, read_requests
from onward.cli.batch_runner import BatchTarget, run_batch
from onward.cli.flags import add_grouped_flags, format_flags
from onward.cli.server_url import checked_url
from onward.cli.temporary_server import temporary_server
from onward.config import ServeConfig
from onward.errors import InvalidRequest

MAX_AT_ONCE = 4096
FLAGS_OF_SHARED_SERVERS = (
    "host",
    "port",
    "role",
    "handoff_port",
    "prefill_peers",
    "router",
    "instance_name",
    "advertise_url",
    "api_key",
    "api_key_file",
    "api_keys",
    "insecure",
    "open_metrics",
    "demo",
    "tls_cert",
    "tls_key",
    "cors_origin",
    "allowed_host",
    "cluster_key_file",
)
"""Flags of a server that other clients use; the batch's own server does not have them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", type=Path, metavar="IN", help="requests, one JSON object on each line")
    parser.add_argument("output", type=Path, metavar="OUT", help="gets an answer for each; what is there is kept")
    parser.add_argument("--url", help="a server that runs (default: one is started for the batch)")
    parser.add_argument("--api-key", metavar="KEY", help="for --url: sent as a bearer token")
    add_api_key_file(parser)
    parser.add_argument("--concurrency", type=int, default=64, metavar="N", help="requests at once [%(default)s]")
    parser.add_argument(
        "--retries", type=int, default=8, metavar="N", help="of what may pass, per request [%(default)s]"
    )
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS", help="per request [%(default)s]")
    parser.add_argument("--retry-failed", action="store_true", help="ask again what an earlier run has failed with")
    serve_flags = tuple(name for group in flag_groups.SERVE.values() for name in group)
    title = "options of the server that is started, as those of `onward serve`"
    add_grouped_flags(parser, ServeConfig, {title: serve_flags}, skip=FLAGS_OF_SHARED_SERVERS)


def run(args: argparse.Namespace) -> int:
    """1 if any request failed, so that scripts notice."""
    _check_numbers(args)
    custom_ids = check_input(args.input)
    with BatchOutputFile(args.output, drop_failed=args.retry_failed) as output:
        remaining = {custom_id for custom_id in custom_ids if custom_id not in output.answered}
        console = Console(stderr=True, highlight=False)
        if len(remaining) < len(custom_ids):
            console.print(f"{len(custom_ids) - len(remaining)} of {len(custom_ids)} are answered already")
        if remaining:
            with _server(args) as server, _bar(console, len(custom_ids), len(custom_ids) - len(remaining)) as advance:
                _answer(server, args, remaining, output, advance)
        console.print(f"{len(custom_ids)} answered, {output.num_failed} of them by an error: {args.output}")
        return 1 if output.num_failed else 0


def _answer(
    server: BatchTarget,
    args: argparse.Namespace,
    remaining: set[str],
    output: BatchOutputFile,
    advance: Callable[[], None],
) -> None:
    def on_result(result: BatchResult) -> None:
        output.add(result)
        advance()

    requests = (request for request in read_requests(args.input) if request.custom_id in remaining)
    asyncio.run(run_batch(server, requests, min(args.concurrency, len(remaining)), on_result))


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[BatchTarget]:
    if args.url is not None:
        yield BatchTarget(args.url, api_key_from_args(args), args.timeout, args.retries)
        return
    names = tuple(field.name for field in fields(ServeConfig) if field.name not in FLAGS_OF_SHARED_SERVERS)
    flags = format_flags(args, names)
    with temporary_server([*flags, *([] if args.log_level else ["--log-level", "warning"])]) as server:
        yield BatchTarget(server.url, server.api_key, args.timeout, args.retries)


@contextlib.contextmanager
def _bar(console: Console, total: int, done: int) -> Iterator[Callable[[], None]]:
    columns = (TextColumn("answering"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("answering", total=total, completed=done)
        yield lambda: progress.advance(task)


def _check_numbers(args: argparse.Namespace) -> None:
    if not 1 <= args.concurrency <= MAX_AT_ONCE:
        raise InvalidRequest(f"--concurrency must be between 1 and {MAX_AT_ONCE}", param="concurrency")
    if args.retries < 0 or args.timeout <= 0:
        raise InvalidRequest("--retries must not be negative, and --timeout must be above 0", param="retries")
    if args.url is not None:
        args.url = checked_url(args.url, "--url")
    if args.input.resolve() == args.output.resolve():
        raise InvalidRequest("IN and OUT must be two files", param="output")
    if args.url is None and (args.api_key or args.api_key_file):
        print(
            "onward run-batch: --api-key is for --url; the server that is started has a key of its own", file=sys.stderr
        )
