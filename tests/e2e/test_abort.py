"""`POST /v1/abort` with the real server: running and waiting requests, any api process, and nothing left behind."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from tests.e2e.server import Server
from tests.e2e.streams import chat_body, run_streams

NUM_SLOTS = 2


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--api-processes", "2", "--max-num-seqs", str(NUM_SLOTS)) as server:
        yield server


class OpenStream:
    """A stream that another client will end."""

    def __init__(self, response: httpx.Response) -> None:
        self.id = response.headers["x-request-id"]
        self._lines = response.aiter_lines()

    async def first_token(self) -> None:
        async for line in self._lines:
            if line.startswith("id: "):
                return

    async def ends(self) -> list[str]:
        """The finish reasons that came before the end. Nothing follows it, and no error comes."""
        data = [line.removeprefix("data: ") async for line in self._lines if line.startswith("data: ")]
        assert data.pop() == "[DONE]"
        chunks = [msgspec.json.decode(one) for one in data]
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        return [reason for reason in reasons if reason is not None]


@asynccontextmanager
async def open_streams(server: Server, count: int, **headers: str) -> AsyncIterator[list[OpenStream]]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        responses: list[httpx.Response] = []
        try:
            for index in range(count):
                body = chat_body(index, 4000) | {"stream": True}
                request = client.build_request("POST", "/v1/chat/completions", json=body, headers=headers)
                responses.append(await client.send(request, stream=True))
                assert responses[-1].status_code == 200
            yield [OpenStream(response) for response in responses]
        finally:
            for response in responses:
                await response.aclose()


async def abort(server: Server, **body: Any) -> dict[str, list[str]]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:  # any of the api processes
        response = await client.post("/v1/abort", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def assert_nothing_is_left(server: Server) -> None:
    for _ in range(200):  # the step in flight is over soon; a bounded number of looks settles it
        metrics = server.metrics()
        if metrics['onward_kv_blocks{state="owned"}'] == metrics['onward_kv_blocks{state="fenced"}'] == 0:
            break
    metrics = server.metrics()
    assert metrics['onward_kv_blocks{state="owned"}'] == metrics['onward_kv_blocks{state="fenced"}'] == 0
    assert all(value == 0 for name, value in metrics.items() if name.startswith("onward_requests{"))


def test_a_running_stream_is_aborted_by_its_id_and_told_so(server: Server) -> None:
    async def scenario() -> None:
        async with open_streams(server, 1) as [stream]:
            await stream.first_token()
            name = "chatcmpl-" + stream.id
            assert await abort(server, ids=[name, "x"]) == {"aborted": [name], "unknown": ["x"]}
            assert await stream.ends() == ["abort"]
            assert await abort(server, ids=[name]) == {"aborted": [], "unknown": [name]}

    asyncio.run(scenario())
    assert_nothing_is_left(server)


def test_a_request_is_aborted_by_its_label_while_it_waits(server: Server) -> None:
    async def scenario() -> None:
        async with (
            open_streams(server, NUM_SLOTS) as running,
            open_streams(server, 1, **{"X-Request-Id": "q"}) as [late],
        ):
            await running[0].first_token()
            assert await abort(server, ids=["q"]) == {"aborted": ["q"], "unknown": []}
            assert await late.ends() == ["abort"]
            await running[1].first_token()
            await abort(server, ids=[one.id for one in running])

    asyncio.run(scenario())
    assert_nothing_is_left(server)


def test_a_request_that_is_not_streamed_returns_what_was_generated(server: Server) -> None:
    async def scenario() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            asking = asyncio.ensure_future(
                client.post("/v1/chat/completions", json=chat_body(1, 4000), headers={"X-Request-Id": "whole"})
            )
            told = {"aborted": []}
            for _ in range(1000):  # until the engine has it; each look is a whole exchange with it
                told = await abort(server, ids=["whole"])
                if told["aborted"]:
                    break
            assert told == {"aborted": ["whole"], "unknown": []}
            response = await asking
        assert response.status_code == 200
        [choice] = response.json()["choices"]
        assert (choice["finish_reason"], choice["message"]["role"]) == ("abort", "assistant")
        assert len(choice["completion_token_ids"]) == response.json()["usage"]["completion_tokens"]

    asyncio.run(scenario())
    assert_nothing_is_left(server)


def test_all_ends_everything_of_every_process_and_new_requests_are_served(server: Server) -> None:
    async def scenario() -> None:
        async with open_streams(server, 6) as streams:
            await streams[0].first_token()
            told = await abort(server, all=True)
            # Records of streams whose clients have gone, as other tests leave them, are named too.
            assert {stream.id for stream in streams} <= set(told["aborted"]) and not told["unknown"]
            assert [await stream.ends() for stream in streams] == [["abort"]] * 6

    asyncio.run(scenario())
    assert_nothing_is_left(server)
    [stream] = run_streams(server.url, [chat_body(2, 8)])
    assert stream.finish_reasons == ["length"]


def test_other_streams_do_not_notice(server: Server) -> None:
    [alone] = run_streams(server.url, [chat_body(5, 48)])

    async def scenario() -> None:
        async with open_streams(server, 1) as [stream]:
            await stream.first_token()
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                body = chat_body(5, 48)
                asking = asyncio.ensure_future(client.post("/v1/chat/completions", json=body))
                await stream.first_token()
                assert (await abort(server, ids=[stream.id]))["aborted"] == [stream.id]
                assert (await asking).json()["choices"][0]["message"]["content"] == alone.text

    asyncio.run(scenario())
    assert_nothing_is_left(server)
