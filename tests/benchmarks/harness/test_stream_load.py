"""The load on a real stand-in, alone and behind a real router: what is counted has really passed."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from benchmarks.harness.stream_load import StreamLoad, check_whole, dechunked, run
from benchmarks.router.stand_in_instance import listen
from onward.config import RouterConfig
from onward.errors import ServerError
from onward.router.main import RouterProcess


def loaded(shape: StreamLoad) -> int:
    async def work() -> int:
        async with await listen() as stand_in:
            return await run(stand_in.sockets[0].getsockname()[1], shape, timeout_s=20)

    return asyncio.run(work())


async def behind_router(use: Callable[[int], Awaitable[int]]) -> int:
    async with await listen() as stand_in:
        instance = f"http://127.0.0.1:{stand_in.sockets[0].getsockname()[1]}"
        started = asyncio.Event()
        router = RouterProcess(RouterConfig(instances=instance, drain_s=0), "", on_started=started.set)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            running = asyncio.create_task(router.run(listening))
            try:
                await asyncio.wait_for(started.wait(), 10)
                return await use(listening.getsockname()[1])
            finally:
                router.stop()
                await running


@pytest.mark.parametrize("interval_ms", [0.0, 1.0])
def test_every_request_of_every_stream_is_answered_with_the_events_it_asked_for(interval_ms: float) -> None:
    assert loaded(StreamLoad(num_streams=3, requests_each=2, events_each=5, interval_ms=interval_ms)) > 0


def test_events_apart_are_read_one_by_one() -> None:
    shape = StreamLoad(num_streams=1, requests_each=1, events_each=10, interval_ms=5.0)
    assert loaded(shape) >= shape.num_events


def test_a_router_takes_the_stand_in_for_an_instance_and_passes_every_event_on() -> None:
    shape = StreamLoad(num_streams=3, requests_each=2, events_each=5, interval_ms=1.0)
    assert asyncio.run(behind_router(lambda port: run(port, shape, timeout_s=20))) > 0


def test_a_stream_that_misses_an_event_is_no_measurement() -> None:
    whole = b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(
        b"%x\r\n%b\r\n" % (len(part), part) for part in (b"id: 1;a\ndata: {}\n\n", b"data: [DONE]\n\n")
    )
    check_whole(whole + b"0\r\n\r\n", 1)
    with pytest.raises(ServerError, match="1 events and 1 ends instead of 2 and 1"):
        check_whole(whole + b"0\r\n\r\n", 2)


def test_chunks_are_joined_wherever_they_were_cut() -> None:
    assert dechunked(b"3\r\nid:\r\n2\r\n 1\r\n0\r\n\r\n") == b"id: 1"


def test_a_refusal_ends_the_load() -> None:
    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def work() -> None:
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
            await run(server.sockets[0].getsockname()[1], StreamLoad(1, 1, 1, 0.0), timeout_s=20)

    with pytest.raises(ServerError, match=r"refused a stream: HTTP/1\.1 503"):
        asyncio.run(work())
