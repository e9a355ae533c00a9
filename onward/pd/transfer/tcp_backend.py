"""KV as bytes on the link itself. Works everywhere; the decode worker's own receiver writes its memory."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from onward.pd.transfer.backend import MemoryCopy, RemoteMemoryInfo
from onward.pd.transfer.framed_channel import FramedChannel


class TcpReceiverBackend:
    """Gives writers no access to memory: bytes come on the link, and `KvReceiver` decides where they go."""

    def register_sender(self, sender_id: int) -> RemoteMemoryInfo:
        return RemoteMemoryInfo()

    def unregister_sender(self, sender_id: int) -> None:
        pass

    def close(self) -> None:
        pass


class TcpSenderBackend:
    """Sends each batch behind the message that announces it. A batch counts as complete when the system has taken all
    of it. Our memory is no longer read then, and the bytes reach the peer's memory before later messages arrive."""

    def __init__(self, memory: np.ndarray, channel: FramedChannel) -> None:
        self._memory, self._channel = memory.data, channel
        self._ends: deque[int] = deque()
        self._num_complete = 0

    def start(self, copies: Sequence[MemoryCopy]) -> None:
        self._channel.send_payload([self._memory[offset : offset + count] for offset, _, count in copies])
        self._ends.append(self._channel.num_bytes_queued)
        self._channel.flush()

    def poll(self) -> int:
        while self._ends and self._ends[0] <= self._channel.num_bytes_sent:
            self._ends.popleft()
            self._num_complete += 1
        return self._num_complete

    def close(self) -> None:
        pass
