"""`make bench-api`: what an api process costs per streamed token and per request, and where that goes.

One real api process and its stream store, a stub engine that speaks the engine's protocol over the real wire, and clients
in a process of their own. Costs are processor time of the api process, all its threads. Then the same once more with a look
at where that goes, and what grammars cost (`make bench-grammar`).
"""

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.api import api_stages
from benchmarks.api.api_cost import ApiCostRow, ApiCostSample, StreamCost, streamed_rows, whole_rows
from benchmarks.api.api_load import ApiLoad
from benchmarks.api.api_processes import ApiUnderTest, StubEngineProcess, load
from benchmarks.api.api_stages import FunctionSamples
from benchmarks.api.load_arguments import SHORT_TOKENS, add_load_arguments, check_load_arguments
from benchmarks.grammar import grammar_cost
from benchmarks.harness import benchmark_command
from onward import config
from onward.bench import environment
from onward.models.loader import model_store
from onward.obs.tables import print_table
from onward.proto.model import PreparedModel
from onward.text.tokenizer import Tokenizer

TEXT = (
    "The sea covers most of the earth, and what lives in it is older than anything on land. Its tides follow the moon. "
)
WHOLE_TOKENS, WHOLE_CONNECTIONS, WHOLE_REQUESTS = 16, 16, 40
WHOLE_INTERVAL_MS = 5.0
NUM_DEAREST = 25
NUM_PROFILED = 4
"""So many times the load, to have samples enough."""


def _sample(
    api: ApiUnderTest, num_connections: int, requests_each: int, max_tokens: int, stream: bool
) -> ApiCostSample:
    before = api.thread_times()
    asked = ApiLoad(api.port, api.model.name, num_connections, requests_each, max_tokens, stream)
    taken = load(asked)
    return ApiCostSample(asked.num_requests, taken.num_tokens, taken.num_events, api.thread_times().since(before))


def _streamed(args: argparse.Namespace, api: ApiUnderTest, interval_ms: float) -> StreamCost:
    num_tokens = args.tokens
    short = _sample(api, args.connections, args.short_requests, SHORT_TOKENS, stream=True)
    return StreamCost(interval_ms, short, _sample(api, args.connections, 1, num_tokens, stream=True))


def _whole(api: ApiUnderTest) -> ApiCostSample:
    return _sample(api, WHOLE_CONNECTIONS, WHOLE_REQUESTS, WHOLE_TOKENS, stream=False)


def costs(args: argparse.Namespace, model: PreparedModel, token_ids: list[int], console: Console) -> list[ApiCostRow]:
    paced: list[StreamCost] = []
    flooded: list[StreamCost] = []
    whole: list[ApiCostSample] = []
    with ExitStack() as stack:
        api = ApiUnderTest(model, args.out)
        stack.callback(api.stop)
        with StubEngineProcess(api, 0.0, token_ids):
            _sample(api, args.connections, 1, SHORT_TOKENS, stream=True)  # what is made on first use is made
        for number in range(args.rounds):
            with StubEngineProcess(api, args.interval_ms, token_ids):
                paced.append(_streamed(args, api, args.interval_ms))
            with StubEngineProcess(api, 0.0, token_ids):
                flooded.append(_streamed(args, api, 0.0))
            with StubEngineProcess(api, WHOLE_INTERVAL_MS, token_ids):
                whole.append(_whole(api))
            console.print(
                f"round {number + 1} of {args.rounds}: {paced[-1].us_per_token:.1f} µs per token "
                f"({paced[-1].long.tokens_per_event:.2f} per event), {flooded[-1].us_per_token:.1f} µs at once, "
                f"{1e3 * whole[-1].s_per_request:.2f} ms per short request"
            )
    return [
        *streamed_rows(f"{args.connections} streams, a token each {args.interval_ms:g} ms", paced),
        *streamed_rows(f"{args.connections} streams, all at once", flooded),
        *whole_rows(f"{WHOLE_CONNECTIONS} clients, chats of {WHOLE_TOKENS} tokens, not streamed", whole),
    ]


