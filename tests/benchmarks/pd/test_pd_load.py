"""The load of `make bench-pd`, on a real HTTP server that says what the test wants."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from benchmarks.pd.pd_load import PdLoad, PdLoadResult, observe
from onward.bench.load import BenchTarget
from onward.errors import ServerError
from tests.bench.sse_server import DONE, Answer, chunk, serving, usage

STREAM_TOKENS = 1000
ASKED = PdLoad(
    num_streams=3, stream_tokens=STREAM_TOKENS, stream_words=4, prompt_words=60, prompt_output_tokens=2,
    interval_s=0.05, quiet_s=0.05, loaded_s=0.2,
)  # fmt: skip


async def short_answer() -> AsyncIterator[bytes]:
    for part in (chunk("a", chat=False), chunk("b", chat=False), usage(60, 2), DONE):
        yield part


async def endless(body: dict[str, Any]) -> AsyncIterator[bytes]:
    """Streams go on until they are cut off; long prompts are answered."""
    if body["max_tokens"] != STREAM_TOKENS:
        async for part in short_answer():
            yield part
        return
    for _ in range(10_000):
        yield chunk("x", chat=False)
        await asyncio.sleep(0.002)


def observed(answer: Answer, asked: PdLoad = ASKED) -> tuple[PdLoadResult, list[dict[str, Any]]]:
    with serving(answer) as server:
        seen = asyncio.run(observe(BenchTarget(server.url, "tiny", "completions"), asked, "seed"))
    return seen, server.bodies


def test_long_prompts_come_at_a_steady_rate_with_a_whole_interval_for_the_last() -> None:
    assert ASKED.arrivals_s() == pytest.approx([0.0, 0.05, 0.1, 0.15])


def test_every_stream_writes_from_before_the_long_prompts_until_after_them_and_is_cut_off() -> None:
    seen, bodies = observed(endless)
    assert len(seen.streams) == 3 and len(seen.prompts) == 4
    for stream in seen.streams:
        assert stream.text_at_s[0] < seen.quiet_from_s
        assert stream.text_at_s[-1] >= seen.ended_s, "also the last wait came to its end"
        assert stream.usage is None, "it never came to its end"
    assert all(prompt.started_s >= seen.loaded_from_s for prompt in seen.prompts)
    assert len({body["prompt"] for body in bodies}) == len(bodies) == 7, "no two prompts are equal"
    assert all(body["ignore_eos"] for body in bodies)


def test_a_wait_that_outlasts_the_round_is_seen_to_its_end() -> None:
    async def stalling(body: dict[str, Any]) -> AsyncIterator[bytes]:
        if body["max_tokens"] != STREAM_TOKENS:
            has_prompt.set()
        async for part in endless(body):
            yield part
            if has_prompt.is_set() and body["max_tokens"] == STREAM_TOKENS:
                await asyncio.sleep(2 * ASKED.loaded_s)

    has_prompt = threading.Event()
    seen, _ = observed(stalling)
    assert all(stream.text_at_s[-1] >= seen.ended_s for stream in seen.streams)


def test_a_stream_that_ends_by_itself_spoils_the_round() -> None:
    async def brief(body: dict[str, Any]) -> AsyncIterator[bytes]:
        for _ in range(9):
            yield chunk("x", chat=False)
        yield usage(4, 9)
        yield DONE

    with pytest.raises(ServerError, match="a stream ended before the round did"):
        observed(brief)


def test_a_prompt_that_fails_spoils_the_round() -> None:
    async def failing(body: dict[str, Any]) -> AsyncIterator[bytes]:
        if body["max_tokens"] != STREAM_TOKENS:
            yield b'data: {"error": {"message": "no room"}}\n\n'
            return
        async for part in endless(body):
            yield part

    with pytest.raises(ServerError, match="4 requests failed, the first: no room"):
        observed(failing)
