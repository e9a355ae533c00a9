"""Abstract Unix sockets by which a new server finds the old one, and `onward upgrade` and `onward scale` find a cluster.
They are named after the user and the address of the server.

Such a socket has no file, so a killed server leaves nothing behind. Other users of the machine can connect to it or
take its name, so each side checks the user id of the process at the other end before anything is sent.
"""

import os
import socket
import struct
from dataclasses import dataclass

from onward.errors import StartupError
from onward.transport.control_channel import ControlChannel

CONNECT_TIMEOUT_S = 5.0
_PEER_CREDENTIALS = struct.Struct("3i")
"""`struct ucred`: pid, uid, gid."""


@dataclass(slots=True)
class AdoptionPeer:
    """A process of the same user at the other end of such a socket."""

    channel: ControlChannel
    pid: int
    pidfd: int
    """Refers to this process even after its pid was given to another one."""

    def close(self) -> None:
        self.channel.close()
        os.close(self.pidfd)


def adoption_address(host: str, port: int) -> str:
    return f"\0onward-adopt-{os.geteuid()}-{host}-{port}"


def cluster_address(port: int) -> str:
    """Returns the address for changes of the `onward up` that serves its clients on `port`."""
    return f"\0onward-cluster-{os.geteuid()}-{port}"


def listen_at(address: str) -> socket.socket:
    """Raises `OSError` if the name is taken."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        sock.bind(address)
        sock.listen()
    except OSError:
        sock.close()
        raise
    return sock


def accept_peer(listener: socket.socket, message_type: object) -> AdoptionPeer | None:
    """Accepts a connection. Returns None if there is none, or if it is another user's, which is closed."""
    try:
        sock, _ = listener.accept()
    except OSError:
        return None
    return _checked_peer(sock, message_type)


def connect_to(address: str, message_type: object) -> AdoptionPeer | None:
    """Connects to a socket. Returns None if no process listens there. Raises `StartupError` if the process does not
    answer, or is another user's."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(CONNECT_TIMEOUT_S)
    try:
        sock.connect(address)
    except ConnectionRefusedError:
        sock.close()
        return None
    except OSError as fault:
        sock.close()
        raise StartupError(f"the server does not answer: {fault}") from fault
    peer = _checked_peer(sock, message_type)
    if peer is None:
        raise StartupError("the server belongs to another user, or has just ended")
    return peer


def credentials_of(sock: socket.socket) -> tuple[int, int, int]:
    """Returns pid, uid and gid of the process at the other end, from the kernel."""
    size = _PEER_CREDENTIALS.size
    return _PEER_CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))


def _checked_peer(sock: socket.socket, message_type: object) -> AdoptionPeer | None:
    pid, uid, _ = credentials_of(sock)
    if uid != os.geteuid():
        sock.close()
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:  # it is gone already
        sock.close()
        return None
    return AdoptionPeer(ControlChannel(sock, message_type), pid, pidfd)
