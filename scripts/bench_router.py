"""`make bench-router`: what the router costs, beside nginx, and what choosing by cached prefixes gains.

Costs are processor time of the router's process, all its threads. It stands between a load and a stand-in for instances
that computes nothing, as nginx does in alternation as a plain reverse proxy. Then chats of many turns over two mixed
instances of the default model, through a router with `prefix` and one with `round_robin`, in alternation.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import msgspec
import uvloop
from bench_sides import OnwardServer, OthersLoad
from rich.console import Console
from rich.table import Table
from router_sides import Listening, Nginx, Router, StandIn, nginx_binary, nginx_version

from onward import config
from onward.bench import chats, environment, prompts, stream_load
from onward.bench.chats import Chats, Figures
from onward.bench.load import Target
from onward.bench.router_cost import (
    MAX_MS_PER_REQUEST,
    MAX_US_PER_EVENT,
    Cost,
    Sample,
    Setting,
    median_cost,
    separate,
    settings,
)
from onward.bench.stream_load import Shape
from onward.bench.tokenizing_cost import TokenizingCost, tokenizing_cost
from onward.errors import OnwardError
from onward.models import store

ROOT = Path(__file__).resolve().parent.parent
POLICIES = ("prefix", "round_robin")
NUM_INSTANCES = 2
PROMPT_WORDS = (100, 1000)
S = TypeVar("S", bound=Listening)


class Measured(msgspec.Struct, frozen=True):
    side: str
    setting: str
    short: Sample
    long: Sample
    cost: Cost
    other_programs_cores: float


def _sample(side: Listening, shape: Shape) -> Sample:
    began_s = side.cpu_s()
    num_reads = uvloop.run(stream_load.run(side.port, shape))
    return Sample(shape.events_each, shape.num_requests, num_reads, side.cpu_s() - began_s)


def _measure(name: str, side: Listening, stand_in: StandIn, setting: Setting) -> Measured:
    others = OthersLoad([side, stand_in])
    short, long = _sample(side, setting.short), _sample(side, setting.long)
    return Measured(name, setting.name, short, long, separate(short, long), others.cores())


def costs(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    binary = None if args.skip_nginx else nginx_binary(config.cache_dir() / "nginx")
    with ExitStack() as stack:
        stand_in = _started(stack, StandIn(args.out))
        sides: dict[str, Listening] = {}
        for policy in ("least_loaded", "prefix"):
            router = sides[policy] = _started(stack, Router(policy, args.out, stand_in.url))
            router.wait_for_instances(1)
        if binary is None:
            console.print("nginx: left out" if args.skip_nginx else "nginx: cannot be had here; costs are without it")
        else:
            sides["nginx"] = _started(stack, Nginx(binary, stand_in.port, args.out))
        for side in sides.values():
            uvloop.run(stream_load.run(side.port, Shape(4, 8, 16, 0.0)))
        measured = [
            _measure(name, side, stand_in, setting)
            for _ in range(args.rounds)
            for setting in settings(args.scale)
            for name, side in sides.items()
        ]
    console.print(_cost_table(measured))
    return {
        "nginx": binary and nginx_version(binary),
        "bars": {"us_per_event": MAX_US_PER_EVENT, "ms_per_request": MAX_MS_PER_REQUEST},
        "rounds": measured,
        "median": [
            {"side": side, "setting": setting, **msgspec.structs.asdict(cost)}
            for (side, setting), cost in _medians(measured).items()
        ],
    }


def _started(stack: ExitStack, side: S) -> S:
    stack.callback(side.stop)
    return side


def _medians(measured: list[Measured]) -> dict[tuple[str, str], Cost]:
    found: dict[tuple[str, str], list[Cost]] = {}
    for one in measured:
        found.setdefault((one.side, one.setting), []).append(one.cost)
    return {key: median_cost(costs) for key, costs in found.items()}


def _cost_table(measured: list[Measured]) -> Table:
    table = Table(
        title=f"Processor time, medians; at most {MAX_US_PER_EVENT:g} µs per event and {MAX_MS_PER_REQUEST:g} ms per "
        "request for least_loaded. Apart: each event travels alone. Others: cores busy with other programs",
        title_justify="left",
    )
    for name in ("load", "side", "µs/event", "ms/request", "per read", "others"):
        table.add_column(name, justify="left" if name in ("load", "side") else "right")
    for (side, setting), cost in _medians(measured).items():
        same = [one for one in measured if (one.side, one.setting) == (side, setting)]
        table.add_row(
            setting, side, f"{cost.us_per_event:.1f}", f"{cost.ms_per_request:.2f}",
            f"{median(one.long.events_per_read for one in same):.1f}",
            f"{median(one.other_programs_cores for one in same):.2f}",
            style="yellow" if side == "least_loaded" and not cost.is_within_bars else None,
        )  # fmt: skip
    return table


def tokenizing(console: Console) -> list[TokenizingCost]:
    """What `prefix` does for each request beside: the prompt's tokens, and the names of its blocks."""
    model = store.prepare(config.DEFAULT_MODEL, progress=lambda message, share: None)
    found = [tokenizing_cost(model, prompts.words(num_words, f"{num_words}")) for num_words in PROMPT_WORDS]
    table = Table(title="Tokenizing for prefix, processor time per request", title_justify="left")
    for name in ("prompt tokens", "template (ms)", "tokens (ms)", "block names (ms)"):
        table.add_column(name, justify="right")
    for one in found:
        times = (f"{ms:.3f}" for ms in (one.template_ms, one.tokens_ms, one.block_names_ms))
        table.add_row(str(one.num_tokens), *times)
    console.print(table)
    return found


