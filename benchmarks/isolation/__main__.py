"""`make bench-isolation`: what others feel of a hostile tenant, a thousand hostile connections, and ten times the load.

First, small requests of one tenant without and with the attack of another, for each kind of attack
(`benchmarks.isolation.hostile_tenant`); what counts is their p99, and the memory of the api process. Then ordinary streams
of the default model without and with the hostile connections, in alternation; what counts is the median of the ratios.
Then the hostile ones are left alone until the server has ended every one of them. Then overload: the most that the server
does at any number of streams, new requests at ten times that rate, and a calm load before and after. Tables, as markdown
and with everything else as JSON; `--plot` draws the overload for the documentation.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from rich.console import Console

from benchmarks import ROOT
from benchmarks.harness import benchmark_command
from benchmarks.harness.metrics_text import parse_metrics
from benchmarks.harness.processes import BenchProcess, ServerProcess
from benchmarks.isolation import isolation_figures, tenant_figures
from benchmarks.isolation.hostile_tenant import KINDS, WELL_BEHAVED
from benchmarks.isolation.isolation_figures import LEAST_RATIO, MOST_GROWTH, HostilePair, MemorySample, OverloadFigures
from benchmarks.isolation.lean_streams import MeasuredStream, StreamRequest, closed_load, open_load
from benchmarks.isolation.tenant_figures import TenantRound
from benchmarks.isolation.time_plot import PlotLine, PlotPanel, draw
from onward import config
from onward.bench import environment
from onward.bench.report import percentiles
from onward.proto.api_key_entry import ApiKeyEntry
from onward.web.auth.api_key_file import add_entry, new_key
from onward.web.auth.api_key_table import HASH_PREFIX, hash_key

PLOT = ROOT / "docs" / "overload.svg"
SETTLE_S = 3.0
WAIT_S = 150.0
POLL_S = 0.2
FENCES_S = 1.0
"""Slots of streams that were cut off are free when the steps under way are over."""
MAX_UNREAD_IN_FLIGHT = 40
ATTACKERS = {"resumes": "single", "stored": "single"}
"""The keys of attacks on the engine: what a key may have in flight is its due."""
PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 1e6


class HostileConnectionsProcess(BenchProcess):
    """`benchmarks.isolation.hostile_connections`, spoken to in lines."""

    def __init__(self, port: int, keys: list[str], count: int, seed: str) -> None:
        arguments = [str(port), config.DEFAULT_MODEL, str(count), seed, *keys]
        command = [sys.executable, "-m", "benchmarks.isolation.hostile_connections", *arguments]
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)

    def told(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


class HostileTenantProcess(BenchProcess):
    """`benchmarks.isolation.hostile_tenant`."""

    def __init__(self, port: int, kind: str, key: str) -> None:
        command = [
            sys.executable,
            "-m",
            "benchmarks.isolation.hostile_tenant",
            str(port),
            config.DEFAULT_MODEL,
            kind,
            key,
        ]
        super().__init__(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)

    def ended(self) -> dict[str, int]:
        """How its requests were answered."""
        told, _ = self.process.communicate(timeout=WAIT_S)
        self.stop()
        return json.loads(told)


class ServerWithKeys(ServerProcess):
    def __init__(self, key: str, arguments: list[str], log: Path) -> None:
        self._key = key
        super().__init__(arguments, log)

    def get(self, path: str) -> bytes:
        asked = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self._key}"})
        with urllib.request.urlopen(asked, timeout=30.0) as response:
            return response.read()

    def _is_healthy(self) -> bool:
        try:
            return bool(self.get("/health"))
        except OSError:
            return False


class OverloadBenchmark:
    def __init__(self, server: ServerWithKeys, keys: dict[str, str], args: argparse.Namespace) -> None:
        self._server, self._keys, self._args = server, keys, args
        self._asked = StreamRequest(server.port, keys["others"], config.DEFAULT_MODEL, args.words, args.tokens)
        self._due = StreamRequest(server.port, keys["vanishing"], config.DEFAULT_MODEL, args.words, args.tokens)
        """What those that vanish may have in flight is their due. In calm rounds the same key uses it decently, so that
        what differs is how, and not how much."""
        self.pids: dict[str, list[int]] = json.loads(server.get("/info"))["pids"]

    def warm_up(self) -> None:
        """Until every process has what it needs for any load here."""
        self._closed(self._args.saturating[-1], 2, f"{self._args.seed} warm-up")
        self.wait_idle()

    # A hostile tenant.

    def tenants(self, kind: str) -> TenantRound:
        """Small requests of another tenant, without and with the attack."""
        asked = partial(_small_requests, self._server.port, self._keys["others"], kind, self._args.tenant_seconds)
        self.wait_idle()
        uvloop.run(asked("warm-up", lambda: None))
        with self._due_of(kind):
            calm = uvloop.run(asked("calm", lambda: None))
        before_mb, most_mb = self._api_mb(), [0.0]

        def look() -> None:
            most_mb.append(self._api_mb())

        crowd = HostileTenantProcess(self._server.port, kind, self._keys[ATTACKERS.get(kind, "hostile")])
        try:
            attacked = uvloop.run(asked("attacked", look))
        finally:
            statuses = crowd.ended()
        without, beside = percentiles(calm), percentiles(attacked)
        assert without is not None and beside is not None, "some were answered"
        return TenantRound(kind, without, beside, len(attacked), before_mb, max(most_mb), statuses)

    @contextlib.contextmanager
    def _due_of(self, kind: str) -> Iterator[None]:
        """What the attacker may have in flight is its due: without the attack it uses that decently."""
        if kind not in ATTACKERS:
            yield
            return
        decent = HostileTenantProcess(self._server.port, WELL_BEHAVED, self._keys[ATTACKERS[kind]])
        try:
            yield
        finally:
            decent.ended()

    def _api_mb(self) -> float:
        return max(mb for role, mb in self.memory_mb().items() if role.startswith("api"))

    # Hostile connections.

    def pairs(self) -> Iterator[HostilePair]:
        """Without and with them in alternation, each round with them beside the mean of those before and after it."""
        seed = self._args.seed
        before = self._others(f"{seed} first")
        for number in range(self._args.pairs):
            hostile, cores = self._others_beside_hostile(f"{seed} {number}")
            after = self._others(f"{seed} {number} calm")
            yield HostilePair((before + after) / 2, hostile, cores)
            before = after

    def _others(self, seed: str) -> float:
        self.wait_idle()
        return self._closed(self._args.streams, self._args.seconds, seed, with_due=True)[0]

    def _others_beside_hostile(self, seed: str) -> tuple[float, float]:
        self.wait_idle()
        with self.hostile(seed) as crowd:
            began_s, cpu_s = time.perf_counter(), crowd.cpu_s()
            tokens_per_s, _ = self._closed(self._args.streams, self._args.seconds, f"{seed} hostile")
            cores = (crowd.cpu_s() - cpu_s) / (time.perf_counter() - began_s)
            state = crowd.told("go on")
        if state["open"] < self._args.hostile * 0.9:
            raise SystemExit(f"only {state['open']} hostile connections were open at the end of a round: {state}")
        return tokens_per_s, cores

    @contextlib.contextmanager
    def hostile(self, seed: str) -> Iterator[HostileConnectionsProcess]:
        """Yielded when they are there, and what was asked for by those that do not read is computed."""
        keys = [self._keys["unread"], self._keys["vanishing"]]
        crowd = HostileConnectionsProcess(self._server.port, keys, self._args.hostile, seed)
        try:
            _wait_for("hostile connections", lambda: crowd.told("go on")["open"] >= self._args.hostile * 0.95)
            running, few = "onward_requests", self._args.hostile_in_flight
            _wait_for("their answers", lambda: sum(self.metrics(running).values()) <= few)
            yield crowd
        finally:
            assert crowd.process.stdin is not None and crowd.process.stdout is not None
            crowd.process.stdin.close()
            crowd.process.stdout.close()
            crowd.stop()

    def left_to_the_server(self) -> tuple[float, dict[str, float]]:
        """How long the server takes to be rid of them if they do nothing more; and why it ended each."""
        before = self.metrics("onward_http_connections_ended_total")
        with self.hostile(f"{self._args.seed} left") as crowd:
            crowd.told("stay")
            began_s = time.monotonic()
            # The one that is left asks this.
            _wait_for("their end", lambda: sum(self.metrics("onward_http_connections").values()) <= 1)
            seconds = time.monotonic() - began_s
            self.wait_idle()
        after = self.metrics("onward_http_connections_ended_total")
        return seconds, {name: count - before.get(name, 0) for name, count in after.items()}

    # Overload.

    def overload(self, console: Console) -> OverloadFigures:
        args = self._args
        rates: dict[int, float] = {}
        for num_streams in args.saturating:
            self.wait_idle()
            rates[num_streams] = self._closed(num_streams, args.saturation_seconds, f"{args.seed} best {num_streams}")[
                0
            ]
        best = max(rates.values())
        console.print("at saturation: " + ", ".join(f"{r:.0f} tok/s with {n} streams" for n, r in rates.items()))
        self.wait_idle()
        before_rate, before = self._closed(args.calm_streams, args.seconds, f"{args.seed} before")
        self.wait_idle()
        per_s = args.times * best / args.tokens
        memory: list[MemorySample] = []
        began_s = time.perf_counter()

        def look() -> None:
            memory.append(MemorySample(time.perf_counter() - began_s, self.memory_mb()))

        streams = uvloop.run(open_load(self._asked, per_s, args.overload_seconds, args.seed, look))
        settle_s = args.overload_seconds // 6
        num_rest = int(args.overload_seconds - settle_s)
        self.wait_idle()
        after_rate, after = self._closed(args.calm_streams, args.seconds, f"{args.seed} after")
        seconds = int(time.perf_counter() - began_s)
        self.wait_idle()
        best_after, _ = self._closed(
            max(rates, key=lambda n: rates[n]), args.saturation_seconds, f"{args.seed} best after"
        )
        taken = [one for one in streams if one.is_whole]
        return OverloadFigures(
            best_before_tokens_per_s=best,
            best_after_tokens_per_s=best_after,
            offered_per_s=per_s,
            goodput_tokens_per_s=isolation_figures.tokens_per_s(taken, began_s + settle_s, num_rest),
            num_offered=len(streams),
            num_whole=len(taken),
            statuses={str(status): count for status, count in sorted(Counter(one.status for one in streams).items())},
            ttft_s=isolation_figures.ttft(taken),
            request_s=isolation_figures.durations(streams, whole=True),
            refusal_s=isolation_figures.durations(streams, whole=False),
            calm_before=isolation_figures.ttft(before),
            calm_after=isolation_figures.ttft(after),
            calm_before_tokens_per_s=before_rate,
            calm_after_tokens_per_s=after_rate,
            memory=memory,
            tokens_by_second=isolation_figures.by_second([*streams, *after], began_s, seconds),
            refusals_by_second=isolation_figures.refusals_by_second(streams, began_s, seconds),
        )

    def _closed(
        self, num_streams: int, seconds: int, seed: str, *, with_due: bool = False
    ) -> tuple[float, list[MeasuredStream]]:
        began_s = time.perf_counter()

        async def load() -> list[MeasuredStream]:
            asked = [(self._asked, num_streams)]
            if with_due:
                asked.append((self._due, self._args.hostile_in_flight))
            loads = [closed_load(one, count, SETTLE_S, seconds + 1, f"{seed} {count}") for one, count in asked]
            return (await asyncio.gather(*loads))[0]

        streams = uvloop.run(load())
        failed = [one.status for one in streams if one.ended_s is not None and not one.is_whole]
        if failed:
            raise SystemExit(f"{len(failed)} of the others' streams failed, the first with {failed[0]}")
        return isolation_figures.tokens_per_s(streams, began_s + SETTLE_S + 1, seconds), streams

    # The server.

    def wait_idle(self) -> None:
        """Waits until nothing runs and the only connection is our own."""
        _wait_for("nothing to be left", lambda: not self._held())
        time.sleep(FENCES_S)

    def _held(self) -> dict[str, float]:
        held = {key: n for key, n in self.metrics("onward_requests").items() if n and "finished" not in key}
        connections = sum(self.metrics("onward_http_connections").values()) - 1
        return {**held, **({"connections": connections} if connections else {})}

    def metrics(self, name: str) -> dict[str, float]:
        """Returns the values of one family, by labels."""
        values = parse_metrics(self._server.get("/metrics").decode())
        return {key.removeprefix(name): value for key, value in values.items() if key.partition("{")[0] == name}

    def memory_mb(self) -> dict[str, float]:
        """What is resident and its own, of every process."""
        found: dict[str, float] = {}
        for role, pids in self.pids.items():
            for number, pid in enumerate(pids):
                pages = Path(f"/proc/{pid}/statm").read_text().split()
                found[f"{role} {number}" if number else role] = (int(pages[1]) - int(pages[2])) * PAGE_MB
        return found

    def open_files(self) -> dict[str, int]:
        return {
            role: sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids) for role, pids in self.pids.items()
        }


async def _small_requests(
    port: int, key: str, kind: str, seconds: float, seed: str, look: Callable[[], None]
) -> list[float]:
    """How long each of them took, one after the other. Where grammars are attacked each has a new one."""
    took_s: list[float] = []
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=headers) as session:
        ends_s = time.perf_counter() + seconds
        while (began_s := time.perf_counter()) < ends_s:
            name = f"{seed}{len(took_s)}"
            body: dict[str, Any] = {"model": config.DEFAULT_MODEL, "prompt": f"Count: {name}", "max_tokens": 1}
            if kind == "grammars":
                body["guided_regex"] = f"(yes|no) {name}"
            async with session.post("/v1/completions", json=body) as answer:
                await answer.read()
                if answer.status != 200:
                    raise SystemExit(f"a small request of the other tenant was answered with {answer.status}")
            took_s.append(time.perf_counter() - began_s)
            look()
    return took_s


def _wait_for(what: str, has_come: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not has_come():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"waited {WAIT_S:.0f} s for {what}")
        time.sleep(POLL_S)


def _new_keys(file: Path, max_in_flight: int) -> dict[str, str]:
    """An admin's, that of ordinary clients, and those of hostile ones."""
    limits = {"unread": MAX_UNREAD_IN_FLIGHT, "vanishing": max_in_flight, "single": 1}
    file.unlink(missing_ok=True)
    keys = {name: new_key() for name in ("admin", "others", "unread", "vanishing", "hostile", "single")}
    for name, key in keys.items():
        add_entry(
            file,
            ApiKeyEntry(
                name=name,
                digest=hash_key(key).removeprefix(HASH_PREFIX),
                role="admin" if name == "admin" else "user",
                max_in_flight=limits.get(name),
            ),
        )
    return keys


