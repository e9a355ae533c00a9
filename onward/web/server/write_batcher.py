"""What one turn of the event loop writes to many connections, written together at its end.

A write that finds its reader asleep has to wake it, and that takes longer than the write itself. Readers who share a
process, as the many streams of one client or router do, are woken by the first of several writes and are still awake at the
next ones, if nothing is done between them. And what is written to one connection in one turn, as a head and a short body
are, is one write.
"""

import asyncio
from collections.abc import Callable
from typing import Any

MAX_CONNECTIONS = 64
"""Are written to before the turn is over: nobody's text waits until that of very many others is made."""


class WriteBatcher:
    """Of one event loop."""

    def __init__(self) -> None:
        self._pending: list[Callable[[], None]] = []

    def add(self, flush: Callable[[], None]) -> None:
        """Calls it at the end of this turn, or earlier."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(flush)
        if len(self._pending) >= MAX_CONNECTIONS:
            self._flush()

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        for flush in pending:
            flush()


class BatchedTransport(asyncio.Transport):
    """A connection's transport, but for when it writes. What a protocol is told of full buffers it is told by that one,
    when the burst comes."""

    def __init__(self, transport: asyncio.Transport, batcher: WriteBatcher) -> None:
        super().__init__()
        self._transport = transport
        self._batcher = batcher
        self._parts: list[bytes | bytearray | memoryview] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._parts.append(data)
        if len(self._parts) == 1:
            self._batcher.add(self._flush)

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + sum(map(len, self._parts))

    def close(self) -> None:
        """After what was written before."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._parts = []
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()
