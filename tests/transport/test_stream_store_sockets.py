"""Every message between api and stream store survives the wire unchanged, over real sockets."""

import asyncio

from onward.proto.stream_store import (
    ClaimAttempt,
    ClaimReply,
    Delete,
    DropByName,
    DropReply,
    DropSuperseded,
    FindEntry,
    FindReply,
    FromStreamStore,
    LiveStreamReply,
    PutEntry,
    QueryLiveStream,
    ReleaseAttempt,
    ReleaseReply,
    StoreHeartbeat,
    StoreHeartbeatReply,
    ToStreamStore,
)
from onward.transport.curve import make_private_address
from onward.transport.stream_store_sockets import StreamStoreClientSocket
from onward.transport.zmq_sockets import SocketPoller
from tests.stream_store.store_entries import record_of

RECORD = record_of("r", aliases=("mine",), caller="anna", attempt_epoch=3, data=bytes(range(256)))
TO_SHELF: list[ToStreamStore] = [
    StoreHeartbeat(5),
    PutEntry(RECORD),
    DropSuperseded("r", 3, "anna"),
    FindEntry(1, "r", 2, None),
    FindEntry(2, "r", 0, "anna"),
    ClaimAttempt(3, "r", 4, ""),
    DropByName(4, ["r", "mine"], False, "anna"),
    Delete(5, "r", "anna"),
    LiveStreamReply(5, RECORD),
    ReleaseReply(6, None, 7),
]
FROM_SHELF: list[FromStreamStore] = [
    StoreHeartbeatReply(5),
    FindReply(1, RECORD),
    FindReply(1, None),
    ClaimReply(3),
    ClaimReply(3, 9),
    DropReply(4, ["r"], {"s": ["mine", "s"]}),
    QueryLiveStream(5, "r"),
    ReleaseAttempt(6, "r", 7, "anna"),
]


def test_messages_survive_both_ways_and_each_process_is_known_by_its_name() -> None:
    to_bind, to_connect = make_private_address("shelf-of-a-test")

    async def scenario() -> None:
        wires = SocketPoller()
        port = wires.stream_store_server(to_bind)
        assert not port.send("api-1", FROM_SHELF[0]), "it has not connected yet"
        socket = StreamStoreClientSocket(to_connect, "api-1")
        try:
            assert [socket.send(message) for message in TO_SHELF] == [True] * len(TO_SHELF)
            received: list[tuple[str, ToStreamStore]] = []
            while len(received) < len(TO_SHELF):
                await asyncio.to_thread(wires.wait, 1000)
                while (one := port.receive()) is not None:
                    received.append(one)
            assert received == [("api-1", message) for message in TO_SHELF]
            assert [port.send("api-1", message) for message in FROM_SHELF] == [True] * len(FROM_SHELF)
            assert [await socket.receive() for _ in FROM_SHELF] == FROM_SHELF
        finally:
            socket.close()
            wires.close()

    asyncio.run(scenario())
