"""One authenticated connection from a prefill worker to a decode worker: connecting, handshake and invitation, for both
ends.

    address   unix:@name       a local name without a file, which exists as long as its worker
              tcp:host:port    host as a number, so that no name server is needed

Messages after that are handled by `kv_sender` and `kv_receiver`. Only the start of a listening socket may wait, for its
port; the owner of a link enforces its deadlines.
"""

import contextlib
import errno
import ipaddress
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from onward.errors import OnwardError, StartupError
from onward.pd.transfer.backend import RemoteMemoryInfo, TransferFailed
from onward.pd.transfer.framed_channel import MAX_MESSAGE_BYTES, FramedChannel, LinkClosed
from onward.pd.transfer.handshake import ClusterSecret, new_nonce, refusal_reason
from onward.pd.transfer.transfer_messages import (
    HandshakeRefused,
    ReceiverChallenge,
    ReceiverWelcome,
    SenderHello,
    SenderProof,
    ToReceiver,
    ToWriter,
)
from onward.proto import SCHEMA_VERSION
from onward.proto.kv_transfer import KvEndpoint, KvLayout
from onward.transport.addresses import is_loopback

_MAX_UNAUTHENTICATED_BYTES = 1 << 14
"""Limit for a message from a peer that has not proved yet that it holds the key."""
_MESSAGES_PER_TURN = 64
_BACKLOG = 64
MAX_BIND_TRIES = 40
_BIND_PAUSE_S = 0.05
"""Two seconds in all. A killed worker has its port until the kernel has unmapped its memory."""
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""A machine that vanished silently is detected after eleven seconds, also by an end that only receives."""


class KvListenSocket:
    """The listening socket of a decode worker."""

    def __init__(
        self,
        backend: str,
        host: str,
        cluster_key: str,
        port: int = 0,
        *,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        if backend == "shm":
            name = f"onward-kv-{secrets.token_hex(16)}"
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._sock.bind(f"\0{name}")
            self.address = f"unix:@{name}"
        else:
            self._sock, self.address = _bind_tcp(host, port, cluster_key, pause)
        self._sock.setblocking(False)
        self._sock.listen(_BACKLOG)

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> socket.socket | None:
        try:
            sock, _ = self._sock.accept()
        except OSError:  # no connection, closed again, or no file descriptors left
            return None
        _set_socket_options(sock)
        return sock

    def close(self) -> None:
        self._sock.close()


class SenderLink:
    """The prefill worker's end of a connection."""

    def __init__(self, endpoint: KvEndpoint, layout: KvLayout, secret: ClusterSecret, has_key: bool) -> None:
        self._secret = secret
        self._greeting = SenderHello(SCHEMA_VERSION, new_nonce(), endpoint.incarnation, layout)
        self._is_connected = False
        family, self._address = _parse_address(endpoint.address, has_key)
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        self.channel = FramedChannel(self._sock, ToWriter)
        self.remote_memory: RemoteMemoryInfo | None = None
        """Set once the invitation has come. Its file descriptors are the link's until `take_remote_memory`."""
        self._has_memory_fds = False
        self.num_blocks = 0

    def connect(self) -> None:
        """Continues to connect. Called whenever the socket can be written, until `is_connected`. Raises
        `LinkClosed`."""
        assert not self._is_connected, "a link is connected once"
        code = self._sock.connect_ex(self._address)
        if code in (errno.EINPROGRESS, errno.EALREADY):
            return
        if code not in (0, errno.EISCONN):
            raise LinkClosed(f"the peer cannot be reached: {errno.errorcode.get(code, str(code))}")
        self._is_connected = True
        _set_socket_options(self._sock)
        self.channel.send(self._greeting)
        self.channel.flush()

    @property
    def is_connected(self) -> bool:
        return self._is_connected

    @property
    def wants_to_write(self) -> bool:
        return not self._is_connected or self.channel.wants_to_write

    def messages(self) -> Iterator[Any]:
        """Yields messages that came after the invitation, a bounded number at a time. Raises `LinkClosed`."""
        for _ in range(_MESSAGES_PER_TURN):
            message = self.channel.receive()
            if message is None:
                return
            if self.remote_memory is None:
                self._continue_handshake(message)
            else:
                yield message

    def take_remote_memory(self) -> RemoteMemoryInfo:
        assert self.remote_memory is not None, "taken once it has come"
        self._has_memory_fds = False
        return self.remote_memory

    def close(self) -> None:
        self.channel.close()
        if self._has_memory_fds:
            for fd in self.take_remote_memory().fds:
                os.close(fd)

    def _continue_handshake(self, message: Any) -> None:
        match message:
            case ReceiverChallenge(nonce, proof) if self._secret.verify(proof, "receiver", self._greeting, nonce):
                self.channel.send(SenderProof(self._secret.sign("writer", self._greeting, nonce)))
                self.channel.flush()
            case ReceiverChallenge():
                raise LinkClosed("the peer does not hold this cluster's key")
            case ReceiverWelcome(num_blocks, data):
                self.num_blocks = num_blocks
                self.remote_memory = RemoteMemoryInfo(data, tuple(self.channel.take_fds()))
                self._has_memory_fds = True
            case HandshakeRefused(reason):
                raise LinkClosed(f"the peer refused the connection: {reason}")
            case _:
                raise LinkClosed(f"the peer said {type(message).__name__} before it had invited us")


