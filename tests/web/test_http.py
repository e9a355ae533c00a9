import asyncio
import contextlib
import gc
import weakref

import pytest

from onward.errors import TooLarge
from onward.web import asgi
from tests.web.exchange import DISCONNECT, Client, body_part, request_scope


async def forever(began: asyncio.Event, ended: list[str]) -> None:
    began.set()
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("ended")


def test_a_body_in_pieces_is_read_up_to_the_limit() -> None:
    async def scenario() -> None:
        client = Client([body_part(b"abc", more=True), body_part(b"def")])
        assert await asgi.read_body(client.receive, 6) == b"abcdef"

    asyncio.run(scenario())


def test_a_body_over_the_limit_is_read_to_its_end_before_it_is_refused() -> None:
    async def scenario() -> None:
        client = Client([body_part(b"abc", more=True), body_part(b"def", more=True), body_part(b"ghi")])
        with pytest.raises(TooLarge, match="larger than 5 bytes"):
            await asgi.read_body(client.receive, 5)
        assert client.said == []

    asyncio.run(scenario())


def test_a_body_without_an_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "MAX_DISCARDED_BYTES", 100)

    async def scenario() -> None:
        client = Client([body_part(b"x" * 10, more=True) for _ in range(1000)])
        with pytest.raises(TooLarge):
            await asgi.read_body(client.receive, 5)
        assert len(client.said) == 1000 - 11

    asyncio.run(scenario())


def test_a_client_that_leaves_within_its_body_is_gone() -> None:
    async def scenario() -> None:
        with pytest.raises(asgi.ClientDisconnected):
            await asgi.read_body(Client([body_part(b"abc", more=True), DISCONNECT]).receive, 100)

    asyncio.run(scenario())


def test_work_is_stopped_to_its_last_line_when_the_client_goes() -> None:
    async def scenario() -> None:
        client, began, ended = Client(), asyncio.Event(), []
        running = asyncio.create_task(asgi.run_until_disconnect(client.receive, forever(began, ended)))
        await began.wait()
        client.leave()
        with pytest.raises(asgi.ClientDisconnected):
            await running
        assert ended == ["ended"]

    asyncio.run(scenario())


def test_what_the_work_raises_is_raised() -> None:
    async def work() -> None:
        raise ValueError("its own")

    async def scenario() -> None:
        with pytest.raises(ValueError, match="its own"):
            await asgi.run_until_disconnect(Client().receive, work())

    asyncio.run(scenario())


def test_whoever_cancels_the_work_gives_the_client_up_and_the_exchange_is_not_itself_cancelled() -> None:
    """A router does so when a client comes back for a stream whose old connection is still open."""

    async def scenario() -> None:
        tasks: list[asyncio.Task[None] | None] = []

        async def work() -> None:
            tasks.append(asyncio.current_task())
            await asyncio.Event().wait()

        async def exchange() -> str:
            try:
                await asgi.run_until_disconnect(Client().receive, work())
            except asgi.ClientDisconnected:
                return "given up"
            return "done"

        running = asyncio.create_task(exchange())
        while not tasks:
            await asyncio.sleep(0)
        assert tasks[0] is not None
        tasks[0].cancel()
        assert await running == "given up"

    asyncio.run(scenario())


def test_an_exchange_that_is_cancelled_itself_takes_its_work_along_and_stays_cancelled() -> None:
    async def scenario() -> None:
        began, ended = asyncio.Event(), []
        running = asyncio.create_task(asgi.run_until_disconnect(Client().receive, forever(began, ended)))
        await began.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert ended == ["ended"]

    asyncio.run(scenario())


def test_a_header_that_is_no_ascii_stays_visible_as_such() -> None:
    scope = request_scope(headers={"X-One": "caf\xe9"})
    assert asgi.header(scope, b"x-one") == "caf\xe9"
    assert asgi.header(scope, b"x-two") is None


def test_a_request_that_fails_leaves_nothing_for_the_garbage_collector() -> None:
    """Its error refers to the frames that it has passed, and they to the body."""

    class Body:
        pass

    async def work(body: Body) -> None:
        await asyncio.sleep(0)
        raise ValueError("its own")

    async def scenario() -> None:
        body = Body()
        left = weakref.ref(body)
        working = work(body)
        del body
        with contextlib.suppress(ValueError):
            await asgi.run_until_disconnect(Client().receive, working)
        del working
        assert left() is None, "the body is held by the error"

    gc.collect()
    gc.disable()
    try:
        asyncio.run(scenario())
    finally:
        gc.enable()
