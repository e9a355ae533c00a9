"""How long streams pause when a process is killed: the longest gap of the slowest stream, for each kill.

    python -m benchmarks.engine.kill_pause worker
    python -m benchmarks.engine.kill_pause engine --flags --standby-worker off
    python -m benchmarks.engine.kill_pause api
    python -m benchmarks.engine.kill_pause router
    python -m benchmarks.engine.kill_pause instance
    python -m benchmarks.engine.kill_pause worker --shape qwen3-8b --streams 64 --context 1000 --kills 5

With --shape a model of that shape with random weights is served on a CUDA device.

Streams with long contexts run all the time: one that ends is followed by another. A stream whose connection is lost, as by
the death of an api process or a router, comes back by its Last-Event-ID until it is continued. `router` and `instance` are
killed in a cluster of `onward up --mixed 2`.
"""

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks.harness import benchmark_command
from benchmarks.harness.metrics_text import parse_metrics
from benchmarks.harness.processes import SERVE, BenchProcess, ServerProcess, free_port
from onward.bench import load
from onward.bench.model_shapes import SHAPES, write_config, write_tokenizer

FIRST_TOKEN_ID, NUM_TOKEN_IDS = 1000, 4000
LATE_TOKENS_S = 0.2
RECONNECT_S = 0.02

FindPid = Callable[[aiohttp.ClientSession, str, str], Awaitable[int]]


class EndlessStream:
    """One request after another, each with its own prompt, and the times at which tokens came."""

    def __init__(self, url: str, model: str, index: int, context: int) -> None:
        self._url, self._model, self._index, self._context = url, model, index, context
        self.token_times_s: list[float] = []
        self.is_decoding = False
        self._last_event_id = ""

    async def run(self, session: aiohttp.ClientSession) -> None:
        number = 0
        while True:
            number += 1
            await self._read_one(session, number)

    async def _read_one(self, session: aiohttp.ClientSession, number: int) -> None:
        tokens = range(self._context)
        prompt = [FIRST_TOKEN_ID + (number * 977 + self._index * 131 + at * 7) % NUM_TOKEN_IDS for at in tokens]
        fields = {"model": self._model, "prompt": prompt, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        self.is_decoding, self._last_event_id = False, ""
        method = "POST"
        while not await self._read_attempt(session, method, fields):
            await asyncio.sleep(RECONNECT_S)
            method = "GET" if method == "POST" else "POST"  # a stream that no process has is made again

    async def _read_attempt(self, session: aiohttp.ClientSession, method: str, fields: dict[str, Any]) -> bool:
        """Whether the stream has come to its end."""
        headers = {"Last-Event-ID": self._last_event_id} if self._last_event_id else {}
        body = fields if method == "POST" else None
        try:
            async with session.request(method, self._url + "/v1/completions", json=body, headers=headers) as response:
                if response.status != 200:
                    if not self._last_event_id:
                        raise SystemExit(f"a stream failed: {await response.text()}")
                    return False
                async for line in response.content:
                    if line.startswith(b"data: [DONE]"):
                        return True
                    if line.startswith(b"id: "):
                        self._last_event_id = line[4:].decode().strip()
                    elif line.startswith(b"data: {"):
                        if msgspec.json.decode(line[6:]).get("error"):
                            return False
                        self.token_times_s.append(time.monotonic())
                        self.is_decoding = True
        except aiohttp.ClientError:
            pass
        return False

    def pause_after(self, at_s: float) -> float:
        """The longest gap between two tokens that ends after this time and begins soon after it at the latest: tokens that
        were on their way may still arrive."""
        pairs = pairwise(self.token_times_s)
        return max(end_s - start_s for start_s, end_s in pairs if end_s > at_s and start_s < at_s + LATE_TOKENS_S)


async def measure(url: str, options: argparse.Namespace, find_pid: FindPid) -> list[float]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        model = await load.first_model(session, url)
        streams = [EndlessStream(url, model, index, options.context) for index in range(options.streams)]
        tasks = [asyncio.create_task(stream.run(session)) for stream in streams]
        try:
            pauses_s = [await _kill_once(session, url, streams, options, find_pid) for _ in range(options.kills)]
            async with session.get(url + "/metrics") as response:
                metrics = parse_metrics(await response.text())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    recomputed = {name: value for name, value in metrics.items() if name.startswith("onward_recomputed_tokens_total")}
    print(f"computed again: {({name: int(value) for name, value in recomputed.items() if value}) or 'nothing'}")
    return pauses_s


async def _kill_once(
    session: aiohttp.ClientSession,
    url: str,
    streams: list[EndlessStream],
    options: argparse.Namespace,
    find_pid: FindPid,
) -> float:
    while not all(stream.is_decoding for stream in streams):
        await asyncio.sleep(0.05)
    await asyncio.sleep(options.interval)
    while options.with_standby and not await _has_standby(session, url):
        await asyncio.sleep(0.1)
    pid = await find_pid(session, url, options.role)
    killed_at_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    while min(stream.token_times_s[-1] for stream in streams) <= killed_at_s + LATE_TOKENS_S:
        await asyncio.sleep(0.02)
    pause_s = max(stream.pause_after(killed_at_s) for stream in streams)
    print(f"{options.role} killed: the slowest stream paused for {pause_s:.3f} s", flush=True)
    return pause_s


async def _has_standby(session: aiohttp.ClientSession, url: str) -> bool:
    async with session.get(url + "/info") as response:
        processes = (await response.json())["processes"]
    return any((process["role"], process["state"]) == ("standby", "ready") for process in processes)


async def _process_of_server(session: aiohttp.ClientSession, url: str, role: str) -> int:
    async with session.get(url + "/info") as response:
        [pid] = (await response.json())["pids"][role]
    return pid


class ClusterProcess(BenchProcess):
    """`onward up --mixed 2` on a free port."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-c", SERVE, "up", "--mixed", "2", "--port", str(port), *arguments]
        with log.open("w") as file:
            super().__init__(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file)
        assert self.process.stdout is not None
        if not any("curl" in line for line in self.process.stdout):
            raise SystemExit(f"onward up ended with status {self.process.wait()}; see {log}")

    async def pid_of(self, session: aiohttp.ClientSession, url: str, role: str) -> int:
        """Returns the pid of the router, or of an instance's supervisor."""
        command = b"\0router\0" if role == "router" else b"\0serve\0"
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(pid) for pid in children if command in Path(f"/proc/{pid}/cmdline").read_bytes())


