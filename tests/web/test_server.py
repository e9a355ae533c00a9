"""A real server on a real socket, in the event loop of the test."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from starlette.types import Receive, Scope, Send

from onward.web import asgi
from onward.web.error_handlers import handle_errors
from onward.web.server.http_server import HttpServer


class Slow:
    """Answers when it is let."""

    def __init__(self) -> None:
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.set()
        await self.may_answer.wait()
        await asgi.respond(send, 200, b"whole")


@asynccontextmanager
async def asked_server(slow: Slow) -> AsyncIterator[tuple[HttpServer, "asyncio.Task[bytes]", "asyncio.Task[None]"]]:
    """With a request under way."""
    started = asyncio.Event()
    server = HttpServer(slow, started.set)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve([listening]))
        await started.wait()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"

        async def ask() -> bytes:
            async with session.get(url) as response:
                return await response.read()

        async with aiohttp.ClientSession() as session:
            asking = asyncio.create_task(ask())
            await slow.asked.wait()
            yield server, asking, serving


@pytest.mark.parametrize("trusted", ["*", "127.0.0.1"])
def test_who_a_client_is_says_its_connection_and_no_header(trusted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", trusted)
    seen: list[tuple[str, str]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope["client"][0], scope["scheme"]))
        await asgi.respond(send, 200, b"")

    async def scenario() -> None:
        started = asyncio.Event()
        server = HttpServer(app, started.set)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            serving = asyncio.create_task(server.serve([listening]))
            await started.wait()
            headers = {"X-Forwarded-For": "192.0.2.7", "X-Forwarded-Proto": "https"}
            url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
            async with aiohttp.ClientSession() as session, session.get(url, headers=headers):
                pass
            server.stop(0.0, lambda: None)
            await serving

    asyncio.run(scenario())
    assert seen == [("127.0.0.1", "http")]


def test_what_is_under_way_may_finish_within_the_grace() -> None:
    async def scenario() -> None:
        slow, ends = Slow(), []
        async with asked_server(slow) as (server, asking, serving):
            server.stop(1000.0, lambda: ends.append("the grace is over"))
            assert (server.config.timeout_graceful_shutdown or 0) > 1000.0
            slow.may_answer.set()
            assert await asking == b"whole"
            await serving
            assert ends == []

    asyncio.run(scenario())


def test_when_the_grace_is_over_what_is_left_is_ended() -> None:
    async def scenario() -> None:
        slow = Slow()
        async with asked_server(slow) as (server, asking, serving):
            server.stop(0.0, slow.may_answer.set)
            assert await asking == b"whole"
            await serving

    asyncio.run(scenario())


def test_what_does_not_end_then_is_cut() -> None:
    async def scenario() -> None:
        slow = Slow()
        async with asked_server(slow) as (server, asking, serving):
            server.stop(0.0, lambda: None)
            async with asyncio.timeout(30):
                await serving
            assert await asking != b"whole"

    asyncio.run(scenario())


async def _read_and_answer(scope: Scope, receive: Receive, send: Send) -> None:
    async def work() -> None:
        await asgi.read_body(receive, 1000)
        await asgi.respond(send, 200, b"whole")

    await handle_errors({}, send, work())


def test_a_body_that_has_not_come_when_the_grace_is_over_is_refused_and_is_no_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> bytes:
        started = asyncio.Event()
        server = HttpServer(_read_and_answer, started.set)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            serving = asyncio.create_task(server.serve([listening]))
            await started.wait()
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n{")
            assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n", "somebody waits for the body"
            server.stop(0.0, lambda: None)
            async with asyncio.timeout(30):
                answer = await reader.read()
                await serving
            writer.close()
            return answer

    answer = asyncio.run(scenario())
    assert b"HTTP/1.1 503 Service Unavailable" in answer and b"the server is stopping" in answer
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
