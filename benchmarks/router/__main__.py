"""`make bench-router`: what the router costs, beside nginx, and what choosing by cached prefixes gains.

Costs are processor time of the router's process, all its threads. It stands between a load and a stand-in for instances
that computes nothing, as nginx does in alternation as a plain reverse proxy; what `prefix` spends on token ids is told
apart. Then chats of many turns over two mixed instances of the default model, through a router with `prefix` and one with
`round_robin`, in alternation. One table at the end; everything goes into a JSON file, with `--json` to the output too.
"""

import argparse
import asyncio
import os
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvloop
from rich.console import Console

from benchmarks.harness import benchmark_command, stream_load
from benchmarks.harness.processes import BackgroundLoad, ServerProcess
from benchmarks.harness.stream_load import StreamLoad
from benchmarks.router import chats, router_report
from benchmarks.router.chats import ChatFigures, ChatLoad
from benchmarks.router.router_cost import (
    MAX_MS_PER_REQUEST,
    MAX_US_PER_EVENT,
    RouterCostSample,
    RouterLoadSetting,
    RouterMeasurement,
    separate,
    settings,
)
from benchmarks.router.router_processes import (
    ListeningProcess,
    NginxProcess,
    RouterProcessUnderTest,
    StubInstanceProcess,
    nginx_binary,
    nginx_version,
)
from benchmarks.router.router_report import RouterReportRow
from benchmarks.router.tokenizing_cost import tokenizing_cost
from onward import config
from onward.bench import environment, prompts
from onward.bench.load import BenchTarget
from onward.models.loader import model_store
from onward.obs.tables import print_table
from onward.proto.model import PreparedModel
from onward.text.prompt_tokenizer import read_tokenizer_files

COST_POLICIES = ("least_loaded", "prefix")
CHAT_POLICIES = ("prefix", "round_robin")
NUM_INSTANCES = 2
PROMPT_WORDS = (100, 1000)
WARM_UP = StreamLoad(4, 8, 16, 0.0)
FILE_WIDTH = 130
S = TypeVar("S", bound=ListeningProcess)


def _sample(side: ListeningProcess, shape: StreamLoad) -> RouterCostSample:
    began_s, tokenizing_began_s = side.cpu_s(), _tokenizing_s(side)
    num_reads = uvloop.run(stream_load.run(side.port, shape))
    tokenizing_s = _tokenizing_s(side) - tokenizing_began_s
    cpu_s = side.cpu_s() - began_s - tokenizing_s
    return RouterCostSample(shape.events_each, shape.num_requests, num_reads, cpu_s, tokenizing_s)


def _tokenizing_s(side: ListeningProcess) -> float:
    return side.tokenizing_s() if isinstance(side, RouterProcessUnderTest) else 0.0


def _measure(
    name: str, side: ListeningProcess, stand_in: StubInstanceProcess, setting: RouterLoadSetting, number: int
) -> RouterMeasurement:
    others = BackgroundLoad([side, stand_in])
    short, long = _sample(side, setting.short), _sample(side, setting.long)
    return RouterMeasurement(name, setting.name, number, short, long, separate(short, long), others.cores())


def costs(
    args: argparse.Namespace, model: PreparedModel, console: Console
) -> tuple[dict[str, Any], list[RouterReportRow]]:
    binary = None if args.skip_nginx else nginx_binary(args.nginx, config.cache_dir() / "nginx")
    text = args.out / "model-text.msgpack"
    text.write_bytes(msgspec.msgpack.encode(read_tokenizer_files(model)))
    with ExitStack() as stack:
        stand_in = _started(stack, StubInstanceProcess(args.out, text))
        routers = {
            policy: _started(stack, RouterProcessUnderTest(policy, args.out, stand_in.url)) for policy in COST_POLICIES
        }
        for router in routers.values():
            router.wait_for_instances(1)
        sides: dict[str, ListeningProcess] = {**routers}
        if binary is None:
            why = "left out" if args.skip_nginx else "not on PATH, not named by --nginx, and cannot be downloaded here"
            console.print(f"nginx: {why}; costs are without it")
        else:
            sides["nginx"] = _started(stack, NginxProcess(binary, stand_in.port, args.out))
        for side in sides.values():
            uvloop.run(stream_load.run(side.port, WARM_UP))
        num_before = routers["prefix"].num_untokenized()
        measured: list[RouterMeasurement] = []
        for number in range(args.rounds):
            for setting in settings(args.scale):
                for name, side in sides.items() if number % 2 == 0 else reversed(sides.items()):
                    measured.append(_measure(name, side, stand_in, setting, number))
            console.print(
                f"costs, round {number + 1} of {args.rounds}: {_others(measured, number):.2f} cores of others"
            )
        if routers["prefix"].num_untokenized() > num_before:
            raise SystemExit("the router with prefix did not tokenize every prompt, so its figures say nothing")
    document = {
        "nginx": binary and nginx_version(binary),
        "bars": {"us_per_event": MAX_US_PER_EVENT, "ms_per_request": MAX_MS_PER_REQUEST},
        "rounds": measured,
    }
    return document, router_report.cost_rows(measured)


def _others(measured: list[RouterMeasurement], number: int) -> float:
    """The most, in one round, that other programs took from what is measured."""
    return max(one.other_programs_cores for one in measured if one.round == number)


def _started(stack: ExitStack, side: S) -> S:
    stack.callback(side.stop)
    return side


