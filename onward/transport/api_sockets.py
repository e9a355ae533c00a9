"""Sockets between the api processes of an instance and an owner of shared state: the engine or the stream store.

They carry typed msgpack messages over zmq. Both ends have a bounded queue; a message beyond the bound is refused, and
the protocols above repair the loss.
"""

import logging
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec
import zmq

from onward import log
from onward.transport.curve import bind, connect
from onward.transport.message_decoding import decode_message

if TYPE_CHECKING:
    import asyncio

_logger = logging.getLogger(__name__)

ToOwnerT = TypeVar("ToOwnerT")
FromOwnerT = TypeVar("FromOwnerT")


class ApiClientSocket(Generic[ToOwnerT, FromOwnerT]):
    """An api process's socket to one incarnation of the owner. `message_type`: the type of the owner's messages."""

    def __init__(self, address: str, api_incarnation: str, message_type: Any, queue_length: int) -> None:
        import zmq.asyncio  # not for the engine, which starts faster without asyncio

        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        _set_limits(self._socket, queue_length)
        self._socket.setsockopt(zmq.IDENTITY, api_incarnation.encode())
        connect(self._socket, address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromOwnerT] = msgspec.msgpack.Decoder(message_type)

    def send(self, message: ToOwnerT) -> bool:
        """Sends a message and never blocks. Returns False if the queue is full; the message is not sent then."""
        # The asyncio socket checks for arrivals after each send. zmq reports an arrival only once, and a plain send
        # would swallow the report. With NOBLOCK the future is done when the call returns.
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
    """The engine's or stream store's socket to all api processes. Each api process is known by its incarnation.
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
        """Returns the next message and its sender, or None."""
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
        """Returns False if that api process is gone or has stopped reading."""
        try:
            self.pollable.send_multipart([receiver.encode(), self._encoder.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        self.pollable.close()


def _log_dropped(sender: str, fault: msgspec.DecodeError) -> None:
    """Logs a message that cannot be decoded and is dropped. The receiver continues, and the protocols above repair the
    loss."""
    _logger.error(log.event("message dropped", sender=sender, error=str(fault)))


def _set_limits(zmq_socket: "zmq.Socket[Any]", queue_length: int) -> None:
    zmq_socket.setsockopt(zmq.LINGER, 0)
    zmq_socket.setsockopt(zmq.SNDHWM, queue_length)
    zmq_socket.setsockopt(zmq.RCVHWM, queue_length)
