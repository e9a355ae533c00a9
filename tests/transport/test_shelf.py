"""Every message between api and shelf survives the wire unchanged, over real sockets."""

import asyncio

from onward.proto.shelf import (
    Claim,
    Claimed,
    Delete,
    DropNamed,
    Dropped,
    Find,
    Forget,
    Found,
    FromShelf,
    Heard,
    Hello,
    Put,
    Release,
    Released,
    Show,
    Shown,
    ToShelf,
)
from onward.transport.curve import private_addresses
from onward.transport.shelf import ShelfSocket
from onward.transport.zmq import Wires
from tests.shelf.records import record_of

RECORD = record_of("r", names=("mine",), caller="anna", epoch=3, data=bytes(range(256)))
TO_SHELF: list[ToShelf] = [
    Hello(5),
    Put(RECORD),
    Forget("r", 3, "anna"),
    Find(1, "r", 2, None),
    Find(2, "r", 0, "anna"),
    Claim(3, "r", 4, ""),
    DropNamed(4, ["r", "mine"], False, "anna"),
    Delete(5, "r", "anna"),
    Shown(5, RECORD),
    Released(6, None, 7),
]
FROM_SHELF: list[FromShelf] = [
    Heard(5),
    Found(1, RECORD),
    Found(1, None),
    Claimed(3),
    Claimed(3, 9),
    Dropped(4, ["r"], {"s": ["mine", "s"]}),
    Show(5, "r"),
    Release(6, "r", 7, "anna"),
]


def test_messages_survive_both_ways_and_each_process_is_known_by_its_name() -> None:
    to_bind, to_connect = private_addresses("shelf-of-a-test")

    async def scenario() -> None:
        wires = Wires()
        port = wires.shelf_port(to_bind)
        socket = ShelfSocket(to_connect, "api-1")
        try:
            assert not port.send("api-1", FROM_SHELF[0]), "it has not spoken yet"
            assert [socket.send(message) for message in TO_SHELF] == [True] * len(TO_SHELF)
            received: list[tuple[str, ToShelf]] = []
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
