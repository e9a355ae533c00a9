"""`make bench-pd`: what running streams feel of long prompts, with prefill and decode on two instances and on one.

Both sides have the same cores: one prefill and one decode instance with half of the threads each, and a mixed one with
all. They are loaded once and sleep while the other is measured, in alternation; what counts is the median of the pairs'
ratios. Then the rate of every way that KV can take from one instance to the other, beside a plain copy in memory.
"""

import argparse
import asyncio
import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks import ROOT
from benchmarks.harness import benchmark_command
from benchmarks.harness.calibration import Calibration, calibrate
from benchmarks.harness.metrics_text import parse_metrics
from benchmarks.harness.processes import BackgroundLoad, ServerProcess, free_port
from benchmarks.pd import transfer_rate
from benchmarks.pd.pd_figures import (
    GapPercentiles,
    PdPair,
    PdRound,
    median_ratio,
    quantiles_ms,
    round_of,
    serve_flags,
    share_together,
    spread,
)
from benchmarks.pd.pd_load import PdLoad, observe
from benchmarks.pd.tail_plot import TailCurve, draw
from benchmarks.pd.transfer_rate import BACKENDS, TransferRate
from onward import config
from onward.bench import environment, load
from onward.bench.load import BenchTarget
from onward.models.loader import model_store
from onward.obs.tables import print_table
from onward.proto.model import ModelConfig

PLOT = ROOT / "docs" / "pd-isolation.svg"
SPLIT, MIXED = "1 prefill + 1 decode", "1 mixed"
IDLE_TIMEOUT_S = 30.0
POLL_S = 0.1
STREAM_WORDS, STREAM_TOKENS, PROMPT_OUTPUT_TOKENS = 12, 4000, 4
HANDED_OVER = ("onward_pd_handoffs_total", "onward_pd_prefill_fallbacks_total")

FIGURES: dict[str, Callable[[PdRound], float]] = {
    "between tokens, p50 (ms)": lambda r: spread(r.gaps_s).p50 * 1000,
    "between tokens, p90 (ms)": lambda r: spread(r.gaps_s).p90 * 1000,
    "between tokens, p99 (ms)": lambda r: spread(r.gaps_s).p99 * 1000,
    "between tokens, max (ms)": lambda r: spread(r.gaps_s).max * 1000,
    "all streams (tokens/s)": lambda r: r.stream_tokens_per_s,
    "first token of prompts, p50 (ms)": lambda r: spread(r.ttft_s).p50 * 1000,
    "first token of prompts, max (ms)": lambda r: spread(r.ttft_s).max * 1000,
    "no long prompts, p50 (ms)": lambda r: spread(r.quiet_gaps_s).p50 * 1000,
    "no long prompts, p99 (ms)": lambda r: spread(r.quiet_gaps_s).p99 * 1000,
}