class ReceiverLink:
    """The decode worker's end of a connection. `invite` makes the invitation once the writer is authenticated."""

    def __init__(
        self,
        sock: socket.socket,
        secret: ClusterSecret,
        incarnation: str,
        layout: KvLayout,
        invite: Callable[[], RemoteMemoryInfo],
    ) -> None:
        self.channel = FramedChannel(sock, ToReceiver, _MAX_UNAUTHENTICATED_BYTES)
        self._secret, self._incarnation, self._layout, self._invite = secret, incarnation, layout, invite
        self._greeting: SenderHello | None = None
        self._nonce = new_nonce()
        self.is_open = False
        self.is_refused = False

    def messages(self, num_blocks: int) -> Iterator[Any]:
        """Yields messages that came after the invitation, a bounded number at a time. Raises `LinkClosed`."""
        for _ in range(_MESSAGES_PER_TURN):
            message = self.channel.receive()
            if message is None or self.is_refused:
                return
            if self.is_open:
                yield message
            else:
                self._continue_handshake(message, num_blocks)

    def refuse(self, reason: str) -> None:
        """Sends a refusal. The owner closes the link at once, because an unauthenticated peer is not waited for."""
        self.is_refused = True
        self.channel.send(HandshakeRefused(reason))
        with contextlib.suppress(LinkClosed):
            self.channel.flush()

    def close(self) -> None:
        self.channel.close()

    def _continue_handshake(self, message: Any, num_blocks: int) -> None:
        match message:
            case SenderHello() if self._greeting is None:
                self._greeting = message
                self.channel.send(ReceiverChallenge(self._nonce, self._secret.sign("receiver", message, self._nonce)))
                self.channel.flush()
            case SenderProof(proof) if self._greeting is not None:
                self._check_proof(self._greeting, proof, num_blocks)
            case _:
                self.refuse(f"{type(message).__name__} is not what a connection begins with")

    def _check_proof(self, greeting: SenderHello, proof: bytes, num_blocks: int) -> None:
        if not self._secret.verify(proof, "writer", greeting, self._nonce):
            self.refuse("the peer does not hold this cluster's key")
        elif reason := refusal_reason(greeting, self._incarnation, self._layout):
            self.refuse(reason)
        else:
            self._open(num_blocks)

    def _open(self, num_blocks: int) -> None:
        assert not self.is_open, "a link is opened once"
        assert not self.is_refused, "a refused link is not opened"
        try:
            invitation = self._invite()
        except (TransferFailed, OnwardError) as fault:
            self.refuse(str(fault))
            return
        self.is_open = True
        self.channel.max_message_bytes = MAX_MESSAGE_BYTES
        self.channel.send(ReceiverWelcome(num_blocks, invitation.data), invitation.fds)
        self.channel.flush()


def _bind_tcp(host: str, port: int, cluster_key: str, pause: Callable[[float], None]) -> tuple[socket.socket, str]:
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        number = ipaddress.ip_address(address[0])
        if number.is_unspecified:
            raise StartupError(f"KV transfers cannot listen on {host}: peers need an address that reaches this machine")
        if not cluster_key and not number.is_loopback:
            raise StartupError(
                f"KV transfers over {host} need a --cluster-key-file; without one only this machine is safe"
            )
        sock = _bound_socket(family, kind, address, pause)
    except OSError as fault:
        raise StartupError(f"KV transfers cannot listen on {host}, port {port}: {fault}; try --kv-port 0") from fault
    port = sock.getsockname()[1]
    return sock, f"tcp:[{number}]:{port}" if number.version == 6 else f"tcp:{number}:{port}"


def _bound_socket(family: int, kind: int, address: Any, pause: Callable[[float], None]) -> socket.socket:
    """Waits a moment for a port in use. It may be that of a worker that was killed with its supervisor: a new server
    sees only the end of the supervisor."""
    sock = socket.socket(family, kind)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restarted worker finds its port free
    for num_tries in range(1, MAX_BIND_TRIES + 1):
        try:
            sock.bind(address)
            break
        except OSError as fault:
            if fault.errno != errno.EADDRINUSE or num_tries == MAX_BIND_TRIES:
                sock.close()
                raise
        pause(_BIND_PAUSE_S)
    return sock


def _parse_address(address: str, has_key: bool) -> tuple[socket.AddressFamily, Any]:
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest.startswith("@"):
        return socket.AF_UNIX, "\0" + rest[1:]
    host, _, port = rest.rpartition(":")
    try:
        number = ipaddress.ip_address(host.strip("[]"))
        target = (str(number), int(port))
    except ValueError:
        number = target = None
    if kind != "tcp" or number is None or target is None:
        raise LinkClosed(f"{address!r} is not the address of a worker")
    if not has_key and not is_loopback(str(number)):
        raise LinkClosed(f"{address} is not on this machine, and without a cluster key only this machine is safe")
    return (socket.AF_INET6 if number.version == 6 else socket.AF_INET), target


def _set_socket_options(sock: socket.socket) -> None:
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if option := getattr(socket, name, None):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
