"""`make bench-spec`: a server that drafts beside one that does not, over HTTP, in alternation.

Both have the same model and sleep while the other is measured. They get the same prompts, which no cache has:
text to copy (lists to repeat, code to echo with a name changed), greedily, and free text, sampled. A machine's speed moves
from minute to minute, so what counts is the median of the pairs' ratios, beside a calibration line.
"""

import argparse
import asyncio
import statistics
import time

import msgspec

from benchmarks.harness import benchmark_command
from benchmarks.harness.calibration import Calibration, calibrate
from benchmarks.harness.processes import BackgroundLoad, ServerProcess
from benchmarks.speculation.speculation_prompts import copying_prompt, free_prompt
from onward import config
from onward.bench import environment, load
from onward.bench.load import BenchRequest, BenchTarget
from onward.bench.report import summarize
from onward.models.loader import model_store

TEXTS = {"copying": (copying_prompt, 0.0), "free": (free_prompt, 0.8)}
COPYING_GOAL, BAR = 1.5, 0.95
REQUESTS = {1: 3, 8: 2, 32: 1}
"""Requests of each stream, one after the other: a single short answer is too short to be measured."""


class SpeculationPair(msgspec.Struct, frozen=True):
    text: str
    streams: int
    plain_tokens_per_s: float
    drafting_tokens_per_s: float
    ratio: float
    drafted: float
    accepted: float
    other_programs_cores: float
    before: Calibration


class SpeculationBenchmark:
    def __init__(self, plain: ServerProcess, drafting: ServerProcess, model: str, output_tokens: int) -> None:
        self._plain, self._drafting, self._output_tokens = plain, drafting, output_tokens
        self._targets = {server: BenchTarget(server.url, model, "completions") for server in (plain, drafting)}

    def pair(self, text: str, streams: int, seed: str, *, drafting_first: bool) -> SpeculationPair:
        before, others = calibrate(), BackgroundLoad([self._plain, self._drafting])
        drafted, accepted = self._drafts()
        order = [self._drafting, self._plain] if drafting_first else [self._plain, self._drafting]
        speeds = {server: self._speed(server, text, streams, seed) for server in order}
        drafted_now, accepted_now = self._drafts()
        return SpeculationPair(
            text,
            streams,
            speeds[self._plain],
            speeds[self._drafting],
            speeds[self._drafting] / speeds[self._plain],
            drafted_now - drafted,
            accepted_now - accepted,
            others.cores(),
            before,
        )

    def _speed(self, server: ServerProcess, text: str, streams: int, seed: str) -> float:
        prompt, temperature = TEXTS[text]
        count = streams * REQUESTS.get(streams, 1)
        jobs = [BenchRequest(prompt(f"{seed} {text} {n}"), self._output_tokens, temperature) for n in range(count)]
        summary = summarize(asyncio.run(self._ask(self._targets[server], jobs, streams)))
        if summary.num_failed or summary.output_tokens != count * self._output_tokens:
            raise SystemExit(f"{summary.output_tokens} tokens were written; failed: {summary.errors}")
        return summary.output_tokens_per_s

    async def _ask(self, target: BenchTarget, jobs: list[BenchRequest], streams: int) -> list[load.RequestTiming]:
        async with load.new_session(target) as session:
            return await load.run(session, target, jobs, streams)

    def _drafts(self) -> tuple[float, float]:
        return asyncio.run(self._read_drafts())

    async def _read_drafts(self) -> tuple[float, float]:
        target = self._targets[self._drafting]
        async with load.new_session(target) as session, session.get(f"{target.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        sums = [
            sum(
                float(line.rpartition(" ")[2])
                for line in lines
                if line.startswith(f"onward_spec_{kind}_tokens_total{{")
            )
            for kind in ("drafted", "accepted")
        ]
        return sums[0], sums[1]