def prefix_gain(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    asked = Chats(args.chats, args.chats_at_once, args.turns, args.first_words, args.turn_words, args.answer_tokens,
                  args.pause)  # fmt: skip
    with ExitStack() as stack:
        routers = {policy: _started(stack, Router(policy, args.out)) for policy in POLICIES}
        flags = ["--router", ",".join(router.url for router in routers.values()), "--threads", str(args.threads),
                 "--num-kv-blocks", str(args.num_kv_blocks), *args.serve_argument]  # fmt: skip
        for number in range(NUM_INSTANCES):
            server = OnwardServer(flags, args.out / f"onward-mixed-{number}.log")
            stack.callback(server.stop)
        for router in routers.values():
            router.wait_for_instances(NUM_INSTANCES)
        console.print(f"{NUM_INSTANCES} mixed instances, each: onward serve {' '.join(flags)}")
        found: dict[str, list[Figures]] = {policy: [] for policy in POLICIES}
        for pair in range(args.pairs):
            for policy in POLICIES if pair % 2 == 0 else reversed(POLICIES):
                # Every round has chats of its own, so that none finds what another has left.
                target = Target(routers[policy].url, config.DEFAULT_MODEL)
                turns = asyncio.run(chats.converse(target, asked, f"{args.seed} {pair} {policy}"))
                found[policy].append(chats.figures(turns))
                console.print(f"pair {pair + 1}, {policy}: {_line(found[policy][-1])}")
    console.print(_chat_table(found))
    return {"chats": asdict(asked), "flags": flags, "pairs": found}


def _line(one: Figures) -> str:
    return (
        f"{one.hit_rate:.1%} of the prompts' tokens cached; first token p50 {one.ttft_p50_s * 1000:.0f} ms, "
        f"p90 {one.ttft_p90_s * 1000:.0f} ms"
    )


def _chat_table(found: dict[str, list[Figures]]) -> Table:
    table = Table(title="Turns of chats after the first, medians of the pairs", title_justify="left")
    for name in ("policy", "cached", "first token p50 (ms)", "p90 (ms)"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for policy, rounds in found.items():
        table.add_row(
            policy,
            f"{median(one.hit_rate for one in rounds):.1%}",
            f"{median(one.ttft_p50_s for one in rounds) * 1000:.0f}",
            f"{median(one.ttft_p90_s for one in rounds) * 1000:.0f}",
        )
    return table


def main() -> int:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as with Ctrl-C, the processes are stopped first
    args.out.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=True)
    document: dict[str, Any] = {"schema": 1, "environment": environment.facts(), "seed": args.seed}
    if not args.skip_costs:
        document["costs"] = costs(args, console)
        document["tokenizing"] = tokenizing(console)
    if not args.skip_chats:
        document["prefix"] = prefix_gain(args, console)
    file = args.out / f"bench-router-{time.strftime('%Y%m%d-%H%M%S')}.json"
    file.write_bytes(msgspec.json.format(msgspec.json.encode(document)))
    console.print(f"written to {file}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-router", description="What the router costs, and what it gains.")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of the costs [%(default)s]")
    parser.add_argument("--scale", type=int, default=1, metavar="N", help="longer loads for the costs [%(default)s]")
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="of chats [%(default)s]")
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
    parser.add_argument("--skip-nginx", action="store_true", help="costs without it")
    parser.add_argument("--seed", default=str(time.time_ns()), metavar="TEXT", help="chooses the chats")
    parser.add_argument("--out", type=Path, default=ROOT / "bench-results", metavar="FOLDER", help="[bench-results]")
    parser.add_argument("--serve-argument", action="append", default=[], metavar="FLAG", help="for every instance")
    args = parser.parse_args()
    counts = (args.rounds, args.scale, args.pairs, args.chats, args.chats_at_once, args.first_words, args.turn_words,
              args.answer_tokens, args.threads, args.num_kv_blocks)  # fmt: skip
    if min(counts) < 1 or args.turns < 2 or args.pause < 0:
        parser.error("counts must be at least 1, --turns at least 2, and --pause not negative")
    return args


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OnwardError as fault:
        sys.exit(f"make bench-router: {fault.message}")
