"""POSTs whose answers are streams, over real sockets."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from onward.clock import SystemClock
from onward.router import upstream_connections
from onward.router.upstream_connections import (
    MAX_BUFFERED_BYTES,
    UpstreamConnectError,
    UpstreamConnection,
    UpstreamConnectionPool,
)
from onward.transport.http_urls import ServerUrl

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def served(handler: Handler, client: Callable[[str, UpstreamConnectionPool], Awaitable[None]]) -> None:
    handling: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handling.add(task)
        try:
            await handler(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    poster = UpstreamConnectionPool(SystemClock())
    try:
        await asyncio.wait_for(client(f"http://{host}:{port}", poster), 20)
    finally:
        poster.close()
        server.close()
        await server.wait_closed()
        await asyncio.wait(handling)


async def request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head, await reader.readexactly(length)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def read_all(answer: UpstreamConnection) -> bytes:
    return b"".join([piece async for piece in answer.iter_any()])


def test_pieces_are_there_as_they_come_and_the_connection_is_used_again() -> None:
    heard: list[tuple[bytes, bytes]] = []
    go_on = asyncio.Event()
    connections = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while not reader.at_eof():
            try:
                heard.append(await request(reader))
            except asyncio.IncompleteReadError:
                break
            writer.write(HEAD + chunk(b"one"))
            await go_on.wait()
            writer.write(chunk(b"two") + b"0\r\n\r\n")
        writer.close()

    async def client(url: str, poster: UpstreamConnectionPool) -> None:
        for _ in range(3):
            go_on.clear()
            answer = await poster.post(url, "/path", b"body", {"x-name": "value"})
            pieces = answer.iter_any()
            assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")
            assert await anext(pieces) == b"one", "before the answer is over"
            go_on.set()
            assert b"".join([piece async for piece in pieces]) == b"two"
            assert answer.at_eof()
            answer.release()

    asyncio.run(served(handler, client))
    assert connections == 1
    head, body = heard[0]
    assert head.startswith(b"POST /path HTTP/1.1\r\n") and b"x-name: value" in head and body == b"body"


def test_a_reader_that_leaves_before_the_end_closes_the_connection() -> None:
    felt = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(HEAD + chunk(b"one"))
        with contextlib.suppress(ConnectionError):
            await reader.read()
        felt.set()
        writer.close()

    async def client(url: str, poster: UpstreamConnectionPool) -> None:
        answer = await poster.post(url, "/", b"", {})
        assert await anext(answer.iter_any()) == b"one"
        answer.release()
        await felt.wait()
        asking = asyncio.create_task(poster.post(url, "/", b"", {}))
        (await asking).close()

    asyncio.run(served(handler, client))


def test_connections_of_an_instance_that_is_gone_do_not_keep_others_from_being_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream_connections, "MAX_IDLE_CONNECTIONS", 2)
    heard: list[bytes] = []
    leave = asyncio.Event()

    async def gone(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(HEAD + b"0\r\n\r\n")
        await leave.wait()

    async def stays(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(b"connected")
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                await request(reader)
                writer.write(HEAD + b"0\r\n\r\n")

    async def ask(url: str, poster: UpstreamConnectionPool) -> UpstreamConnection:
        answer = await poster.post(url, "/", b"", {})
        await read_all(answer)
        return answer

    async def client(url: str, poster: UpstreamConnectionPool) -> None:
        async def with_another(other: str, unused: UpstreamConnectionPool) -> None:
            lost = [await ask(url, poster) for _ in range(2)]
            for answer in lost:
                answer.release()
            leave.set()
            while any(answer.is_open for answer in lost):
                await asyncio.sleep(0)
            for _ in range(3):
                (await ask(other, poster)).release()
            poster.close()

        await served(stays, with_another)

    asyncio.run(served(gone, client))
    assert heard == [b"connected"]


def test_nobody_there_is_told_from_somebody_who_breaks_off() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, body = await request(reader)
        writer.write({b"half": HEAD + chunk(b"one"), b"none": b"", b"nonsense": b"SMTP ready\r\n\r\n"}[body])
        await writer.drain()
        writer.close()

    async def client(url: str, poster: UpstreamConnectionPool) -> None:
        with pytest.raises(UpstreamConnectError):
            await poster.post("http://127.0.0.1:1", "/", b"", {})
        answer = await poster.post(url, "/", b"half", {})
        with pytest.raises(OSError):
            await read_all(answer)
        for body in (b"none", b"nonsense"):
            with pytest.raises(OSError):
                await poster.post(url, "/", body, {})

    asyncio.run(served(handler, client))


def test_an_answer_that_nobody_reads_is_held_within_a_bound_and_comes_whole_in_the_end() -> None:
    block, num_blocks = bytes(1 << 16), 512

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(HEAD)
        for _ in range(num_blocks):
            writer.write(chunk(block))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def client(url: str, poster: UpstreamConnectionPool) -> None:
        answer = await poster.post(url, "/", bytes(4 << 20), {})
        pieces, largest, total = answer.iter_any(), 0, 0
        while not answer._is_paused:
            await asyncio.sleep(0)
        async for piece in pieces:
            largest, total = max(largest, len(piece)), total + len(piece)
        assert total == len(block) * num_blocks
        assert largest < 2 * MAX_BUFFERED_BYTES

    asyncio.run(served(handler, client))


UNUSABLE_URLS = [
    "http://gpu-box..internal:23003",
    "http://127.0.0.1:99999",
    "http://[::1",
    "http://",
    "http://[::1%lo]:1",
    "http://" + "a" * 64 + ".internal:1",
    "http://127.0.0.1:1",
]


@pytest.mark.parametrize("url", UNUSABLE_URLS)
def test_whatever_keeps_a_connection_from_being_made_is_a_failed_attempt(url: str) -> None:
    async def scenario() -> None:
        with pytest.raises(UpstreamConnectError):
            await UpstreamConnectionPool(SystemClock()).post(url, "/", b"", {})

    asyncio.run(scenario())


@pytest.mark.parametrize(("host", "port"), [("gpu-box..internal", 1), ("127.0.0.1", 99999), ("a" * 64, 1), ("[::1", 1)])
def test_an_error_of_any_kind_while_connecting_is_a_failed_attempt(host: str, port: int) -> None:
    """Also where the check of URLs has let it through."""

    async def scenario() -> None:
        with pytest.raises(UpstreamConnectError):
            await UpstreamConnectionPool(SystemClock())._connect(ServerUrl("http", host, port))

    for run in (asyncio.run, uvloop.run):
        run(scenario())
