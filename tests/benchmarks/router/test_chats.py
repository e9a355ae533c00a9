import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from benchmarks.router.chats import ChatLoad, ChatTurn, figures, run_chats
from onward.bench.load import BenchTarget
from onward.errors import ServerError
from tests.bench.sse_server import DONE, chunk, serving, usage

ASKED = ChatLoad(
    num_chats=3, at_once=2, num_turns=3, first_words=8, turn_words=3, answer_tokens=2, pause_s=0.0
)  # fmt: skip


async def counting(body: dict[str, Any]) -> AsyncIterator[bytes]:
    yield chunk(f"answer {len(body['messages'])} ")
    yield chunk("of two parts")
    yield usage(10 * len(body["messages"]), 2, cached=len(body["messages"]))
    yield DONE


def test_each_turn_sends_all_that_was_said_before_and_the_answers_as_they_came() -> None:
    with serving(counting) as server:
        asyncio.run(run_chats(BenchTarget(server.url, "tiny"), ASKED, "seed"))
    last = max(server.bodies, key=lambda body: len(body["messages"]))["messages"]
    assert [message["role"] for message in last] == ["user", "assistant", "user", "assistant", "user"]
    assert last[1]["content"] == "answer 1 of two parts"
    assert last[3]["content"] == "answer 3 of two parts"
    assert len(last[0]["content"].split()) == 8 and len(last[2]["content"].split()) == 3


def test_every_chat_has_all_its_turns_and_words_of_its_own() -> None:
    with serving(counting) as server:
        turns = asyncio.run(run_chats(BenchTarget(server.url, "tiny"), ASKED, "seed"))
    assert sorted(turn.number for turn in turns) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    firsts = {body["messages"][0]["content"] for body in server.bodies}
    assert len(firsts) == ASKED.num_chats


def test_first_turns_count_for_nothing_since_nobody_can_know_them() -> None:
    turns = [ChatTurn(0, 9.0, 1000, 0), ChatTurn(1, 0.1, 100, 50), ChatTurn(2, 0.3, 300, 150)]
    found = figures(turns)
    assert found.hit_rate == pytest.approx(0.5)
    assert (found.ttft_p50_s, found.ttft_p90_s, found.num_turns) == (0.1, 0.3, 2)


def test_a_turn_that_fails_is_told() -> None:
    with serving(counting) as server, pytest.raises(ServerError, match="turn 0 of a chat failed: HTTP 404"):
        asyncio.run(run_chats(BenchTarget(server.url, "another"), ASKED, "seed"))
