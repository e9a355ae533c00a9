"""What a way of moving KV bytes between two workers must be able to do. Leases, counting, checksums and acknowledgements
are above it and the same for all; see `kv_receiver` and `kv_sender`.

Each pair of workers has one authenticated connection (`link`). Over it the decode worker invites the prefill worker to
reach its memory in the backend's own way, and both say what has happened.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class TransferFailed(Exception):
    """This connection can move no more bytes; the message says why."""


class MemoryCopy(NamedTuple):
    """Bytes of our KV memory, and where they go in the peer's."""

    source_offset: int
    target_offset: int
    num_bytes: int


class RemoteMemoryInfo(NamedTuple):
    """What a writer needs to reach our memory. File descriptors travel over local connections only."""

    data: bytes = b""
    fds: tuple[int, ...] = ()


class ReceiverBackend(Protocol):
    """The decode worker's part: lets writers reach its KV memory. `sender_id` is the number of the connection."""

    def register_sender(self, sender_id: int) -> RemoteMemoryInfo: ...

    def unregister_sender(self, sender_id: int) -> None:
        """Its connection has ended: undo the invitation. When this returns, nothing of that writer's can arrive."""
        ...

    def close(self) -> None: ...


class SenderBackend(Protocol):
    """The prefill worker's part, one for each connection. Nothing here blocks. What was started cannot be called
    back: who stops a push waits until its batches are complete, or ends the connection."""

    def start(self, copies: Sequence[MemoryCopy]) -> None:
        """Begins to move a batch. Raises `TransferFailed`."""
        ...

    def poll(self) -> int:
        """How many of the batches that were started are complete by now: their bytes lie in the peer's memory.
        Raises `TransferFailed`."""
        ...

    def close(self) -> None: ...
