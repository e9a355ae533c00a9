"""Framed messages, and bytes between them, over a stream socket that never blocks.

frame   | length, 4 bytes | msgpack |        bytes that a message has announced follow it without a frame

Bytes are sent from their source memory, and received into their target memory, without a copy. This module knows no
leases and no keys.
"""

import socket
import struct
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from onward.transport.message_decoding import decode_message

MAX_MESSAGE_BYTES = 1 << 20
MAX_FDS = 4
_MAX_QUEUED_BYTES = 64 << 20
_BYTES_PER_TURN = 16 << 20
"""Bytes that one connection moves before the others have their turn."""
_VIEWS_PER_CALL = 256
_SCRATCH_BYTES = 1 << 18
_LENGTH = struct.Struct("<I")
_FDS_SPACE = socket.CMSG_SPACE(MAX_FDS * array("i").itemsize)


class LinkClosed(Exception):
    """The connection has ended; the message says why."""


class MalformedMessage(LinkClosed):
    """The connection is open, but the peer has sent an invalid message."""


class PayloadReceived:
    """Returned in place of a message when all announced bytes have arrived."""


class FramedChannel:
    """`incoming` is the union of messages that may arrive."""

    def __init__(self, sock: socket.socket, incoming: Any, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        sock.setblocking(False)
        self._sock = sock
        self.max_message_bytes = max_message_bytes
        self.num_bytes_received = self.num_bytes_sent = self.num_bytes_queued = 0
        """Bytes since the beginning. Bytes that are queued and not sent yet still refer to the sender's memory."""
        self._queue: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(incoming)
        self._frame = memoryview(bytearray(_LENGTH.size))
        self._filled = 0
        self._is_body = False
        self._payload_views: deque[memoryview] | None = None
        self._num_dropping = 0
        self._takes_fds = sock.family == socket.AF_UNIX
        self._fds: list[int] = []

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def wants_to_write(self) -> bool:
        return bool(self._queue)

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Queues a message; `flush` sends it. File descriptors stay the caller's and must be open until then."""
        body = self._encoder.encode(message)
        assert len(body) <= MAX_MESSAGE_BYTES, "messages are small; bytes travel outside of them"
        self._enqueue(memoryview(_LENGTH.pack(len(body)) + body), tuple(fds))

    def send_payload(self, views: Sequence[memoryview]) -> None:
        for view in views:
            self._enqueue(view, ())

    def flush(self) -> None:
        """Sends as much as the socket takes now. Raises `LinkClosed`, also if too much is waiting."""
        left = _BYTES_PER_TURN
        if self.num_bytes_queued - self.num_bytes_sent > _MAX_QUEUED_BYTES:
            raise LinkClosed("the peer does not read")
        try:
            while self._queue and left > 0:
                sent = self._send_some()
                self.num_bytes_sent += sent
                assert self.num_bytes_sent <= self.num_bytes_queued, "only queued bytes are sent"
                left -= sent
                self._forget(sent)
        except BlockingIOError:
            return
        except OSError as fault:
            raise LinkClosed(f"the connection failed: {fault}") from fault

    def receive(self) -> Any | None:
        """Returns the next message, `PayloadReceived`, or None if neither is complete yet. Raises `LinkClosed`."""
        try:
            while True:
                if self._payload_views is not None:
                    return PayloadReceived() if self._take() else None
                self._fill_frame()
                if (message := self._framed()) is not None:
                    return message
        except BlockingIOError:
            return None
        except OSError as fault:
            raise LinkClosed(f"the connection failed: {fault}") from fault

    def receive_payload_into(self, views: Sequence[memoryview]) -> None:
        """Receives the next bytes into these views."""
        assert self._payload_views is None, "bytes are taken one message at a time"
        assert self._num_dropping == 0, "the bytes of the last message were discarded to their end"
        self._payload_views = deque(views)

    def discard_payload(self, count: int) -> None:
        """Discards the next `count` bytes."""
        self.receive_payload_into(())
        self._num_dropping = count

    def discard_rest_of_payload(self) -> None:
        """Discards the rest of the bytes that are being received."""
        if self._payload_views:
            self._num_dropping = sum(len(view) for view in self._payload_views)
            self._payload_views.clear()

    def discard_input(self) -> None:
        """Reads and discards the bytes that are available. Raises `LinkClosed` at the end of the stream."""
        try:
            for _ in range(_BYTES_PER_TURN // _SCRATCH_BYTES):
                if not self._sock.recv(_SCRATCH_BYTES):
                    raise LinkClosed("the peer closed the connection")
        except BlockingIOError:
            return
        except OSError as fault:
            raise LinkClosed(f"the connection failed: {fault}") from fault

    def take_fds(self) -> list[int]:
        """Returns the file descriptors that have arrived. The caller must close them."""
        fds, self._fds = self._fds, []
        return fds

    def shutdown_write(self) -> None:
        """Ends our direction of the stream. The peer's direction stays open until the peer closes it."""
        self._queue.clear()
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            return  # it is closed already, and the next read detects that

    def close(self) -> None:
        self._queue.clear()
        self._payload_views = None
        for fd in self.take_fds():
            socket.close(fd)
        self._sock.close()

    def _enqueue(self, view: memoryview, fds: tuple[int, ...]) -> None:
        self.num_bytes_queued += len(view)
        self._queue.append((view, fds))

    def _send_some(self) -> int:
        view, fds = self._queue[0]
        if fds:
            return socket.send_fds(self._sock, [view], list(fds))
        views = [view for view, _ in _until_fds(self._queue)]
        return self._sock.sendmsg(views)

    def _forget(self, sent: int) -> None:
        while sent:
            view, _ = self._queue.popleft()
            if len(view) > sent:
                self._queue.appendleft((view[sent:], ()))
                return
            sent -= len(view)

    def _fill_frame(self) -> None:
        while self._filled < len(self._frame):
            self._filled += self._read(self._frame[self._filled :])
        self._filled = 0

    def _framed(self) -> Any | None:
        """Handles a full frame buffer, which alternates between a length and its message. Returns the message."""
        if not self._is_body:
            [length] = _LENGTH.unpack(self._frame)
            if not 0 < length <= self.max_message_bytes:
                raise MalformedMessage(f"the peer announced a message of {length} bytes")
            self._frame, self._is_body = memoryview(bytearray(length)), True
            return None
        body, self._frame, self._is_body = self._frame, memoryview(bytearray(_LENGTH.size)), False
        try:
            return decode_message(self._decoder, body)
        except msgspec.MsgspecError as fault:
            raise MalformedMessage(f"the peer sent something that is not a message: {fault}") from fault

    def _read(self, view: memoryview) -> int:
        if self._takes_fds:
            count, control, _, _ = self._sock.recvmsg_into([view], _FDS_SPACE, socket.MSG_CMSG_CLOEXEC)
            self._keep_fds(control)
        else:
            count = self._sock.recv_into(view)
        return self._counted(count)

    def _counted(self, count: int) -> int:
        if count == 0:
            raise LinkClosed("the peer closed the connection")
        self.num_bytes_received += count
        return count

    def _keep_fds(self, control: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds += array("i", data[: len(data) - len(data) % array("i").itemsize])
        while len(self._fds) > MAX_FDS:
            socket.close(self._fds.pop())

    def _take(self) -> bool:
        """Receives announced bytes. Returns True when all have arrived."""
        assert self._payload_views is not None, "a message has announced the bytes that are taken"
        left = _BYTES_PER_TURN
        while self._payload_views or self._num_dropping:
            if left <= 0:
                return False
            left -= self._drop_some() if self._num_dropping else self._take_some(self._payload_views)
        self._payload_views = None
        return True

    def _take_some(self, pending: deque[memoryview]) -> int:
        views = [pending[i] for i in range(min(len(pending), _VIEWS_PER_CALL))]
        count = left = self._counted(self._sock.recvmsg_into(views)[0])
        while left:
            view = pending.popleft()
            if len(view) > left:
                pending.appendleft(view[left:])
                break
            left -= len(view)
        return count

    def _drop_some(self) -> int:
        count = self._counted(len(self._sock.recv(min(self._num_dropping, _SCRATCH_BYTES))))
        self._num_dropping -= count
        return count


def _until_fds(queue: deque[tuple[memoryview, tuple[int, ...]]]) -> list[tuple[memoryview, tuple[int, ...]]]:
    found = []
    for entry in queue:
        if entry[1] or len(found) == _VIEWS_PER_CALL:
            break
        found.append(entry)
    return found
