"""The socket pair between the supervisor and one child: whole messages, in order, and an end that is felt.

Either side's death closes the pair, so a child can never outlive its supervisor unnoticed. Sends never block: a peer that
does not read (stopped, or stuck) is the supervisor's to kill, not to wait for.

A message that is too large for what a kernel may grant a socket lies in anonymous memory, and the socket carries the file
descriptor of that.
"""

import argparse
import ctypes
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import msgspec

from onward.proto.control import FromChild, ToChild
from onward.transport.message_decoding import decode_message

MAX_MESSAGE_BYTES = 16 << 20
"""Above a table of all the keys, and the longest template, that there can be."""
MAX_INLINE_BYTES = 1 << 17
BUFFER_BYTES = 1 << 20
"""Asked for. Many kernels grant less than half of it, as they are set up."""
MAX_FDS = 4
PR_SET_PDEATHSIG = 1
_IN_MEMORY = b"\xc1"
"""Begins no msgpack: the message is in the memory whose descriptor comes first."""

StartT = TypeVar("StartT")


class ChannelClosed(Exception):
    """The other side is gone."""


class SupervisorChannel(Protocol):
    """A child's end of its connection to the supervisor."""

    def send(self, message: FromChild) -> bool: ...
    def receive(self) -> ToChild | None: ...


class ControlChannel:
    """One end of the pair. Children decode `ToChild`; the supervisor passes `FromChild`."""

    def __init__(self, sock: socket.socket | int, message_type: Any = ToChild) -> None:
        self._sock = socket.socket(fileno=sock) if isinstance(sock, int) else sock
        self._sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self._fds: list[int] = []

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Any, fds: Sequence[int] = ()) -> bool:
        """False if the peer has stopped reading and its buffer is full. Raises `ChannelClosed` if it is gone.
        File descriptors are duplicated into the peer; ours stay ours to close."""
        body = self._encoder.encode(message)
        assert len(body) <= MAX_MESSAGE_BYTES, f"{type(message).__name__} has a bound"
        if len(body) <= MAX_INLINE_BYTES:
            return self._send(body, fds)
        with _memfd_with(body) as memory_fd:
            return self._send(_IN_MEMORY, (memory_fd, *fds))

    def receive(self) -> Any | None:
        """The next message, or None when there is none yet. Raises `msgspec.DecodeError` for what is no message: the
        supervisor drops that, and a child ends, since its successor is told everything anew."""
        self._close_fds()
        try:
            data, self._fds, _, _ = socket.recv_fds(self._sock, MAX_INLINE_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError as fault:
            raise ChannelClosed(str(fault)) from fault
        if not data:
            raise ChannelClosed("end of stream")
        return decode_message(self._decoder, _read_memory(self._fds) if data == _IN_MEMORY else data)

    def take_fds(self) -> list[int]:
        """The file descriptors that came with the last message. Whoever takes them closes them."""
        fds, self._fds = self._fds, []
        return fds

    def wait_receive(self) -> Any:
        """Blocks until a message is there. For a child's first message only."""
        self._sock.setblocking(True)
        try:
            message = self.receive()
        finally:
            self._sock.setblocking(False)
        assert message is not None
        return message

    def close(self) -> None:
        self._close_fds()
        self._sock.close()

    def _close_fds(self) -> None:
        """Closes received file descriptors that `take_fds` has not returned."""
        for fd in self.take_fds():
            os.close(fd)

    def _send(self, data: bytes, fds: Sequence[int]) -> bool:
        try:
            socket.send_fds(self._sock, [data], list(fds))
        except BlockingIOError:
            return False
        except OSError as fault:
            raise ChannelClosed(str(fault)) from fault
        return True


@contextmanager
def _memfd_with(body: bytes) -> Iterator[int]:
    fd = os.memfd_create("onward-message", os.MFD_CLOEXEC)
    try:
        os.pwrite(fd, body, 0)
        yield fd
    finally:
        os.close(fd)


def _read_memory(fds: list[int]) -> bytes:
    if not fds:
        raise ChannelClosed("a message came without the memory that it lies in: there are too many open files")
    fd = fds.pop(0)
    try:
        return os.pread(fd, min(os.fstat(fd).st_size, MAX_MESSAGE_BYTES), 0)
    finally:
        os.close(fd)


def control_pair() -> tuple[ControlChannel, socket.socket]:
    """The supervisor's end, and the raw socket for the child to inherit."""
    parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return ControlChannel(parent_end, FromChild), child_end


def join_supervisor(fd: int) -> ControlChannel:
    """A child's first act: its end of the pair. Ctrl-C reaches the whole group, and a service manager's SIGTERM every
    process, so only the supervisor heeds them; and a child that is deep in a computation when its supervisor dies is
    ended by the kernel."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    exit_with_parent()
    return ControlChannel(fd)


def join_supervisor_as(start_type: type[StartT]) -> tuple[ControlChannel, StartT]:
    """The channel that the command line names with `--control-fd`, and the first message, which says what to be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-fd", type=int, required=True)
    channel = join_supervisor(parser.parse_args().control_fd)
    start = channel.wait_receive()
    assert isinstance(start, start_type), f"the first message is {start_type.__name__}"
    return channel, start


def exit_with_parent(parent_pid: int | None = None) -> None:
    """The kernel kills this process when its parent dies. `parent_pid` names a parent that may be dead already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)
