"""How long streams pause when a process is killed: the longest gap of the slowest stream, for each kill.

    python -m benchmarks.engine.kill_pause worker
    python -m benchmarks.engine.kill_pause engine --flags --standby-worker off
    python -m benchmarks.engine.kill_pause worker --shape qwen3-8b --streams 64 --context 1000 --kills 5

With --shape a model of that shape with random weights is served on a CUDA device.

Streams with long contexts run all the time: one that ends is followed by another.
"""

import argparse
import asyncio
import os
import signal
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import aiohttp
import msgspec

from benchmarks.harness import benchmark_command
from benchmarks.harness.metrics_text import parse_metrics
from benchmarks.harness.processes import ServerProcess
from onward.bench import load
from onward.bench.model_shapes import SHAPES, write_config, write_tokenizer

FIRST_TOKEN_ID, NUM_TOKEN_IDS = 1000, 4000
LATE_TOKENS_S = 0.2


class EndlessStream:
    """One request after another, each with its own prompt, and the times at which tokens came."""

    def __init__(self, url: str, model: str, index: int, context: int) -> None:
        self._url, self._model, self._index, self._context = url, model, index, context
        self.token_times_s: list[float] = []
        self.is_decoding = False

    async def run(self, session: aiohttp.ClientSession) -> None:
        number = 0
        while True:
            number += 1
            await self._read_one(session, number)

    async def _read_one(self, session: aiohttp.ClientSession, number: int) -> None:
        tokens = range(self._context)
        prompt = [FIRST_TOKEN_ID + (number * 977 + self._index * 131 + at * 7) % NUM_TOKEN_IDS for at in tokens]
        fields = {"model": self._model, "prompt": prompt, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        self.is_decoding = False
        async with session.post(self._url + "/v1/completions", json=fields) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    if error := msgspec.json.decode(line[6:]).get("error"):
                        raise SystemExit(f"a stream failed: {error}")
                    self.token_times_s.append(time.monotonic())
                    self.is_decoding = True

    def pause_after(self, at_s: float) -> float:
        """The longest gap between two tokens that ends after this time and begins soon after it at the latest: tokens that
        were on their way may still arrive."""
        pairs = pairwise(self.token_times_s)
        return max(end_s - start_s for start_s, end_s in pairs if end_s > at_s and start_s < at_s + LATE_TOKENS_S)


async def measure(url: str, options: argparse.Namespace) -> list[float]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        model = await load.first_model(session, url)
        streams = [EndlessStream(url, model, index, options.context) for index in range(options.streams)]
        tasks = [asyncio.create_task(stream.run(session)) for stream in streams]
        try:
            pauses_s = [await _kill_once(session, url, streams, options) for _ in range(options.kills)]
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
    session: aiohttp.ClientSession, url: str, streams: list[EndlessStream], options: argparse.Namespace
) -> float:
    while not all(stream.is_decoding for stream in streams):
        await asyncio.sleep(0.05)
    await asyncio.sleep(options.interval)
    while options.with_standby and not await _has_standby(session, url):
        await asyncio.sleep(0.1)
    async with session.get(url + "/info") as response:
        [pid] = (await response.json())["pids"][options.role]
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


def _model_flags(shape: str | None, folder: Path) -> list[str]:
    if shape is None:
        return ["--num-kv-blocks", "6144"]
    write_config(folder, shape)
    write_tokenizer(folder, SHAPES[shape]["vocab_size"])
    return ["--model", str(folder), "--device", "cuda", "--load-format", "dummy", "--max-model-len", "4096"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("role", choices=["worker", "engine"])
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
        server = ServerProcess(flags, options.out / "kill-pause-server.log")
        try:
            pauses_s = asyncio.run(measure(server.url, options))
        finally:
            server.stop()
    print(f"{options.role}: median {statistics.median(pauses_s):.3f} s, {min(pauses_s):.3f} to {max(pauses_s):.3f}")
    return 0


if __name__ == "__main__":
    benchmark_command.run("kill_pause", main)