def _model_flags(shape: str | None, folder: Path) -> list[str]:
    if shape is None:
        return ["--num-kv-blocks", "6144"]
    write_config(folder, shape)
    write_tokenizer(folder, SHAPES[shape]["vocab_size"])
    return ["--model", str(folder), "--device", "cuda", "--load-format", "dummy", "--max-model-len", "4096"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("role", choices=["worker", "engine", "api", "router", "instance"])
    parser.add_argument("--streams", type=int, default=16, metavar="N", help="[16]")
    parser.add_argument("--context", type=int, default=2000, metavar="N", help="prompt tokens of each stream [2000]")
    parser.add_argument("--kills", type=int, default=10, metavar="N", help="[10]")
    parser.add_argument("--interval", type=float, default=3.0, metavar="S", help="seconds before each kill [3]")
    parser.add_argument("--shape", choices=SHAPES, help="random weights on a CUDA device (default: the default model)")
    parser.add_argument("--with-standby", action="store_true", help="each kill waits for a standby worker")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of the server; the last argument")
    benchmark_command.add_out(parser)
    options = parser.parse_args()
    benchmark_command.begin(options.out)
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--log-level", "info", *_model_flags(options.shape, Path(folder)), *options.flags]
        log = options.out / "kill-pause-server.log"
        is_cluster = options.role in ("router", "instance")
        server = ClusterProcess(flags, log) if is_cluster else ServerProcess(flags, log)
        find_pid = server.pid_of if isinstance(server, ClusterProcess) else _process_of_server
        try:
            pauses_s = asyncio.run(measure(server.url, options, find_pid))
        finally:
            server.stop()
    print(f"{options.role}: median {statistics.median(pauses_s):.3f} s, {min(pauses_s):.3f} to {max(pauses_s):.3f}")
    return 0


if __name__ == "__main__":
    benchmark_command.run("kill_pause", main)