def _plot(one: OverloadFigures, overload_s: float) -> str:
    num_seconds = len(one.tokens_by_second)
    memory = [sum(look.mb.values()) for look in one.memory]
    panels = [
        PlotPanel(
            "tokens/s of whole answers",
            [
                PlotLine("measured", one.tokens_by_second, "#0f766e"),
                PlotLine("best at saturation", [one.best_tokens_per_s] * num_seconds, "#b45309", is_dashed=True),
            ],
        ),
        PlotPanel("requests turned away, per second", [PlotLine("429", one.refusals_by_second, "#b91c1c")]),
        PlotPanel("memory of all processes, MB", [PlotLine("own and resident", memory, "#1d4ed8")]),
    ]
    return draw("Ten times the load it can bear, for a minute", panels, (0.0, overload_s))


def _failures(pairs: list[HostilePair], overload: OverloadFigures | None) -> list[str]:
    """Bars that were missed."""
    missed: list[str] = []
    if pairs and isolation_figures.median_ratio(pairs) < LEAST_RATIO:
        missed.append(f"throughput of others: {isolation_figures.median_ratio(pairs):.3f}, not {LEAST_RATIO}")
    if overload is not None and overload.ratio < LEAST_RATIO:
        missed.append(f"goodput: {overload.ratio:.3f} of the best, not {LEAST_RATIO}")
    if overload is not None and overload.growth > MOST_GROWTH:
        missed.append(f"memory: {overload.growth:.2f} times as much at the end")
    if overload is not None and set(overload.statuses) - {"200", "429"}:
        missed.append(f"answers under overload: {overload.statuses}")
    return missed


