"""Streams that decode all the time, and long prompts that come between: what `make bench-pd` loads a server with.

    streams   ──first tokens──|── quiet ──|──────── loaded ────────|── until all is answered ──> cut off
    prompts                               ^       ^       ^       ^

It writes down what came when. What that means is said in `pd_figures`.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from onward.bench import load
from onward.bench.load import BenchRequest, BenchTarget, RequestTiming
from onward.bench.prompts import random_words
from onward.errors import ServerError

SETTLED_EVENTS = 8
"""What each stream has written before anything is counted."""
PROGRESS_TIMEOUT_S = 60.0
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class PdLoad:
    num_streams: int
    stream_tokens: int
    """More than a stream can write in a round; it is cut off."""
    stream_words: int
    prompt_words: int
    prompt_output_tokens: int
    interval_s: float
    """From one long prompt to the next."""
    quiet_s: float
    loaded_s: float

    def arrivals_s(self) -> list[float]:
        """When long prompts come, after the quiet part. The last has a whole interval before the end."""
        return [number * self.interval_s for number in range(int(self.loaded_s / self.interval_s + 1e-9))]


@dataclass(frozen=True, slots=True)
class PdLoadResult:
    streams: list[RequestTiming]
    prompts: list[RequestTiming]
    quiet_from_s: float
    loaded_from_s: float
    ended_s: float


async def observe(target: BenchTarget, asked: PdLoad, seed: str) -> PdLoadResult:
    """One round. Raises `ServerError` if a stream or a prompt fails, or a stream ends by itself."""
    async with load.new_session(target) as session:
        streams = [RequestTiming(time.perf_counter()) for _ in range(asked.num_streams)]
        running = [
            asyncio.create_task(load.send_request(session, target, _stream_job(asked, f"{seed} stream {n}"), record))
            for n, record in enumerate(streams)
        ]
        try:
            await _every(streams, lambda record: len(record.text_at_s) >= SETTLED_EVENTS)
            quiet_from_s = time.perf_counter()
            await asyncio.sleep(asked.quiet_s)
            loaded_from_s = time.perf_counter()
            ended_s = loaded_from_s + asked.loaded_s
            asking = [
                asyncio.create_task(_ask_at(session, target, loaded_from_s + at_s, _prompt_job(asked, f"{seed} {n}")))
                for n, at_s in enumerate(asked.arrivals_s())
            ]
            await asyncio.sleep(asked.loaded_s)
            prompts = await asyncio.gather(*asking)
            _check(streams, prompts)
            # A wait that began within the round is known when it is over.
            await _every(streams, lambda record: record.text_at_s[-1] >= ended_s)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
    return PdLoadResult(streams, prompts, quiet_from_s, loaded_from_s, ended_s)


async def _every(streams: list[RequestTiming], has_come_so_far: Callable[[RequestTiming], bool]) -> None:
    deadline_s = time.perf_counter() + PROGRESS_TIMEOUT_S
    while not all(map(has_come_so_far, streams)):
        _check(streams, [])
        if time.perf_counter() > deadline_s:
            raise ServerError(f"the streams have not gone on within {PROGRESS_TIMEOUT_S:.0f} s")
        await asyncio.sleep(_LOOK_S)


def _check(streams: list[RequestTiming], prompts: list[RequestTiming]) -> None:
    if failed := [record.error for record in (*streams, *prompts) if record.error is not None]:
        raise ServerError(f"{len(failed)} requests failed, the first: {failed[0]}")
    if any(record.ended_s for record in streams):
        raise ServerError("a stream ended before the round did; let the round be shorter")


async def _ask_at(session: aiohttp.ClientSession, target: BenchTarget, at_s: float, job: BenchRequest) -> RequestTiming:
    await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
    return await load.send_request(session, target, job)


def _stream_job(asked: PdLoad, seed: str) -> BenchRequest:
    return BenchRequest(random_words(asked.stream_words, seed), asked.stream_tokens)


def _prompt_job(asked: PdLoad, seed: str) -> BenchRequest:
    return BenchRequest(random_words(asked.prompt_words, f"{seed} prompt"), asked.prompt_output_tokens)
