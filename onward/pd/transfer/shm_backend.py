"""KV through memory that both workers have mapped: the decode worker's pool, passed on as a file descriptor.

The receiver cannot revoke access to memory that it has passed on. A writer has stopped when it reports so, or when its
process is dead: the kernel closes a killed process's connections after it has stopped all of its threads.

The memory may outlive the receiver. So its supervisor has given it a writer token (`supervisor.peer_writer_watch`),
which is passed on with the memory. A writer closes the token after it has unmapped the memory, never before.
"""

import fcntl
import mmap
import os
from collections.abc import Sequence

import msgspec
import numpy as np

from onward.pd.transfer.backend import MemoryCopy, RemoteMemoryInfo, TransferFailed

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class _ShmRemoteMemory(msgspec.Struct, frozen=True):
    num_bytes: int
    num_fds: int
    """Number of file descriptors that must arrive. A writer with too many open files may get the memory without its
    token."""


class ShmReceiverBackend:
    def __init__(self, fd: int, num_bytes: int, writer_token_fd: int | None = None) -> None:
        fds = (fd,) if writer_token_fd is None else (fd, writer_token_fd)
        self._invitation = RemoteMemoryInfo(msgspec.msgpack.encode(_ShmRemoteMemory(num_bytes, len(fds))), fds)

    def register_sender(self, sender_id: int) -> RemoteMemoryInfo:
        return self._invitation

    def unregister_sender(self, sender_id: int) -> None:
        """Does nothing: the writer has closed its connection or is dead, and writes no more in either case."""

    def close(self) -> None:
        pass


class ShmSenderBackend:
    def __init__(self, memory: np.ndarray, invitation: RemoteMemoryInfo) -> None:
        self._source = memory
        self._writer_token_fds = invitation.fds[1:]
        try:
            self._mapping = _map_remote(invitation)
        except BaseException:
            self._close_writer_token()
            raise
        finally:
            for fd in invitation.fds[:1]:
                os.close(fd)
        self._target = np.frombuffer(self._mapping, np.uint8)
        self._num_complete = 0

    def start(self, copies: Sequence[MemoryCopy]) -> None:
        for source_at, target_at, count in copies:
            if target_at + count > len(self._target):
                raise TransferFailed("a copy lies outside of the peer's memory")
            assert source_at + count <= len(self._source), "a copy reads within our own pool"
            # numpy copies without blocking the other threads; a memoryview would block them.
            self._target[target_at : target_at + count] = self._source[source_at : source_at + count]
        self._num_complete += 1

    def poll(self) -> int:
        return self._num_complete

    def close(self) -> None:
        self._target = np.empty(0, np.uint8)
        self._mapping.close()
        self._close_writer_token()  # not before: the receiver's supervisor now assumes that this writer has stopped

    def _close_writer_token(self) -> None:
        for fd in self._writer_token_fds:
            os.close(fd)
        self._writer_token_fds = ()


def _map_remote(invitation: RemoteMemoryInfo) -> mmap.mmap:
    """Maps the peer's memory. Raises `TransferFailed`."""
    try:
        remote = msgspec.msgpack.decode(invitation.data, type=_ShmRemoteMemory)
        if len(invitation.fds) != remote.num_fds or not invitation.fds:
            raise TransferFailed("the peer's memory has not come whole: there may be too many open files")
        fd = invitation.fds[0]
        # With these seals the peer cannot make the memory smaller while it is mapped, which would kill this process.
        if os.fstat(fd).st_size != remote.num_bytes or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise TransferFailed("the peer's memory is not what it says")
        return mmap.mmap(fd, remote.num_bytes)
    except (ValueError, msgspec.MsgspecError, OSError) as fault:
        raise TransferFailed(f"the peer's memory cannot be mapped: {fault}") from fault
