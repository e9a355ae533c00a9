"""Messages of any length on a stream socket: four bytes that say how long, then the message."""

import socket
import struct

_LENGTH = struct.Struct("!I")


def send_frame(peer: socket.socket, data: bytes) -> None:
    peer.sendall(_LENGTH.pack(len(data)) + data)


def receive_frame(peer: socket.socket) -> bytes | None:
    """Returns the next message, or None if the peer has closed the connection before the end of one."""
    header = _receive(peer, _LENGTH.size)
    return None if header is None else _receive(peer, _LENGTH.unpack(header)[0])


def _receive(peer: socket.socket, num_bytes: int) -> bytes | None:
    parts: list[bytes] = []
    while num_bytes:
        part = peer.recv(min(num_bytes, 1 << 16))
        if not part:
            return None
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)
