"""KV through memory that both workers have mapped: the decode worker's pool, handed over as a file descriptor.

The receiver cannot take back what it has handed over. A writer is quiet when it says so, or when its process is dead: the
kernel closes a killed process's connections after it has stopped all of its threads.
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


class ShmReceiverBackend:
    def __init__(self, fd: int, num_bytes: int) -> None:
        self._invitation = RemoteMemoryInfo(msgspec.msgpack.encode(_ShmRemoteMemory(num_bytes)), (fd,))

    def register_sender(self, sender_id: int) -> RemoteMemoryInfo:
        return self._invitation

    def unregister_sender(self, sender_id: int) -> None:
        """Its connection ended, by its own doing or with its life. Either way it writes no more."""

    def close(self) -> None:
        pass


class ShmSenderBackend:
    def __init__(self, memory: np.ndarray, invitation: RemoteMemoryInfo) -> None:
        self._source = memory
        try:
            [fd] = invitation.fds
            num_bytes = msgspec.msgpack.decode(invitation.data, type=_ShmRemoteMemory).num_bytes
            # The peer cannot make it smaller under our hands, which would kill this process.
            if os.fstat(fd).st_size != num_bytes or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise TransferFailed("the peer's memory is not what it says")
            self._mapping = mmap.mmap(fd, num_bytes)
        except (ValueError, msgspec.MsgspecError, OSError) as fault:
            raise TransferFailed(f"the peer's memory cannot be mapped: {fault}") from fault
        finally:
            for fd in invitation.fds:
                os.close(fd)
        self._target = np.frombuffer(self._mapping, np.uint8)
        self._num_complete = 0

    def start(self, copies: Sequence[MemoryCopy]) -> None:
        for source_at, target_at, count in copies:
            if target_at + count > len(self._target):
                raise TransferFailed("a copy lies outside of the peer's memory")
            assert source_at + count <= len(self._source), "a copy reads within our own pool"
            # numpy copies without holding up the other threads; a memoryview would not.
            self._target[target_at : target_at + count] = self._source[source_at : source_at + count]
        self._num_complete += 1

    def poll(self) -> int:
        return self._num_complete

    def close(self) -> None:
        self._target = np.empty(0, np.uint8)
        self._mapping.close()
