"""Collects the writes of one turn of the event loop to many connections, and performs them together at its end.

A write to a sleeping reader has to wake it, which takes longer than the write itself. Readers that share a process,
such as the many streams of one client or router, are woken by the first of several writes. They are still awake for the
next ones, if no other work comes between them. All data for one connection in one turn, such as a head and a short
body, is one write.
"""

import asyncio
from collections.abc import Callable
from typing import Any

MAX_CONNECTIONS = 64
"""Number of connections with pending data that are written before the turn is over, so that no text waits until the text
of many others is made."""


class WriteBatcher:
    """Batches the writes of one event loop."""

    def __init__(self) -> None:
        self._pending: list[Callable[[], None]] = []

    def add(self, flush: Callable[[], None]) -> None:
        """Calls `flush` at the end of this turn, or earlier."""
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
    """Wraps a connection's transport and delays its writes to the end of the turn. Flow control stays with the
    wrapped transport: it calls the protocol's `pause_writing` when the batch is written to it, not during `write`."""

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
        """Closes the transport after writing the pending data."""
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
