"""Sockets between instances: a decode instance's engine connects, a prefill instance's engine listens. See
`proto/handoff`.

Any message may be lost, and the protocol above repeats what matters. A message to a peer that is not connected is
refused at once and not queued, because a queued one could reach the peer's next incarnation. Sends never block. A
message that cannot be decoded raises `msgspec.DecodeError`; the receiver drops and counts it.
"""

import socket
from typing import Any

import msgspec
import zmq

from onward.errors import StartupError
from onward.proto.handoff import ToDecode, ToPrefill
from onward.transport.addresses import require_cluster_key, tcp_address
from onward.transport.curve import cluster_public, cluster_secret, set_curve_client, set_curve_server
from onward.transport.message_decoding import decode_message

PEER_QUEUE_LENGTH = 2048
"""Messages to one peer that may wait for the network."""
MAX_MESSAGE_BYTES = 64 << 20
"""Larger than any prompt and any prompt's logprobs. A peer that sends more is disconnected."""
HEARTBEAT_MS = 1000
SILENCE_MS = 3000
"""How long a connection may be silent. Then it is closed, and the client connects again."""
RECONNECT_MS = 50
MAX_RECONNECT_MS = 1000


class HandoffServerSocket:
    """Receives messages of decode instances at a prefill engine. Each sender is identified by its incarnation.

    The supervisor opened the listening socket and keeps it: a restarted engine takes over the same address, and
    connections made in between wait in the kernel's queue. `close` also closes the file descriptor.
    """

    def __init__(self, context: zmq.Context[Any], listening_fd: int, cluster_key: str) -> None:
        address = _address_of(listening_fd)
        require_cluster_key(address, cluster_key)
        self.pollable: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        _set_limits(self.pollable, address)
        self.pollable.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A peer may reconnect before this side has noticed the end of its old connection.
        self.pollable.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if cluster_key:
            set_curve_server(self.pollable, cluster_secret(cluster_key))
        self.pollable.setsockopt(zmq.USE_FD, listening_fd)
        self.pollable.bind(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToPrefill)

    def receive(self) -> tuple[str, ToPrefill] | None:
        """Returns the next message and the incarnation that sent it, or None."""
        try:
            frames = self.pollable.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        if len(frames) != 2:
            raise msgspec.DecodeError(f"a message of {len(frames) - 1} parts")
        return _sender(frames[0]), decode_message(self._decoder, frames[1])

    def send(self, receiver: str, message: ToDecode) -> bool:
        """Returns False if that instance is not connected or has stopped reading."""
        try:
            self.pollable.send_multipart([receiver.encode(), self._encoder.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        self.pollable.close()


class HandoffClientSocket:
    """A decode engine's socket to one prefill instance. It reconnects for as long as it is open. Raises `StartupError`
    for an invalid address, or for one that may not be used without a cluster key."""

    def __init__(self, context: zmq.Context[Any], address: str, cluster_key: str, incarnation: str) -> None:
        require_cluster_key(address, cluster_key)
        self.address = address
        self.pollable: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        _set_limits(self.pollable, address)
        self.pollable.setsockopt(zmq.IDENTITY, incarnation.encode())
        self.pollable.setsockopt(zmq.IMMEDIATE, 1)
        self.pollable.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self.pollable.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        if cluster_key:
            set_curve_client(self.pollable, cluster_public(cluster_key))
        try:
            self.pollable.connect(address)
        except zmq.ZMQError as fault:
            self.pollable.close()
            raise StartupError(f"{address!r} is not the address of a prefill instance: {fault}") from None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToDecode)

    def send(self, message: ToPrefill) -> bool:
        """Returns False if the instance is not connected or has stopped reading; the message is lost then."""
        try:
            self.pollable.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def receive(self) -> ToDecode | None:
        try:
            frames = self.pollable.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return decode_message(self._decoder, b"".join(frames))

    def close(self) -> None:
        self.pollable.close()


def _set_limits(sock: "zmq.Socket[bytes]", address: str) -> None:
    """Bounds the memory of a socket, and the time until a silent connection counts as dead."""
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.SNDHWM, PEER_QUEUE_LENGTH)
    sock.setsockopt(zmq.RCVHWM, PEER_QUEUE_LENGTH)
    sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    sock.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    sock.setsockopt(zmq.HEARTBEAT_TTL, SILENCE_MS)
    sock.setsockopt(zmq.HANDSHAKE_IVL, SILENCE_MS)
    sock.setsockopt(zmq.IPV6, int("[" in address))


def _address_of(listening_fd: int) -> str:
    """Returns the address in the form that zmq needs, although the socket is bound already. Makes the socket
    non-blocking, because zmq calls accept from its event loop."""
    listener = socket.socket(fileno=listening_fd)
    try:
        listener.setblocking(False)
        host, port = listener.getsockname()[:2]
    finally:
        listener.detach()
    return tcp_address(host, port)


def _sender(identity: bytes) -> str:
    """Returns the sender's name. zmq itself creates names that begin with a zero byte: for a connection that its peer
    has replaced by another one, and for a sender without a name."""
    if identity.startswith(b"\0"):
        raise msgspec.DecodeError("the sender has no name, or has connected anew")
    try:
        return identity.decode()
    except UnicodeDecodeError as fault:
        raise msgspec.DecodeError("the sender's name is no text") from fault
