"""A real server on a real socket, in the event loop of the test."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from starlette.types import Receive, Scope, Send

from onward.web import http
from onward.web.server import HttpServer


class Slow:
    """Answers when it is let."""

    def __init__(self) -> None:
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.set()
        await self.may_answer.wait()
        await http.respond(send, 200, b"whole")


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
