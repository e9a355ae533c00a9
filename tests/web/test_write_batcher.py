"""Writes that wait for the end of a turn: everything arrives, once and in order, however the connection goes on."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from onward.web.server.write_batcher import MAX_CONNECTIONS, BatchedTransport, WriteBatcher


class Server(asyncio.Protocol):
    """Keeps the transports of all its connections."""

    transports: list[BatchedTransport]

    def __init__(self, burst: WriteBatcher, transports: list[BatchedTransport]) -> None:
        self._burst = burst
        self.transports = transports

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transports.append(BatchedTransport(transport, self._burst))


async def _serve(
    num_connections: int, write: Callable[[list[BatchedTransport]], Awaitable[None]]
) -> list[bytes | ConnectionResetError]:
    """What each client has read up to the end of its connection."""
    transports: list[BatchedTransport] = []
    burst, loop = WriteBatcher(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: Server(burst, transports), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(num_connections)]
        while len(transports) < num_connections:
            await asyncio.sleep(0)
        await write(transports)
        read = await asyncio.gather(*(reader.read() for reader, _ in streams), return_exceptions=True)
        for _, writer in streams:
            writer.close()
    assert all(isinstance(one, bytes | ConnectionResetError) for one in read)
    return [one for one in read if isinstance(one, bytes | ConnectionResetError)]


@pytest.mark.parametrize("num_connections", [1, MAX_CONNECTIONS - 1, MAX_CONNECTIONS, 2 * MAX_CONNECTIONS + 3])
def test_everybody_gets_all_of_several_turns_in_order(num_connections: int) -> None:
    async def write(transports: list[BatchedTransport]) -> None:
        for turn in range(3):
            for index, transport in enumerate(transports):
                transport.write(b"%d:%d " % (index, turn))
                transport.write(b"more ")
            await asyncio.sleep(0)
        for transport in transports:
            transport.close()

    received = asyncio.run(_serve(num_connections, write))
    expected = [b"".join(b"%d:%d more " % (index, turn) for turn in range(3)) for index in range(num_connections)]
    assert sorted(received, key=str) == sorted(expected, key=str)


def test_what_was_written_before_a_close_arrives_and_nothing_after_it() -> None:
    async def write(transports: list[BatchedTransport]) -> None:
        transports[0].write(b"last words")
        transports[0].close()
        assert transports[0].is_closing()
        transports[0].write(b", and more")

    assert asyncio.run(_serve(1, write)) == [b"last words"]


def test_an_aborted_connection_gets_nothing_that_was_waiting_and_the_others_theirs() -> None:
    async def write(transports: list[BatchedTransport]) -> None:
        for transport in transports:
            transport.write(b"text")
        transports[1].abort()
        await asyncio.sleep(0)
        for transport in transports:
            transport.close()

    received = asyncio.run(_serve(3, write))
    assert received.count(b"text") == 2


def test_what_waits_counts_as_unread() -> None:
    sizes: list[int] = []

    async def write(transports: list[BatchedTransport]) -> None:
        transports[0].write(b"0123456789")
        sizes.append(transports[0].get_write_buffer_size())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        sizes.append(transports[0].get_write_buffer_size())
        transports[0].close()

    assert asyncio.run(_serve(1, write)) == [b"0123456789"]
    assert sizes == [10, 0]