@dataclass(frozen=True, slots=True)
class PdDeployment:
    name: str
    servers: list[ServerProcess]
    """The one that takes requests is the last."""
    flags: list[list[str]]

    @property
    def url(self) -> str:
        return self.servers[-1].url

    def cpu_s(self) -> float:
        return sum(server.cpu_s() for server in self.servers)

    def metrics(self, *names: str) -> dict[str, float]:
        """Returns metrics with these names of the server that takes requests, by name and labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10.0) as response:
            values = parse_metrics(response.read().decode())
        return {key: value for key, value in values.items() if key.partition("{")[0] in names}

    def wait_idle(self) -> None:
        """Until the streams that were cut off are gone."""
        deadline_s = time.monotonic() + IDLE_TIMEOUT_S
        while any(self.metrics("onward_requests").values()):
            if time.monotonic() > deadline_s:
                raise SystemExit(f"{self.name} still has requests {IDLE_TIMEOUT_S:.0f} s after its round")
            time.sleep(POLL_S)


class PairConditions(msgspec.Struct, frozen=True):
    """What must be known of a pair to believe its figures."""

    before: Calibration
    after: Calibration
    idle_cpu_s: dict[str, float]
    """Processor time of each side while the other was measured."""
    other_programs_cores: float
    handed_over: dict[str, float]
    """What the decode instance counted, handoffs by outcome and prompts that it computed itself."""


class PdBenchmark:
    def __init__(self, split: PdDeployment, mixed: PdDeployment, model: str, asked: PdLoad) -> None:
        self._split, self._mixed, self._model, self._asked = split, mixed, model, asked

    def pair(self, seed: str) -> tuple[PdPair, PairConditions]:
        before, others = calibrate(), BackgroundLoad([*self._split.servers, *self._mixed.servers])
        counted = self._split.metrics(*HANDED_OVER)
        split, idle_mixed_s = self._round(self._split, self._mixed, seed)
        mixed, idle_split_s = self._round(self._mixed, self._split, seed)
        cores = others.cores()
        handed_over = {key: n - counted.get(key, 0) for key, n in self._split.metrics(*HANDED_OVER).items()}
        idle = {SPLIT: idle_split_s, MIXED: idle_mixed_s}
        return PdPair(split, mixed), PairConditions(
            before, calibrate(), idle, cores, {k: n for k, n in handed_over.items() if n}
        )

    def _round(self, side: PdDeployment, idle_one: PdDeployment, seed: str) -> tuple[PdRound, float]:
        """And the processor time of the side that was not asked."""
        began_s = idle_one.cpu_s()
        observed = asyncio.run(observe(BenchTarget(side.url, self._model, "completions"), self._asked, seed))
        idle_s = idle_one.cpu_s() - began_s
        side.wait_idle()
        return round_of(side.name, observed), idle_s


@contextmanager
def both_sides(args: argparse.Namespace) -> Iterator[tuple[PdDeployment, PdDeployment]]:
    """Children inherit the cores of who starts them, so these are set while they start."""
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(all_cores)[: args.cores])
    port, half = free_port(), args.cores // 2
    # Equal pools: by default their sizes follow the memory that is free when each starts.
    common = ["--num-kv-blocks", str(args.num_kv_blocks), *args.serve_argument]
    with ExitStack() as stack:

        def start(*flags: list[str]) -> list[ServerProcess]:
            servers: list[ServerProcess] = []
            for one in flags:
                servers.append(ServerProcess(one, args.out / f"onward-{one[1]}.log"))
                stack.callback(servers[-1].stop)
            return servers

        two = [serve_flags("prefill", half, common, port), serve_flags("decode", half, common, port)]
        one = [serve_flags("mixed", args.cores, common)]
        sides = PdDeployment(SPLIT, start(*two), two), PdDeployment(MIXED, start(*one), one)
        os.sched_setaffinity(0, all_cores)
        yield sides


async def _prompt_words(side: PdDeployment, model: str, num_tokens: int, seed: str) -> int:
    target = BenchTarget(side.url, model, "completions")
    async with load.new_session(target) as session:
        return await load.calibrate_prompt_words(session, target, num_tokens, seed)


def isolation(args: argparse.Namespace, console: Console, model: str) -> dict[str, Any]:
    with both_sides(args) as (split, mixed):
        for side in (split, mixed):
            console.print(f"{side.name}: " + "; ".join(" ".join(flags) for flags in side.flags))
        num_words = asyncio.run(_prompt_words(mixed, model, args.prompt_tokens, args.seed))
        asked = PdLoad(args.streams, STREAM_TOKENS, STREAM_WORDS, num_words, PROMPT_OUTPUT_TOKENS,
                     args.interval, args.quiet_seconds, args.seconds)  # fmt: skip
        console.print(f"{args.streams} streams; a prompt of {args.prompt_tokens} tokens every {args.interval:g} s, for "
                      f"{args.seconds:g} s after {args.quiet_seconds:g} s without; {args.cores} cores")  # fmt: skip
        bench = PdBenchmark(split, mixed, model, asked)
        bench.pair(f"{args.seed} warm-up")
        pairs, notes = [], []
        for number in range(args.pairs):
            pair, noted = bench.pair(f"{args.seed} {number}")
            pairs.append(pair)
            notes.append(noted)
            _show_pair(console, number, pair, noted)
    print_table(console, _isolation_table(pairs))
    if args.plot:
        PLOT.write_text(_plot(pairs))
        console.print(f"drawn to {PLOT}")
    return {
        "flags": {side.name: side.flags for side in (split, mixed)},
        "load": asdict(asked),
        "pairs": [{"split": _figures(p.split), "mixed": _figures(p.mixed), "noted": n}
                  for p, n in zip(pairs, notes, strict=True)],
        "median_ratio": {name: median_ratio(pairs, figure) for name, figure in FIGURES.items()},
        "quantiles_ms": {f"{side}, {kind}": quantiles_ms(gaps) for side, kind, gaps in _all_gaps(pairs)},
    }  # fmt: skip


def _figures(measured: PdRound) -> dict[str, Any]:
    return {
        "between_tokens_s": spread(measured.gaps_s),
        "between_tokens_quiet_s": spread(measured.quiet_gaps_s),
        "ttft_s": measured.ttft_s,
        "share_read_together": share_together(measured.gaps_s),
        "share_read_together_quiet": share_together(measured.quiet_gaps_s),
        "stream_tokens_per_s": measured.stream_tokens_per_s,
        "prompt_tokens": measured.prompt_tokens,
        "cached_tokens": measured.cached_tokens,
    }


def _all_gaps(pairs: list[PdPair]) -> list[tuple[str, str, list[float]]]:
    """Returns the gaps of all rounds of a side together."""
    split, mixed = [pair.split for pair in pairs], [pair.mixed for pair in pairs]
    return [
        *((rounds[0].side, "long prompts coming", [s for r in rounds for s in r.gaps_s]) for rounds in (split, mixed)),
        *(
            (rounds[0].side, "no long prompts", [s for r in rounds for s in r.quiet_gaps_s])
            for rounds in (split, mixed)
        ),
    ]


def _plot(pairs: list[PdPair]) -> str:
    colors = {SPLIT: "#0f766e", MIXED: "#b45309"}
    curves = [
        TailCurve(f"{side}, {kind}", [s * 1000 for s in gaps], colors[side], is_dashed=kind == "no long prompts")
        for side, kind, gaps in _all_gaps(pairs)
    ]
    return draw("How long running streams wait for their next token", curves)


def _show_pair(console: Console, number: int, pair: PdPair, noted: PairConditions) -> None:
    console.print(f"  {noted.before.line()}")
    for measured in (pair.split, pair.mixed):
        console.print(
            f"pair {number + 1}, {measured.side:20}: between tokens {_ms(spread(measured.gaps_s))}, "
            f"without long prompts {_ms(spread(measured.quiet_gaps_s))}; {measured.stream_tokens_per_s:.0f} tok/s, "
            f"{share_together(measured.gaps_s):.0%} of them read together with the one before; "
            f"first tokens of long prompts {' '.join(f'{s:.2f}' for s in measured.ttft_s)} s "
            f"({measured.cached_tokens} of {measured.prompt_tokens} tokens cached)"
        )
    idle = ", ".join(f"{seconds:.2f} s ({side})" for side, seconds in noted.idle_cpu_s.items())
    console.print(f"  CPU of the idle side {idle}; other programs {noted.other_programs_cores:.2f} cores; "
                  f"decode instance: {noted.handed_over}")  # fmt: skip


def _ms(values: GapPercentiles) -> str:
    return f"{values.p50 * 1000:.1f} / {values.p90 * 1000:.1f} / {values.p99 * 1000:.1f} / {values.max * 1000:.1f} ms"


def _isolation_table(pairs: list[PdPair]) -> Table:
    table = Table(title=f"Medians of {len(pairs)} pairs", title_justify="left")
    for name in ("", SPLIT, MIXED, "ratio"):
        table.add_column(name, justify="right" if name else "left")
    for name, figure in FIGURES.items():
        split, mixed = median(figure(pair.split) for pair in pairs), median(figure(pair.mixed) for pair in pairs)
        table.add_row(name, f"{split:.1f}", f"{mixed:.1f}", f"{median_ratio(pairs, figure):.2f}")
    return table


def transfers(args: argparse.Namespace, console: Console, shape: ModelConfig) -> dict[str, Any]:
    rates: list[TransferRate] = []
    for backend in args.backends:
        rates += transfer_rate.measure(backend, shape, args.transfer_bytes, args.repetitions)
    print_table(console, _transfer_table(rates, args.transfer_bytes))
    return {"num_bytes": args.transfer_bytes, "repetitions": args.repetitions, "rates": rates}


def _transfer_table(rates: list[TransferRate], num_bytes: int) -> Table:
    table = Table(title=f"KV transfers of {num_bytes / 1e6:.0f} MB between two processes", title_justify="left")
    for name in ("backend", "blocks", "checksums", "MB/s", "plain copy, MB/s", "ratio"):
        table.add_column(name, justify="right" if "/s" in name or name == "ratio" else "left")
    for rate in rates:
        checksums = "with" if rate.checksums else "without"
        figures = f"{rate.mb_per_s:.0f}", f"{rate.copy_mb_per_s:.0f}", f"{rate.ratio:.3f}"
        table.add_row(rate.backend, rate.order, checksums, *figures)
    return table


def main() -> int:
    args = _arguments()
    benchmark_command.begin(args.out)
    console = benchmark_command.console()
    model = model_store.prepare(config.DEFAULT_MODEL, progress=lambda message, share: None)
    document: dict[str, Any] = {"schema": 1, "environment": environment.describe_machine(), "seed": args.seed}
    if not args.skip_isolation:
        document["isolation"] = isolation(args, console, model.name)
    if not args.skip_transfers:
        document["transfers"] = transfers(args, console, model.config)
    file = benchmark_command.write("bench-pd", document, args.out)
    console.print(f"written to {file}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-pd", description="Prefill and decode apart, beside together.")
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="[%(default)s]")
    parser.add_argument("--streams", type=int, default=6, metavar="N", help="that decode all the time [%(default)s]")
    parser.add_argument("--prompt-tokens", type=int, default=1500, metavar="N", help="about [%(default)s]")
    parser.add_argument("--interval", type=float, default=4.0, metavar="S", help="between long prompts [%(default)s]")
    parser.add_argument("--seconds", type=float, default=12.0, metavar="S", help="with long prompts [%(default)s]")
    parser.add_argument("--quiet-seconds", type=float, default=3.0, metavar="S", help="before them [%(default)s]")
    parser.add_argument("--cores", type=int, default=2, metavar="N", help="for either side [%(default)s]")
    parser.add_argument("--num-kv-blocks", type=int, default=3000, metavar="N", help="of each instance [%(default)s]")
    parser.add_argument(
        "--backends", nargs="+", choices=BACKENDS, default=BACKENDS, help="to measure transfers of [all]"
    )
    parser.add_argument("--transfer-bytes", type=int, default=64_000_000, metavar="N", help="about [%(default)s]")
    parser.add_argument("--repetitions", type=int, default=7, metavar="N", help="of each transfer [%(default)s]")
    parser.add_argument("--skip-isolation", action="store_true", help="only transfers")
    parser.add_argument("--skip-transfers", action="store_true", help="only streams and long prompts")
    parser.add_argument("--plot", action="store_true", help=f"draw the waits to {PLOT.relative_to(ROOT)}")
    parser.add_argument("--seed", default=str(time.time_ns()), metavar="TEXT", help="chooses the prompts")
    benchmark_command.add_out(parser)
    parser.add_argument("--serve-argument", action="append", default=[], metavar="FLAG", help="for every instance")
    args = parser.parse_args()
    counts = (args.pairs, args.streams, args.prompt_tokens, args.num_kv_blocks, args.transfer_bytes, args.repetitions)
    if min(counts) < 1:
        parser.error("counts must be at least 1")
    usable = len(os.sched_getaffinity(0))
    if args.cores < 2 or args.cores % 2 or args.cores > usable:
        parser.error(f"--cores must be an even number, 2 or more, and not above the {usable} that can be used")
    if min(args.interval, args.quiet_seconds) <= 0 or args.seconds < args.interval:
        parser.error("--interval and --quiet-seconds must be positive, and --seconds not below --interval")
    return args


if __name__ == "__main__":
    benchmark_command.run("bench-pd", main)