def prefix_gain(args: argparse.Namespace, console: Console) -> tuple[dict[str, Any], list[RouterReportRow]]:
    asked = ChatLoad(args.chats, args.chats_at_once, args.turns, args.first_words, args.turn_words, args.answer_tokens,
                  args.pause)  # fmt: skip
    with ExitStack() as stack:
        routers = {policy: _started(stack, RouterProcessUnderTest(policy, args.out)) for policy in CHAT_POLICIES}
        flags = ["--router", ",".join(router.url for router in routers.values()), "--threads", str(args.threads),
                 "--num-kv-blocks", str(args.num_kv_blocks), *args.serve_argument]  # fmt: skip
        for number in range(NUM_INSTANCES):
            server = ServerProcess(flags, args.out / f"onward-mixed-{number}.log")
            stack.callback(server.stop)
        for router in routers.values():
            router.wait_for_instances(NUM_INSTANCES)
        console.print(f"{NUM_INSTANCES} mixed instances, each: onward serve {' '.join(flags)}")
        found: dict[str, list[ChatFigures]] = {policy: [] for policy in CHAT_POLICIES}
        for pair in range(args.pairs):
            for policy in CHAT_POLICIES if pair % 2 == 0 else reversed(CHAT_POLICIES):
                # Every round has chats of its own, so that none finds what another has left.
                target = BenchTarget(routers[policy].url, config.DEFAULT_MODEL)
                turns = asyncio.run(chats.run_chats(target, asked, f"{args.seed} {pair} {policy}"))
                found[policy].append(chats.figures(turns))
                console.print(f"chats, pair {pair + 1} of {args.pairs}, {policy}: {_line(found[policy][-1])}")
        num_untokenized = routers["prefix"].num_untokenized()
    document = {"chats": asdict(asked), "flags": flags, "pairs": found, "untokenized": num_untokenized}
    return document, router_report.chat_rows(found)


def _line(one: ChatFigures) -> str:
    return (
        f"{one.hit_rate:.1%} of the prompts' tokens cached; first token p50 {one.ttft_p50_s * 1000:.0f} ms, "
        f"p90 {one.ttft_p90_s * 1000:.0f} ms"
    )


def main() -> int:
    args = _arguments()
    benchmark_command.begin(args.out)
    console = benchmark_command.console(output_is_json=args.json)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    document: dict[str, Any] = {"schema": 2, "environment": environment.describe_machine(), "seed": args.seed}
    rows: list[RouterReportRow] = []
    if not args.skip_costs:
        model = model_store.prepare(config.DEFAULT_MODEL, progress=lambda message, share: None)
        document["costs"], cost_rows = costs(args, model, console)
        tokenizing = [
            tokenizing_cost(model, prompts.random_words(num_words, f"{num_words}")) for num_words in PROMPT_WORDS
        ]
        document["tokenizing"] = tokenizing
        rows += cost_rows + router_report.tokenizing_rows(tokenizing)
    if not args.skip_chats:
        document["prefix"], chat_rows = prefix_gain(args, console)
        rows += chat_rows
    document["table"] = rows
    console.print(
        "Medians. Costs are processor time. Ratios: least_loaded to nginx, prefix to round_robin, pair by pair"
    )
    print_table(console, router_report.table(rows))
    file = benchmark_command.write("bench-router", document, args.out)
    console.print(f"written to {file}")
    if args.json:
        print(file.read_text())
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-router", description="What the router costs, and what it gains.")
    parser.add_argument("--rounds", type=int, default=6, metavar="N", help="of the costs [%(default)s]")
    parser.add_argument("--scale", type=int, default=1, metavar="N", help="longer loads for the costs [%(default)s]")
    parser.add_argument("--pairs", type=int, default=6, metavar="N", help="of chats [%(default)s]")
    parser.add_argument("--chats", type=int, default=15, metavar="N", help="in each round [%(default)s]")
    parser.add_argument("--chats-at-once", type=int, default=5, metavar="N", help="[%(default)s]")
    parser.add_argument("--turns", type=int, default=6, metavar="N", help="of each chat [%(default)s]")
    parser.add_argument("--first-words", type=int, default=200, metavar="N", help="of the first turn [%(default)s]")
    parser.add_argument("--turn-words", type=int, default=60, metavar="N", help="of each other turn [%(default)s]")
    parser.add_argument("--answer-tokens", type=int, default=24, metavar="N", help="[%(default)s]")
    parser.add_argument("--pause", type=float, default=1.0, metavar="S", help="before the next turn [%(default)s]")
    half = max(1, len(os.sched_getaffinity(0)) // NUM_INSTANCES)
    parser.add_argument("--threads", type=int, default=half, metavar="N", help="of each instance [%(default)s]")
    parser.add_argument("--num-kv-blocks", type=int, default=3000, metavar="N", help="of each instance [%(default)s]")
    parser.add_argument("--skip-costs", action="store_true", help="only chats")
    parser.add_argument("--skip-chats", action="store_true", help="only costs")
    parser.add_argument("--nginx", type=Path, metavar="PATH", help="its binary [on PATH, else Debian's is downloaded]")
    parser.add_argument("--skip-nginx", action="store_true", help="costs without it")
    benchmark_command.add_json(parser)
    parser.add_argument("--seed", default=str(time.time_ns()), metavar="TEXT", help="chooses the chats")
    benchmark_command.add_out(parser)
    parser.add_argument("--serve-argument", action="append", default=[], metavar="FLAG", help="for every instance")
    args = parser.parse_args()
    counts = (args.rounds, args.scale, args.pairs, args.chats, args.chats_at_once, args.first_words, args.turn_words,
              args.answer_tokens, args.threads, args.num_kv_blocks)  # fmt: skip
    if min(counts) < 1 or args.turns < 2 or args.pause < 0:
        parser.error("counts must be at least 1, --turns at least 2, and --pause not negative")
    return args


if __name__ == "__main__":
    benchmark_command.run("bench-router", main)
