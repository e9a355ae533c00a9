"""`onward run-batch in.jsonl out.jsonl`: answers a file of requests in OpenAI's batch format. A second run continues
where the first one stopped."""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from onward.batches.batch_files import BatchOutputFile, BatchRequest, BatchResult, check_input, read_requests
from onward.batches.batch_runner import Retries, run_batch
from onward.batches.http_sender import BatchTarget, http_sender
from onward.cli import flag_groups
from onward.cli.api_keys import add_api_key_file, api_key_from_args
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
    "instance_generation",
    "node_name",
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
    "batch_dir",
    "batch_max_bytes",
    "batch_concurrency",
    "batch_ttl_s",
)
"""Flags of a server that other clients use; the batch's own server does not have them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", type=Path, metavar="IN", help="file of requests, one JSON object per line")
    parser.add_argument(
        "output",
        type=Path,
        metavar="OUT",
        help="file of answers, one per request; existing answers are kept and not requested again",
    )
    parser.add_argument(
        "--url",
        help="running server, or several routers separated by commas (default: start a server for the batch)",
    )
    parser.add_argument("--api-key", metavar="KEY", help="API key of the server at --url")
    add_api_key_file(parser)
    parser.add_argument(
        "--concurrency", type=int, default=64, metavar="N", help="number of requests at the same time [%(default)s]"
    )
    parser.add_argument(
        "--retries",
        type=int,
        default=8,
        metavar="N",
        help="retries of a request after errors that may be temporary [%(default)s]",
    )
    parser.add_argument(
        "--timeout", type=float, default=3600.0, metavar="SECONDS", help="time limit of a request [%(default)s]"
    )
    parser.add_argument("--retry-failed", action="store_true", help="repeat requests that failed in an earlier run")
    serve_flags = tuple(name for group in flag_groups.SERVE.values() for name in group)
    title = "options of the server that is started, as those of `onward serve`"
    add_grouped_flags(parser, ServeConfig, {title: serve_flags}, skip=FLAGS_OF_SHARED_SERVERS, one_value_each=True)


def run(args: argparse.Namespace) -> int:
    """Returns 1 if any request failed, so that scripts notice."""
    _check_numbers(args)
    custom_ids = check_input(args.input)
    with BatchOutputFile(args.output, drop_failed=args.retry_failed) as output:
        remaining = {custom_id for custom_id in custom_ids if custom_id not in output.answered}
        console = Console(stderr=True, highlight=False)
        if len(remaining) < len(custom_ids):
            console.print(f"{len(custom_ids) - len(remaining)} of {len(custom_ids)} are answered already")
        if remaining:
            with _server(args) as server, _bar(console, len(custom_ids), len(custom_ids) - len(remaining)) as advance:
                try:
                    _answer(server, args, remaining, output, advance)
                finally:
                    output.sync()
        console.print(f"{len(custom_ids)} answered, {output.num_failed} of them by an error: {args.output}")
        return 1 if output.num_failed else 0


def _answer(
    server: BatchTarget,
    args: argparse.Namespace,
    remaining: set[str],
    output: BatchOutputFile,
    advance: Callable[[], None],
) -> None:
    async def on_result(result: BatchResult) -> None:
        output.add(result)
        advance()

    requests = (request for request in read_requests(args.input) if request.custom_id in remaining)
    asyncio.run(_send_all(server, requests, min(args.concurrency, len(remaining)), on_result, Retries(args.retries)))


async def _send_all(
    server: BatchTarget,
    requests: Iterable[BatchRequest],
    concurrency: int,
    on_result: Callable[[BatchResult], Awaitable[None]],
    retries: Retries,
) -> None:
    async with http_sender(server, concurrency) as send:
        await run_batch(send, requests, concurrency, on_result, retries)


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[BatchTarget]:
    if args.url is not None:
        yield BatchTarget(args.url, api_key_from_args(args), args.timeout)
        return
    names = tuple(field.name for field in fields(ServeConfig) if field.name not in FLAGS_OF_SHARED_SERVERS)
    flags = format_flags(args, names)
    with temporary_server([*flags, *([] if args.log_level else ["--log-level", "warning"])]) as server:
        yield BatchTarget((server.url,), server.api_key, args.timeout)


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
        args.url = tuple(checked_url(url.strip(), "--url") for url in args.url.split(","))
    if args.input.resolve() == args.output.resolve():
        raise InvalidRequest("IN and OUT must be two files", param="output")
    if args.url is None and (args.api_key or args.api_key_file):
        print(
            "onward run-batch: --api-key is for --url; the server that is started has a key of its own", file=sys.stderr
        )
