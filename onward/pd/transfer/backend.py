"""The interface of transfer backends, which move KV bytes between two workers. Leases, counting, checksums and
acknowledgements are above it and the same for all backends; see `kv_receiver` and `kv_sender`.

Each pair of workers has one authenticated connection (`authenticated_link`). Over it the decode worker sends an
invitation, with which the prefill worker can reach its memory in the backend's own way, and both report their progress.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class TransferFailed(Exception):
    """This connection can move no more bytes; the message says why."""


class MemoryCopy(NamedTuple):
    """A range of bytes in our KV memory, and its target in the peer's memory."""

    source_offset: int
    target_offset: int
    num_bytes: int


class RemoteMemoryInfo(NamedTuple):
    """The invitation that a decode worker sends: what a prefill worker needs to write to its KV memory. `fds` can
    only be passed to a process on the same machine."""

    data: bytes = b""
    fds: tuple[int, ...] = ()


class ReceiverBackend(Protocol):
    """The decode worker's part: lets writers reach its KV memory. `sender_id` is the number of the connection."""

    def register_sender(self, sender_id: int) -> RemoteMemoryInfo: ...

    def unregister_sender(self, sender_id: int) -> None:
        """Undoes the invitation of a writer whose connection has ended. When this returns, no bytes of that writer can
        arrive any more."""
        ...

    def close(self) -> None: ...


class SenderBackend(Protocol):
    """The prefill worker's part, one for each connection. Nothing here blocks. A batch that was started cannot be
    cancelled. To stop a push, the caller waits until its batches are complete, or ends the connection."""

    def start(self, copies: Sequence[MemoryCopy]) -> None:
        """Begins to move a batch. Raises `TransferFailed`."""
        ...

    def poll(self) -> int:
        """Returns how many of the started batches are complete by now. Their bytes are in the peer's memory, or reach
        it before any later message on the link. Raises `TransferFailed`."""
        ...

    def close(self) -> None: ...
