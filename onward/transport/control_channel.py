"""The socket pair between the supervisor and one child. It carries whole messages in order.

The death of either side closes the pair, so a child always notices that its supervisor has died. Sends never block: the
supervisor does not wait for a child that does not read (stopped, or stuck), but kills it.

A message that may be too large for the socket buffer that the kernel grants is written to anonymous memory, and the
socket carries the file descriptor of this memory.
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
"""Larger than the largest table of API keys together with the longest chat template."""
MAX_INLINE_BYTES = 1 << 17
BUFFER_BYTES = 1 << 20
"""Requested size of the socket buffers. Many kernels grant less than half of it by default."""
MAX_FDS = 4
PR_SET_PDEATHSIG = 1
_IN_MEMORY = b"\xc1"
"""Sent in place of a message that is in the memory of the first file descriptor. No msgpack message begins with this
byte."""

StartT = TypeVar("StartT")


class ChannelClosed(Exception):
    """The other side is gone."""


class SupervisorChannel(Protocol):
    """A child's end of its connection to the supervisor."""

    def send(self, message: FromChild) -> bool: ...
    def receive(self) -> ToChild | None: ...


class ControlChannel:
    """One end of the socket pair. Children decode `ToChild`; the supervisor passes `FromChild`."""

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
        """Returns False if the peer has stopped reading and its buffer is full. Raises `ChannelClosed` if it is gone.
        File descriptors are duplicated into the peer; the caller still has to close its own."""
        body = self._encoder.encode(message)
        assert len(body) <= MAX_MESSAGE_BYTES, f"{type(message).__name__} has a bound"
        if len(body) <= MAX_INLINE_BYTES:
            return self._send(body, fds)
        with _memfd_with(body) as memory_fd:
            return self._send(_IN_MEMORY, (memory_fd, *fds))

    def receive(self) -> Any | None:
        """Returns the next message, or None if there is none yet. Raises `msgspec.DecodeError` for an invalid one: the
        supervisor drops it, and a child exits, because its successor gets all state again."""
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
        """Returns the file descriptors of the last message. The caller must close them."""
        fds, self._fds = self._fds, []
        return fds

    def wait_receive(self) -> Any:
        """Blocks until there is a message, and returns it. Raises as `receive` does. Only for processes that have
        nothing else to do until then, such as a child before its first message."""
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
    """Returns the supervisor's end, and the raw socket for the child to inherit."""
    parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return ControlChannel(parent_end, FromChild), child_end


def join_supervisor(fd: int) -> ControlChannel:
    """Returns a child's end of the pair. A child calls this first."""
    depend_on_supervisor()
    return ControlChannel(fd)


def depend_on_supervisor(supervisor_pid: int | None = None) -> None:
    """Ties this process to the supervisor that has started it. Exits at once if `supervisor_pid` is given and the
    supervisor is dead already.

    Ignores SIGINT and SIGTERM, so that only the supervisor handles them: Ctrl-C reaches the whole process group, and a
    service manager sends SIGTERM to every process. The kernel kills the child when its supervisor dies, because a child
    that is busy with a computation would not notice.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    exit_with_parent(supervisor_pid)


def join_supervisor_as(start_type: type[StartT]) -> tuple[ControlChannel, StartT]:
    """Returns the channel that `--control-fd` on the command line names, and its first message, which has the settings
    of the child."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-fd", type=int, required=True)
    channel = join_supervisor(parser.parse_args().control_fd)
    start = channel.wait_receive()
    assert isinstance(start, start_type), f"the first message is {start_type.__name__}"
    return channel, start


def exit_with_parent(parent_pid: int | None = None) -> None:
    """Has the kernel kill this process when its parent dies. Exits at once if `parent_pid` is given and that parent is
    dead already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)
