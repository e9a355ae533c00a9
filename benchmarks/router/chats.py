"""Many chats of many turns: each turn sends all that was said before, so a server that knows it has little to compute.

Where the turns of a chat land decides how much is known there. Says what was asked and what came of it, by turns.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import msgspec

from onward.bench import load
from onward.bench.load import BenchRequest, BenchTarget, RequestTiming
from onward.bench.prompts import random_words
from onward.bench.report import percentile
from onward.errors import ServerError


@dataclass(frozen=True, slots=True)
class ChatLoad:
    num_chats: int
    at_once: int
    """Odd where instances are even in number: round robin would send each chat to the same one by luck."""
    num_turns: int
    first_words: int
    turn_words: int
    answer_tokens: int
    pause_s: float
    """Between an answer and the next question, half as much more or less."""


class ChatTurn(msgspec.Struct, frozen=True):
    number: int
    """Number of the turn in the chat, from 0."""
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


class ChatFigures(msgspec.Struct, frozen=True):
    """Figures of the turns after the first, which no instance can have cached."""

    hit_rate: float
    """Share of the tokens of all prompts that were cached."""
    ttft_p50_s: float
    ttft_p90_s: float
    num_turns: int


async def run_chats(target: BenchTarget, asked: ChatLoad, seed: str) -> list[ChatTurn]:
    """All chats to their ends. Raises `ServerError` if a turn fails."""
    turns: list[ChatTurn] = []
    remaining = iter(range(asked.num_chats))

    async def one_after_the_other(session: aiohttp.ClientSession) -> None:
        for number in remaining:
            turns.extend(await _chat(session, target, asked, f"{seed} chat {number}"))

    async with load.new_session(target) as session:
        await asyncio.gather(*(one_after_the_other(session) for _ in range(asked.at_once)))
    return turns


async def _chat(session: aiohttp.ClientSession, target: BenchTarget, asked: ChatLoad, seed: str) -> list[ChatTurn]:
    messages: list[dict[str, str]] = []
    turns: list[ChatTurn] = []
    chance = random.Random(seed)
    for number in range(asked.num_turns):
        num_words = asked.turn_words if number else asked.first_words
        messages.append({"role": "user", "content": random_words(num_words, f"{seed} turn {number}")})
        record = await load.send_request(session, target, BenchRequest(list(messages), asked.answer_tokens))
        turns.append(_turn(number, record))
        messages.append({"role": "assistant", "content": "".join(record.text_pieces)})
        await asyncio.sleep(asked.pause_s * chance.uniform(0.5, 1.5))
    return turns


def _turn(number: int, record: RequestTiming) -> ChatTurn:
    if record.error is not None or record.usage is None or not record.text_at_s:
        raise ServerError(f"turn {number} of a chat failed: {record.error or 'it has no text'}")
    return ChatTurn(
        number, record.text_at_s[0] - record.started_s, record.usage.prompt_tokens, record.usage.cached_tokens
    )


def figures(turns: Sequence[ChatTurn]) -> ChatFigures:
    later = [turn for turn in turns if turn.number > 0]
    times_s = [turn.ttft_s for turn in later]
    return ChatFigures(
        hit_rate=sum(turn.cached_tokens for turn in later) / sum(turn.prompt_tokens for turn in later),
        ttft_p50_s=percentile(times_s, 50),
        ttft_p90_s=percentile(times_s, 90),
        num_turns=len(later),
    )
