"""`make bench-tp`: a worker of several ranks with one thread each beside a worker of one rank with as many threads.

Both servers have the same model and sleep while the other is measured. They get the same prompts, which no server has
seen before. A machine's speed moves from minute to minute, so what counts is the median of the pairs' ratios.
"""

import argparse
import asyncio
import statistics
import time

import msgspec

from benchmarks.harness import benchmark_command
from benchmarks.harness.calibration import Calibration, calibrate
from benchmarks.harness.processes import BackgroundLoad, ServerProcess
from benchmarks.speculation.speculation_prompts import free_prompt
from onward import config
from onward.bench import environment, load
from onward.bench.load import BenchRequest, BenchTarget
from onward.bench.report import summarize
from onward.models.loader import model_store

BAR = 0.8
TEMPERATURE = 0.8


class RankPair(msgspec.Struct, frozen=True):
    streams: int
    threads_tokens_per_s: float
    ranks_tokens_per_s: float
    ratio: float
    other_programs_cores: float
    before: Calibration


class RankBenchmark:
    def __init__(self, threads: ServerProcess, ranks: ServerProcess, model: str, output_tokens: int) -> None:
        self._threads, self._ranks, self._output_tokens = threads, ranks, output_tokens
        self._targets = {server: BenchTarget(server.url, model, "completions") for server in (threads, ranks)}

    def pair(self, streams: int, seed: str, *, ranks_first: bool) -> RankPair:
        before, others = calibrate(), BackgroundLoad([self._threads, self._ranks])
        order = [self._ranks, self._threads] if ranks_first else [self._threads, self._ranks]
        speeds = {server: self._speed(server, streams, seed) for server in order}
        ratio = speeds[self._ranks] / speeds[self._threads]
        return RankPair(streams, speeds[self._threads], speeds[self._ranks], ratio, others.cores(), before)

    def _speed(self, server: ServerProcess, streams: int, seed: str) -> float:
        requests = [
            BenchRequest(free_prompt(f"{seed} {number}"), self._output_tokens, TEMPERATURE) for number in range(streams)
        ]
        summary = summarize(asyncio.run(self._run_requests(self._targets[server], requests, streams)))
        if summary.num_failed or summary.output_tokens != streams * self._output_tokens:
            raise SystemExit(f"{summary.output_tokens} tokens were written; failed: {summary.errors}")
        return summary.output_tokens_per_s

    async def _run_requests(
        self, target: BenchTarget, requests: list[BenchRequest], streams: int
    ) -> list[load.RequestTiming]:
        async with load.new_session(target) as session:
            return await load.run(session, target, requests, streams)


def main() -> int:
    args = _arguments()
    benchmark_command.begin(args.out)
    model = model_store.prepare(config.DEFAULT_MODEL)
    common = ["--standby-worker", "off", *args.serve_argument]
    threads = ServerProcess(["--threads", str(args.ranks), *common], args.out / "threads.log")
    try:
        flags = ["--threads", "1", "--tensor-parallel", str(args.ranks), *common]
        ranks = ServerProcess(flags, args.out / "ranks.log")
        try:
            pairs = _measure(RankBenchmark(threads, ranks, model.name, args.output_tokens), args)
        finally:
            ranks.stop()
    finally:
        threads.stop()
    table = _table(pairs)
    print(table)
    document = {"schema": 1, "environment": environment.describe_machine(), "ranks": args.ranks, "pairs": pairs}
    file = benchmark_command.write("bench-tp", document, args.out)
    file.with_suffix(".md").write_text(table, encoding="utf-8")
    print(f"written to {file} and {file.with_suffix('.md').name}")
    return 1 if args.check and min(map(_median, _cells(pairs).values())) < BAR else 0


def _measure(bench: RankBenchmark, args: argparse.Namespace) -> list[RankPair]:
    for streams in args.streams:
        bench.pair(streams, f"{args.seed} warm-up", ranks_first=False)
    pairs: list[RankPair] = []
    for number in range(args.pairs):
        for streams in args.streams:
            pair = bench.pair(streams, f"{args.seed} {number}", ranks_first=number % 2 == 0)
            pairs.append(pair)
            print(f"  {pair.before.line()}")
            print(
                f"pair {number + 1}, {streams:2} streams: threads {pair.threads_tokens_per_s:6.1f} tok/s, ranks "
                f"{pair.ranks_tokens_per_s:6.1f} tok/s, ratio {pair.ratio:.2f}; other programs "
                f"{pair.other_programs_cores:.2f} cores",
                flush=True,
            )
    return pairs


def _cells(pairs: list[RankPair]) -> dict[int, list[RankPair]]:
    cells: dict[int, list[RankPair]] = {}
    for pair in pairs:
        cells.setdefault(pair.streams, []).append(pair)
    return cells


def _median(pairs: list[RankPair]) -> float:
    return statistics.median(pair.ratio for pair in pairs)


def _table(pairs: list[RankPair]) -> str:
    lines = ["| streams | one rank, tokens/s | several ranks, tokens/s | ratio (median of the pairs) | range |"]
    lines.append("|---|---|---|---|---|")
    for streams, cell in sorted(_cells(pairs).items()):
        threads = statistics.median(pair.threads_tokens_per_s for pair in cell)
        ranks = statistics.median(pair.ranks_tokens_per_s for pair in cell)
        ratios = [pair.ratio for pair in cell]
        lines.append(
            f"| {streams} | {threads:.0f} | {ranks:.0f} | {_median(cell):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |"
        )
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-tp", description="Ranks beside threads, in alternation.")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="[%(default)s]")
    parser.add_argument("--pairs", type=int, default=10, metavar="N", help="of each number of streams [%(default)s]")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16], metavar="N", help="[1 16]")
    parser.add_argument("--output-tokens", type=int, default=128, metavar="N", help="[%(default)s]")
    parser.add_argument("--seed", default=str(time.time_ns()), metavar="TEXT", help="chooses the prompts")
    parser.add_argument("--check", action="store_true", help="fail if a ratio is below what is promised")
    benchmark_command.add_out(parser)
    parser.add_argument("--serve-argument", action="append", default=[], metavar="FLAG", help="for `onward serve`")
    return parser.parse_args()


if __name__ == "__main__":
    benchmark_command.run("bench-tp", main)
