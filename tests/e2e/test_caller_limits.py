"""Limits of keys with two api processes: the engine keeps them, whichever process a request comes to."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from onward.web.auth.api_key_table import hash_key
from tests.e2e.server import Server
from tests.e2e.streams import chat_body

LIMITS = {
    "ann": "max_in_flight = 2",
    "bob": "",
    "cyd": "tokens_per_minute = 30",
    "dee": "max_in_flight = 1",
    "eve": "tokens_per_minute = 30",
}
REFUSED_IN_FLIGHT = 'onward_refusals_total{reason="in_flight"}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    table: Path = tmp_path_factory.mktemp("keys") / "keys.toml"
    rows = [f'[[key]]\nname = "{name}"\nhash = "{hash_key(key(name))}"\n{limit}\n' for name, limit in LIMITS.items()]
    table.write_text("\n".join(rows))
    with Server("--api-processes", "2", "--api-keys", str(table), "--open-metrics") as server:
        yield server


BODY = chat_body(0, 60) | {"stream": True, "seed": 7}


@dataclass
class Cut:
    """What a client has of a stream."""

    status: int = 0
    retry_after: str | None = None
    cursors: list[str] = field(default_factory=list)
    text: str = ""


def key(name: str) -> str:
    return f"secret of {name}"


async def ask(server: Server, name: str, num_tokens: int, index: int = 0) -> httpx.Response:
    """On a connection of its own, so that either process may get it."""
    headers = {"Authorization": f"Bearer {key(name)}"}
    async with httpx.AsyncClient(base_url=server.url, timeout=60, headers=headers) as client:
        return await client.post("/v1/chat/completions", json=chat_body(index, num_tokens))


def test_no_more_of_a_caller_s_requests_are_in_flight_than_its_key_says(server: Server) -> None:
    async def ask_all() -> list[httpx.Response]:
        return await asyncio.gather(
            *(ask(server, "ann", 60, index) for index in range(8)),
            *(ask(server, "bob", 20, index) for index in range(8)),
        )

    before = server.metrics().get(REFUSED_IN_FLIGHT, 0.0)
    answers = asyncio.run(ask_all())
    of_ann, of_bob = answers[:8], answers[8:]
    assert {answer.status_code for answer in of_bob} == {200}, "others are not held up"
    refused = [answer for answer in of_ann if answer.status_code == 429]
    assert len([answer for answer in of_ann if answer.status_code == 200]) + len(refused) == 8
    assert 1 <= len(refused) <= 6, "two were in flight"
    for answer in refused:
        assert answer.json()["error"]["code"] == "rate_limited"
        assert "max_in_flight" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1
    assert server.metrics()[REFUSED_IN_FLIGHT] - before == len(refused)


def test_a_caller_that_has_used_its_tokens_is_told_when_there_are_some_again(server: Server) -> None:
    first = asyncio.run(ask(server, "cyd", 40))
    assert (first.status_code, first.json()["usage"]["completion_tokens"]) == (200, 40), "what runs is not cut"
    for _ in range(4):
        refused = asyncio.run(ask(server, "cyd", 5))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
        assert int(refused.headers["retry-after"]) > 10
    assert asyncio.run(ask(server, "bob", 5)).status_code == 200


async def stream(client: httpx.AsyncClient, num_events: int | None = None, cursor: str | None = None) -> Cut:
    """Reads the first events of a stream of 60 tokens; then the client goes away. None: all of them."""
    headers = {} if cursor is None else {"Last-Event-ID": cursor}
    told = Cut()
    async with client.stream("POST", "/v1/chat/completions", json=BODY, headers=headers) as answer:
        told.status, told.retry_after = answer.status_code, answer.headers.get("retry-after")
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                told.cursors.append(line.removeprefix("id: "))
            if line.startswith("data: {"):
                [choice] = json.loads(line.removeprefix("data: "))["choices"]
                told.text += choice["delta"].get("content") or ""
            if num_events is not None and len(told.cursors) == num_events and line == "":
                break
    return told


def client_of(server: Server, name: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=60, headers={"Authorization": f"Bearer {key(name)}"})


def test_streams_that_are_cut_and_resumed_together_are_within_the_limit(server: Server) -> None:
    async def scenario() -> None:
        async with client_of(server, "dee") as client:
            cut = []
            while len(cut) < 4:  # one after the other, which is within the limit
                one = await stream(client, 3)
                cut += [one] if one.status == 200 else []
            again = await asyncio.gather(*(stream(client, cursor=one.cursors[-1]) for one in cut))
            assert {one.status for one in again} == {200, 429}, "one at a time"
            whole = await until_taken(client, None)
            for one, other in zip(cut, again, strict=True):
                rest = other if other.status == 200 else await until_taken(client, one.cursors[-1])
                assert other.status == 200 or int(other.retry_after or 0) >= 1
                assert one.text + rest.text == whole.text, "a refused resume loses nothing"

    asyncio.run(scenario())


async def until_taken(client: httpx.AsyncClient, cursor: str | None) -> Cut:
    while (told := await stream(client, cursor=cursor)).status == 429:
        pass
    return told


def test_a_stream_that_has_ended_is_not_computed_again_when_the_tokens_are_used_up(server: Server) -> None:
    async def scenario() -> None:
        async with client_of(server, "eve") as client:
            whole = await stream(client)
            assert whole.status == 200
            again = await stream(client, cursor=whole.cursors[0])
            assert again.status == 429
            assert int(again.retry_after or 0) > 10

    asyncio.run(scenario())
