"""What the live view costs: tokens per second of one server with and without viewers of `/ui/live`, in alternation.

    python -m benchmarks.api.live_view_cost

Each pair is one run of each kind, in turn first. What counts is the median of the pairs' ratios.
"""

import argparse
import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator
from http import HTTPStatus

import aiohttp

from benchmarks.harness import benchmark_command
from benchmarks.harness.processes import ServerProcess
from onward.bench import load
from onward.bench.load import BenchRequest, BenchTarget
from onward.bench.prompts import random_words
from onward.bench.report import summarize
from onward.web.ui.live_feed import LIVE_PATH

BAR = 0.99
RETRY_AFTER_S, MAX_TRIES = 0.5, 10


@contextlib.asynccontextmanager
async def viewers(url: str, count: int) -> AsyncIterator[list[int]]:
    """Reads the live view so many times at once; yields the bytes that each has read."""
    received = [0] * count
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def view(index: int) -> None:
            for _ in range(MAX_TRIES):
                async with session.get(url + LIVE_PATH) as response:
                    if response.status != HTTPStatus.TOO_MANY_REQUESTS:
                        response.raise_for_status()
                        async for chunk in response.content.iter_any():
                            received[index] += len(chunk)
                        return
                # The server still counts the viewers of the run before: it notices at its next look that they have left.
                await asyncio.sleep(RETRY_AFTER_S)

        tasks = [asyncio.create_task(view(index)) for index in range(count)]
        yield received
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    failed = [fault for fault in ended if not isinstance(fault, asyncio.CancelledError)]
    if failed or not all(received):
        raise SystemExit(f"a viewer saw nothing or ended early: {failed}, {received} bytes")


async def measure(target: BenchTarget, options: argparse.Namespace, seed: str, num_viewers: int) -> float:
    jobs = [
        BenchRequest(random_words(80, f"{seed} {number}"), max_tokens=options.output_tokens)
        for number in range(2 * options.streams)
    ]
    async with load.new_session(target) as session, viewers(target.url, num_viewers):
        records = await load.run(session, target, jobs, options.streams)
    if failed := [record.error for record in records if not record.is_ok]:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    return summarize(records).output_tokens_per_s


async def compare(url: str, options: argparse.Namespace) -> list[float]:
    async with aiohttp.ClientSession() as session:
        target = BenchTarget(url, await load.first_model(session, url))
    await measure(target, options, "warm up", 1)
    ratios: list[float] = []
    for pair in range(options.pairs):
        order = [0, options.viewers] if pair % 2 == 0 else [options.viewers, 0]
        found = {count: await measure(target, options, f"{pair} {count}", count) for count in order}
        ratios.append(found[options.viewers] / found[0])
        print(
            f"{found[0]:7.1f} tok/s without, {found[options.viewers]:7.1f} with viewers: {ratios[-1]:.3f}", flush=True
        )
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--viewers", type=int, default=5, metavar="N", help="[5]")
    parser.add_argument("--streams", type=int, default=32, metavar="N", help="[32]")
    parser.add_argument("--output-tokens", type=int, default=128, metavar="N", help="of each stream [128]")
    parser.add_argument("--pairs", type=int, default=7, metavar="N", help="[7]")
    benchmark_command.add_out(parser)
    options = parser.parse_args()
    benchmark_command.begin(options.out)
    server = ServerProcess(["--log-level", "warning"], options.out / "live-view-server.log")
    try:
        ratios = asyncio.run(compare(server.url, options))
    finally:
        server.stop()
    print(f"{options.viewers} viewers: median ratio {statistics.median(ratios):.3f} (bar {BAR}),", end=" ")
    print(f"from {min(ratios):.3f} to {max(ratios):.3f}")
    return 0


if __name__ == "__main__":
    benchmark_command.run("live_view_cost", main)