def main() -> int:
    args = _arguments()
    benchmark_command.begin(args.out)
    console = benchmark_command.console()
    key_file = args.out / "bench-isolation-keys.toml"
    keys = _new_keys(key_file, args.hostile_in_flight)
    flags = ["--api-keys", str(key_file), "--max-queue", str(args.max_queue), "--trust-request-chat-template"]
    flags += args.serve_argument
    server = ServerWithKeys(keys["admin"], flags, args.out / "onward-isolation.log")
    document: dict[str, Any] = {
        "schema": 1,
        "environment": environment.describe_machine(),
        "seed": args.seed,
        "flags": flags,
    }
    pairs: list[HostilePair] = []
    rounds: list[TenantRound] = []
    left_s, overload = None, None
    try:
        bench = OverloadBenchmark(server, keys, args)
        bench.warm_up()
        files, memory = bench.open_files(), bench.memory_mb()
        if not args.skip_tenants:
            for kind in args.attacks:
                rounds.append(bench.tenants(kind))
                console.print(tenant_figures.table(rounds[-1:]), markup=False)
            document["tenants"] = rounds
        if not args.skip_hostile:
            for pair in bench.pairs():
                pairs.append(pair)
                console.print(f"pair {len(pairs)}: {pair.calm:.0f} tok/s alone, {pair.hostile:.0f} with "
                              f"{args.hostile} hostile connections: {pair.ratio:.3f} "
                              f"(which took {pair.hostile_cpu_cores:.2f} cores)")  # fmt: skip
            left_s, ends = bench.left_to_the_server()
            console.print(f"left alone, all were gone after {left_s:.0f} s; ended by the server: {ends}")
            document["hostile"] = {"pairs": pairs, "gone_after_s": left_s, "ends": ends}
        if not args.skip_overload:
            overload = bench.overload(console)
            document["overload"] = overload
        bench.wait_idle()
        left = {"open_files": [files, bench.open_files()], "memory_mb": [memory, bench.memory_mb()]}
        document["before_and_after"] = left
    finally:
        server.stop()
        key_file.unlink()
    # As code, so that its columns stay where they are.
    tenants = f"```\n{tenant_figures.table(rounds)}```\n\n" if rounds else ""
    written = tenants + isolation_figures.markdown(pairs, left_s, overload)
    console.print(written, markup=False)
    console.print(f"before and after: {left}")
    _write(args, document, written, overload, console)
    missed = tenant_figures.missed(rounds) + _failures(pairs, overload)
    for bar in missed:
        console.print(f"missed: {bar}")
    return 1 if missed else 0