def main() -> int:
    args = _arguments()
    benchmark_command.begin(args.out)
    model = model_store.prepare(config.DEFAULT_MODEL)
    plain = ServerProcess(args.serve_argument, args.out / "plain.log")
    try:
        drafting = ServerProcess([*args.serve_argument, "--speculative", args.speculative], args.out / "drafting.log")
        try:
            pairs = _measure(SpeculationBenchmark(plain, drafting, model.name, args.output_tokens), args)
        finally:
            drafting.stop()
    finally:
        plain.stop()
    table = _table(pairs)
    print(table)
    document = {
        "schema": 1,
        "environment": environment.describe_machine(),
        "speculative": args.speculative,
        "pairs": pairs,
    }
    file = benchmark_command.write("bench-spec", document, args.out)
    file.with_suffix(".md").write_text(table, encoding="utf-8")
    print(f"written to {file} and {file.with_suffix('.md').name}")
    return 1 if args.check and not _is_met(pairs) else 0


def _measure(bench: SpeculationBenchmark, args: argparse.Namespace) -> list[SpeculationPair]:
    for streams in args.streams:
        bench.pair("free", streams, f"{args.seed} warm-up", drafting_first=False)
    pairs: list[SpeculationPair] = []
    for number in range(args.pairs):
        for streams in args.streams:
            for text in args.texts:
                pair = bench.pair(text, streams, f"{args.seed} {number}", drafting_first=number % 2 == 0)
                pairs.append(pair)
                print(f"  {pair.before.line()}")
                print(
                    f"pair {number + 1}, {text}, {streams:2} streams: plain {pair.plain_tokens_per_s:6.1f} tok/s, drafting "
                    f"{pair.drafting_tokens_per_s:6.1f} tok/s, ratio {pair.ratio:.2f}; accepted {pair.accepted:.0f} of "
                    f"{pair.drafted:.0f}; other programs {pair.other_programs_cores:.2f} cores",
                    flush=True,
                )
    return pairs


def _cells(pairs: list[SpeculationPair]) -> dict[tuple[str, int], list[SpeculationPair]]:
    cells: dict[tuple[str, int], list[SpeculationPair]] = {}
    for pair in pairs:
        cells.setdefault((pair.text, pair.streams), []).append(pair)
    return cells


def _median(pairs: list[SpeculationPair]) -> float:
    return statistics.median(pair.ratio for pair in pairs)


def _table(pairs: list[SpeculationPair]) -> str:
    lines = ["| text | streams | plain, tokens/s | drafting, tokens/s | ratio (median of the pairs) | accepted |"]
    lines.append("|---|---|---|---|---|---|")
    for (text, streams), cell in sorted(_cells(pairs).items()):
        plain, drafting = (
            statistics.median(getattr(p, f"{k}_tokens_per_s") for p in cell) for k in ("plain", "drafting")
        )
        drafted = sum(pair.drafted for pair in cell)
        accepted = (
            f"{sum(pair.accepted for pair in cell) / drafted:.0%} of {drafted:.0f}" if drafted else "none drafted"
        )
        lines.append(f"| {text} | {streams} | {plain:.0f} | {drafting:.0f} | {_median(cell):.2f} | {accepted} |")
    return "\n".join(lines)


def _is_met(pairs: list[SpeculationPair]) -> bool:
    medians = {key: _median(cell) for key, cell in _cells(pairs).items()}
    return min(medians.values()) >= BAR and medians.get(("copying", 1), COPYING_GOAL) >= COPYING_GOAL


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make bench-spec", description="Drafting beside plain decoding, in alternation."
    )
    parser.add_argument("--speculative", default="ngram:4", metavar="VALUE", help="[%(default)s]")
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="of each cell [%(default)s]")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="[1 8 32]")
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), choices=list(TEXTS), help="[copying free]")
    parser.add_argument("--output-tokens", type=int, default=128, metavar="N", help="[%(default)s]")
    parser.add_argument("--seed", default=str(time.time_ns()), metavar="TEXT", help="chooses the prompts")
    parser.add_argument("--check", action="store_true", help="fail if a cell is below what is promised")
    benchmark_command.add_out(parser)
    parser.add_argument("--serve-argument", action="append", default=[], metavar="FLAG", help="for `onward serve`")
    return parser.parse_args()


if __name__ == "__main__":
    benchmark_command.run("bench-spec", main)