def profiles(args: argparse.Namespace, model: PreparedModel, token_ids: list[int]) -> dict[str, list[FunctionSamples]]:
    file = args.out / "bench-api-profile.json"
    found: dict[str, list[FunctionSamples]] = {}
    with ExitStack() as stack:
        api = ApiUnderTest(model, args.out, file)
        stack.callback(api.stop)
        with StubEngineProcess(api, 0.0, token_ids):
            _sample(api, args.connections, 1, SHORT_TOKENS, stream=True)
        with StubEngineProcess(api, args.interval_ms, token_ids):
            found["streams"] = _profiled(api, file, lambda: _sample(api, args.connections, 1, args.tokens, stream=True))
        with StubEngineProcess(api, WHOLE_INTERVAL_MS, token_ids):
            found["short requests"] = _profiled(api, file, lambda: _whole(api))
    return found


def _profiled(api: ApiUnderTest, file: Path, work: Callable[[], object]) -> list[FunctionSamples]:
    file.unlink(missing_ok=True)
    api.toggle_profile()
    for _ in range(NUM_PROFILED):
        work()
    api.toggle_profile()
    deadline_s = time.monotonic() + 30
    while not file.exists() or not file.stat().st_size:
        if time.monotonic() > deadline_s:
            raise SystemExit("the profile was not written")
        time.sleep(0.05)
    return msgspec.json.decode(file.read_bytes(), type=list[FunctionSamples])


def table(rows: list[ApiCostRow]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD)
    for name in ("median of", "load"):
        shown.add_column(name, no_wrap=True)
    for name in ("", "lowest", "highest", "at most"):
        shown.add_column(name, justify="right")
    for row in rows:
        numbers = [f"{one:.2f}" for one in (row.value, row.lowest, row.highest)]
        bar = "" if row.bar is None else f"{row.bar:g}"
        shown.add_row(row.figure, row.load, *numbers, bar, style="yellow" if row.is_over else None)
    return shown


def profile_table(load_name: str, samples: list[FunctionSamples]) -> Table:
    num_samples = sum(one.count for one in samples)
    shown = Table(box=box.SIMPLE_HEAD, title=f"{load_name}: where the time goes ({num_samples} samples)")
    shown.add_column("stage")
    shown.add_column("share", justify="right")
    for stage, share in api_stages.shares(samples).items():
        shown.add_row(stage, f"{share:.1%}")
    return shown


def main() -> int:
    args = _arguments()
    benchmark_command.begin(args.out)
    console = benchmark_command.console(output_is_json=args.json)
    model = model_store.prepare(config.DEFAULT_MODEL, progress=lambda message, share: None)
    assert model.tokenizer is not None, "the default model has one"
    tokenizer = Tokenizer.from_file(Path(model.folder) / model.tokenizer)
    token_ids = tokenizer.encode(TEXT)
    document: dict[str, Any] = {"schema": 1, "environment": environment.describe_machine()}
    if not args.skip_costs:
        rows = document["table"] = costs(args, model, token_ids, console)
        print_table(console, table(rows))
    if not args.skip_profile:
        found = profiles(args, model, token_ids)
        for name, samples in found.items():
            print_table(console, profile_table(name, samples))
        document["profiles"] = {
            name: {"shares": api_stages.shares(samples), "dearest": samples[:NUM_DEAREST]}
            for name, samples in found.items()
        }
    if not args.skip_grammars:
        document["grammars"] = grammars = grammar_cost.measure(tokenizer)
        console.print(f"masks of {grammars.num_schemas} schemas, µs: {grammars.mask_us}")
    file = benchmark_command.write("bench-api", document, args.out)
    console.print(f"written to {file}")
    if args.json:
        print(file.read_text())
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-api", description="What an api process costs, and where it goes.")
    add_load_arguments(parser)
    parser.add_argument("--skip-costs", action="store_true")
    parser.add_argument("--skip-profile", action="store_true")
    parser.add_argument("--skip-grammars", action="store_true", help="without what `make bench-grammar` measures")
    benchmark_command.add_json(parser)
    benchmark_command.add_out(parser)
    args = parser.parse_args()
    check_load_arguments(parser, args)
    return args


if __name__ == "__main__":
    benchmark_command.run("bench-api", main)