def _write(
    args: argparse.Namespace, document: dict[str, Any], tables: str, overload: OverloadFigures | None, console: Console
) -> None:
    file = benchmark_command.write("bench-isolation", document, args.out)
    file.with_suffix(".md").write_text(tables)
    console.print(f"written to {file} and {file.with_suffix('.md').name}")
    if args.plot and overload is not None:
        PLOT.write_text(_plot(overload, args.overload_seconds))
        console.print(f"drawn to {PLOT}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-isolation", description="Hostile connections, and overload.")
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="[%(default)s]")
    parser.add_argument("--hostile", type=int, default=1000, metavar="N", help="hostile connections [%(default)s]")
    parser.add_argument(
        "--hostile-in-flight", type=int, default=1, metavar="N", help="of those that ask again and again [%(default)s]"
    )
    parser.add_argument("--streams", type=int, default=16, metavar="N", help="of the others [%(default)s]")
    parser.add_argument("--words", type=int, default=24, metavar="N", help="of each prompt [%(default)s]")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="of each answer [%(default)s]")
    parser.add_argument("--seconds", type=int, default=10, metavar="S", help="of each measured load [%(default)s]")
    parser.add_argument("--times", type=float, default=10.0, metavar="X", help="overload [%(default)s]")
    parser.add_argument("--overload-seconds", type=int, default=60, metavar="S", help="[%(default)s]")
    parser.add_argument("--saturating", type=int, nargs="+", default=[48, 64], metavar="N", help="streams [48 64]")
    parser.add_argument(
        "--saturation-seconds", type=int, default=30, metavar="S", help="of each: several answers long [%(default)s]"
    )
    parser.add_argument("--calm-streams", type=int, default=4, metavar="N", help="before and after [%(default)s]")
    parser.add_argument("--max-queue", type=int, default=32, metavar="N", help="of the server [%(default)s]")
    parser.add_argument(
        "--attacks", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help="of a tenant [all]"
    )
    parser.add_argument(
        "--tenant-seconds", type=int, default=20, metavar="S", help="of each round of small requests [%(default)s]"
    )
    parser.add_argument("--skip-tenants", action="store_true", help="no hostile tenant")
    parser.add_argument("--skip-hostile", action="store_true", help="no hostile connections")
    parser.add_argument("--skip-overload", action="store_true", help="no overload")
    parser.add_argument("--plot", action="store_true", help=f"draw the overload to {PLOT.relative_to(ROOT)}")
    parser.add_argument("--seed", default=str(time.time_ns()), metavar="TEXT", help="chooses prompts and times")
    benchmark_command.add_out(parser)
    parser.add_argument("--serve-argument", action="append", default=[], metavar="FLAG", help="for the server")
    args = parser.parse_args()
    counts = (args.pairs, args.hostile, args.streams, args.words, args.tokens, args.calm_streams, *args.saturating)
    if (
        min(counts) < 1
        or min(args.seconds, args.saturation_seconds) < 2
        or args.overload_seconds < 12
        or args.times <= 0
    ):
        parser.error("counts must be at least 1, --seconds at least 2, --overload-seconds at least 12")
    return args


if __name__ == "__main__":
    benchmark_command.run("bench-isolation", main)
