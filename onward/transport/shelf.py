"""Typed msgpack messages between the api processes of an instance and its shelf, over zmq.

Bounded by number here; by size they are bounded by those who send them (`api.shelf_link`).
"""

import asyncio
from typing import Any, cast

import msgspec
import zmq
import zmq.asyncio

from onward.proto.shelf import FromShelf, ToShelf
from onward.transport.curve import bind, connect

QUEUE_LENGTH = 4096


class ShelfSocket:
    """An api process's way to one incarnation of the shelf."""

    def __init__(self, address: str, api_incarnation: str) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        _bound(self._socket)
        self._socket.setsockopt(zmq.IDENTITY, api_incarnation.encode())
        connect(self._socket, address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromShelf)

    def send(self, message: ToShelf) -> bool:
        """Never blocks. False if the queue is full."""
        # Through the asyncio socket, as in `transport.zmq.EngineSocket`, and for the same reason.
        sent = self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        return cast("asyncio.Future[Any]", sent).exception() is None

    async def receive(self) -> FromShelf:
        return self._decoder.decode(await self._socket.recv())

    def close(self) -> None:
        self._socket.close()


class ShelfPort:
    """Where the shelf hears the api processes. Each is known by its incarnation."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self.pollable: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        _bound(self.pollable)
        self.pollable.setsockopt(zmq.ROUTER_MANDATORY, 1)
        bind(self.pollable, address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToShelf)

    def receive(self) -> tuple[str, ToShelf] | None:
        """The next message and who sent it, or None."""
        try:
            sender, data = self.pollable.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return sender.decode(), self._decoder.decode(data)

    def send(self, receiver: str, message: FromShelf) -> bool:
        """False if that api process is gone or has stopped reading."""
        try:
            self.pollable.send_multipart([receiver.encode(), self._encoder.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        self.pollable.close()


def _bound(socket: "zmq.Socket[Any]") -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, QUEUE_LENGTH)
    socket.setsockopt(zmq.RCVHWM, QUEUE_LENGTH)
