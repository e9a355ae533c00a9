"""Between the api processes of an instance and an owner of something that they share: the engine, or the stream store.

Typed msgpack messages over zmq. Both ends have a bound on what they queue; what would go over it is refused, and the
protocols above repair the loss.
"""

import asyncio
import logging
from typing import Any, Generic, TypeVar, cast

import msgspec
import zmq
import zmq.asyncio

from onward import log
from onward.transport.curve import bind, connect
from onward.transport.message_decoding import decode_message

_logger = logging.getLogger(__name__)

ToOwnerT = TypeVar("ToOwnerT")
FromOwnerT = TypeVar("FromOwnerT")


class ApiClientSocket(Generic[ToOwnerT, FromOwnerT]):
    """An api process's way to one incarnation of the owner. `message_type`: the type of what it says."""

    def __init__(self, address: str, api_incarnation: str, message_type: Any, queue_length: int) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        _set_limits(self._socket, queue_length)
        self._socket.setsockopt(zmq.IDENTITY, api_incarnation.encode())
        connect(self._socket, address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromOwnerT] = msgspec.msgpack.Decoder(message_type)

    def send(self, message: ToOwnerT) -> bool:
        """Never blocks. False if the queue is full."""
        # Through the asyncio socket, which looks for arrivals after each send: zmq tells of them only once, and a
        # plain send would swallow that. With NOBLOCK the future is done when the call returns.
        future = self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        return cast("asyncio.Future[Any]", future).exception() is None

    async def receive(self) -> FromOwnerT:
        while True:
            try:
                return decode_message(self._decoder, await self._socket.recv())
            except msgspec.DecodeError as fault:
                _log_dropped("owner", fault)

    def close(self) -> None:
        self._socket.close()


class ApiServerSocket(Generic[ToOwnerT, FromOwnerT]):
    """Where the engine or stream store receives messages of api processes. Each api process is known by its incarnation.
    `message_type`: the type of their messages."""

    def __init__(self, context: zmq.Context[Any], address: str, message_type: Any, queue_length: int) -> None:
        self.pollable: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        _set_limits(self.pollable, queue_length)
        self.pollable.setsockopt(zmq.ROUTER_MANDATORY, 1)
        bind(self.pollable, address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToOwnerT] = msgspec.msgpack.Decoder(message_type)
        self._queue_length = queue_length

    def receive(self) -> tuple[str, ToOwnerT] | None:
        """The next message and who sent it, or None."""
        for _ in range(self._queue_length):
            try:
                sender, data = self.pollable.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            try:
                return sender.decode(), decode_message(self._decoder, data)
            except msgspec.DecodeError as fault:
                _log_dropped(sender.decode(), fault)
        return None

    def send(self, receiver: str, message: FromOwnerT) -> bool:
        """False if that api process is gone or has stopped reading."""
        try:
            self.pollable.send_multipart([receiver.encode(), self._encoder.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        self.pollable.close()


def _log_dropped(sender: str, fault: msgspec.DecodeError) -> None:
    """A message that cannot be read is a lost one, which the protocols above repair. It must not end the reader."""
    _logger.error(log.event("message dropped", sender=sender, error=str(fault)))


def _set_limits(zmq_socket: "zmq.Socket[Any]", queue_length: int) -> None:
    zmq_socket.setsockopt(zmq.LINGER, 0)
    zmq_socket.setsockopt(zmq.SNDHWM, queue_length)
    zmq_socket.setsockopt(zmq.RCVHWM, queue_length)
