"""What tracing costs an api process: processor time per streamed token and per request, without a collector, at 1 % and at
100 % of the requests. With `--before FOLDER`, also the package of another checkout, such as the commit before tracing.

    python -m benchmarks.api.tracing_cost --rounds 7 --before ../onward-before

All sides run at the same time and are measured in turn, A B C A B C …, so that what else the machine does concerns all of
them. Ratios are those of a round, with the side `off` as 1; their median and range are shown. The engine is a stub.
"""

import argparse
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import ROOT
from benchmarks.api.api_load import ApiLoad
from benchmarks.api.api_processes import ApiUnderTest, StubEngineProcess, load
from benchmarks.api.load_arguments import SHORT_TOKENS, add_load_arguments, check_load_arguments
from benchmarks.harness import benchmark_command
from onward import config
from onward.bench import environment
from onward.models.loader import model_store
from onward.obs.tables import print_table
from onward.text.tokenizer import Tokenizer

TEXT = "The sea covers most of the earth, and what lives in it is older than anything on land. "
OFF = "off"


class SideSample(msgspec.Struct, frozen=True):
    us_per_token: float
    ms_per_request: float
    """All but its tokens."""


class TracingCostRow(msgspec.Struct, frozen=True):
    side: str
    us_per_token: float
    ms_per_request: float
    token_ratios: list[float]
    request_ratios: list[float]
    """Ratio of each round to the side `off`."""


class CollectorSink:
    """Takes what it is sent, and counts it."""

    def __init__(self) -> None:
        sink = self
        self.num_bytes = 0

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sink.num_bytes += len(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


def measure_side(args: argparse.Namespace, api: ApiUnderTest, token_ids: list[int]) -> SideSample:
    """Two loads that differ in the length of their streams only."""
    with StubEngineProcess(api, args.interval_ms, token_ids):
        short_s, short_tokens = _cost(api, args.connections, args.short_requests, SHORT_TOKENS)
        long_s, long_tokens = _cost(api, args.connections, 1, args.tokens)
    token_s = (long_s - short_s) / (long_tokens - short_tokens)
    return SideSample(1e6 * token_s, 1e3 * (short_s - short_tokens * token_s))


def _cost(api: ApiUnderTest, num_connections: int, requests_each: int, max_tokens: int) -> tuple[float, float]:
    """Processor time and tokens of one request."""
    before_s = api.cpu_s()
    asked = ApiLoad(api.port, api.model.name, num_connections, requests_each, max_tokens, True)
    taken = load(asked)
    return (api.cpu_s() - before_s) / asked.num_requests, taken.num_tokens / asked.num_requests


def rows_of(rounds: list[dict[str, SideSample]]) -> list[TracingCostRow]:
    return [
        TracingCostRow(
            side,
            median(one[side].us_per_token for one in rounds),
            median(one[side].ms_per_request for one in rounds),
            [one[side].us_per_token / one[OFF].us_per_token for one in rounds],
            [one[side].ms_per_request / one[OFF].ms_per_request for one in rounds],
        )
        for side in rounds[0]
    ]


def table_of(rows: list[TracingCostRow]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD)
    shown.add_column("tracing")
    for name in ("µs per token", "ratio to off", "ms per request", "ratio to off"):
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(
            row.side,
            f"{row.us_per_token:.2f}",
            _ratio(row.token_ratios),
            f"{row.ms_per_request:.3f}",
            _ratio(row.request_ratios),
        )
    return shown


def _ratio(ratios: list[float]) -> str:
    return f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def main() -> int:
    args = _arguments()
    benchmark_command.begin(args.out)
    console: Console = benchmark_command.console(output_is_json=args.json)
    model = model_store.prepare(config.DEFAULT_MODEL, progress=lambda message, share: None)
    assert model.tokenizer is not None, "the default model has one"
    token_ids = Tokenizer.from_file(Path(model.folder) / model.tokenizer).encode(TEXT)
    sink, rounds = CollectorSink(), list[dict[str, SideSample]]()
    with ExitStack() as stack:
        stack.enter_context(sink.running())
        sides: dict[str, tuple[config.ApiConfig, Path]] = {
            OFF: (config.ApiConfig(), ROOT),
            "1 %": (config.ApiConfig(otlp_endpoint=sink.url, trace_sample_ratio=0.01), ROOT),
            "100 %": (config.ApiConfig(otlp_endpoint=sink.url, trace_sample_ratio=1.0), ROOT),
        }
        if args.before is not None:
            sides["before"] = config.ApiConfig(), args.before.resolve()
        apis = dict[str, ApiUnderTest]()
        for side, (api_config, source) in sides.items():
            apis[side] = ApiUnderTest(model, args.out, config=api_config, source=source)
            stack.callback(apis[side].stop)
            with StubEngineProcess(apis[side], 0.0, token_ids):
                _cost(apis[side], args.connections, 1, SHORT_TOKENS)  # what is made on first use is made
        for number in range(args.rounds):
            rounds.append({side: measure_side(args, api, token_ids) for side, api in apis.items()})
            console.print(
                f"round {number + 1} of {args.rounds}: {_ratio([r.token_ratios[-1] for r in rows_of(rounds)])}"
            )
    rows = rows_of(rounds)
    print_table(console, table_of(rows))
    console.print(f"{sink.num_bytes} bytes of spans")
    document = {"schema": 1, "environment": environment.describe_machine(), "table": rows, "rounds": rounds}
    file = benchmark_command.write("bench-tracing", document, args.out)
    console.print(f"written to {file}")
    if args.json:
        print(file.read_text())
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What tracing costs an api process.")
    add_load_arguments(parser)
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="a checkout of another version, to compare with")
    benchmark_command.add_json(parser)
    benchmark_command.add_out(parser)
    args = parser.parse_args()
    check_load_arguments(parser, args)
    return args


if __name__ == "__main__":
    benchmark_command.run("bench-tracing", main)
