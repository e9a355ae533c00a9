"""HTTP POSTs with streamed answers, over kept connections.

aiohttp costs a router 20 µs for each event that arrives alone, most of it between its parser and the reader. Here
httptools, the parser of the server side, passes data to the reader directly.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol

import httptools

from onward.clock import Clock
from onward.transport.http_urls import ServerUrl, parse_server_url

CONNECT_TIMEOUT_S = 3.0
KEEP_ALIVE_S = 15.0
"""Shorter than the instances': a connection that we take up again is still open at their side."""
MAX_IDLE_CONNECTIONS = 256
"""Connections that are kept, of all hosts together."""
MAX_BUFFERED_BYTES = 1 << 20
"""Bytes that may wait for a slow client before reading from the instance pauses."""


class UpstreamConnectError(Exception):
    """No connection could be made, so no work has begun."""


class UpstreamResponse(Protocol):
    """The part of `aiohttp.ClientResponse` that an attempt uses."""

    status: int

    @property
    def headers(self) -> Mapping[str, str]: ...
    def iter_any(self) -> AsyncIterator[bytes]: ...
    def at_eof(self) -> bool: ...
    def release(self) -> None: ...
    def close(self) -> None: ...


class UpstreamConnectionPool:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._idle: dict[ServerUrl, deque[tuple[float, UpstreamConnection]]] = {}
        self._num_idle = 0

    async def post(self, url: str, path: str, body: bytes, headers: Mapping[str, str]) -> "UpstreamConnection":
        """Sends the request and returns its connection when the status has arrived. The caller must close it unless it
        reads the whole body."""
        try:
            server = parse_server_url(url)
        except ValueError as fault:
            raise UpstreamConnectError(str(fault)) from None
        connection = self._take_idle(server) or await self._connect(server)
        connection.send_request(server.authority, path, body, headers)
        try:
            await connection.wait_for_headers()
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        for waiting in self._idle.values():
            for _, connection in waiting:
                connection.close()
        self._idle, self._num_idle = {}, 0

    def _take_idle(self, server: ServerUrl) -> "UpstreamConnection | None":
        waiting = self._idle.get(server)
        while waiting:
            until_s, connection = waiting.pop()
            self._num_idle -= 1
            assert self._num_idle >= 0, "the number of idle connections is never negative"
            if connection.is_open and until_s > self._clock.now_s():
                return connection
            connection.close()
        return None

    async def _connect(self, server: ServerUrl) -> "UpstreamConnection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(lambda idle_connection: self._return_idle(server, idle_connection)),
                    server.host,
                    server.effective_port,
                    ssl=server.is_tls or None,
                )
        except Exception as fault:
            # Resolvers, TLS and event loops each raise errors of their own kinds. Nothing was sent, so all mean the same.
            raise UpstreamConnectError(str(fault) or type(fault).__name__) from None
        return connection

    def _return_idle(self, server: ServerUrl, connection: "UpstreamConnection") -> None:
        assert connection.is_open, "only an open connection is kept"
        if self._num_idle >= MAX_IDLE_CONNECTIONS:
            self._close_stale()
        if self._num_idle >= MAX_IDLE_CONNECTIONS:
            connection.close()
            return
        self._num_idle += 1
        self._idle.setdefault(server, deque()).append((self._clock.now_s() + KEEP_ALIVE_S, connection))

    def _close_stale(self) -> None:
        """Closes connections to hosts that are gone, and idle ones that a busier time has left."""
        now_s, idle = self._clock.now_s(), self._idle
        self._idle, self._num_idle = {}, 0
        for server, waiting in idle.items():
            for until_s, connection in waiting:
                if connection.is_open and until_s > now_s:
                    self._num_idle += 1
                    self._idle.setdefault(server, deque()).append((until_s, connection))
                else:
                    connection.close()


class UpstreamConnection(asyncio.Protocol):
    """Sends one request after another and reads the answer of the last one. The transport and httptools' parser call
    it."""

    def __init__(self, keep: Callable[["UpstreamConnection"], None]) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_open = False
        self._keep = keep
        self._transport: Any = None
        self._parser: httptools.HttpResponseParser | None = None
        """Parser of the awaited answer; None before the first request."""
        self._chunks: list[bytes] = []
        self._num_held = 0
        self._is_paused = self._has_begun = self._has_ended = self._may_be_kept = False
        self._lost: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    # Called by the client.

    def send_request(self, host: str, path: str, body: bytes, headers: Mapping[str, str]) -> None:
        assert self._transport is not None, "a request is sent over a connection that was made"
        assert not self._is_paused, "the last answer was read to its end"
        self.status, self.headers = 0, {}
        self._chunks.clear()
        self._num_held = 0
        self._has_begun = self._has_ended = self._may_be_kept = False
        self._parser = httptools.HttpResponseParser(self)
        lines = [f"POST {path} HTTP/1.1", f"host: {host}", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._transport.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        self._transport.write(body)

    async def wait_for_headers(self) -> None:
        while not self._has_begun:
            await self._wait_for_data()

    async def iter_any(self) -> AsyncIterator[bytes]:
        """Yields the bytes of the body as they arrive; bytes that have arrived together are one chunk. Raises if the
        connection is lost."""
        while True:
            if self._chunks:
                chunk = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
                self._chunks.clear()
                self._num_held = 0
                if self._is_paused:
                    self._is_paused = False
                    self._transport.resume_reading()
                yield chunk
            elif self._has_ended:
                return
            else:
                await self._wait_for_data()

    def at_eof(self) -> bool:
        return self._has_ended and not self._chunks

    def release(self) -> None:
        """Keeps the connection for another request if its answer was read to the end; otherwise closes it."""
        if self.is_open and self._may_be_kept and self.at_eof():
            self._keep(self)
        else:
            self.close()

    def close(self) -> None:
        """Closes the connection. Without a complete answer, this tells the instance to stop."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    async def _wait_for_data(self) -> None:
        if self._lost is not None:
            raise self._lost
        assert self._waiter is None, "an answer has one reader"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # The transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert self._transport is None, "a connection is made once"
        self._transport, self.is_open = transport, True

    def data_received(self, data: bytes) -> None:
        try:
            if self._parser is None:
                raise httptools.HttpParserError("it sent data without a request")
            self._parser.feed_data(data)
        except httptools.HttpParserError as fault:
            self._fail(OSError(f"the instance does not speak HTTP as agreed: {fault}"))
            self._transport.abort()
        if self._num_held > MAX_BUFFERED_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(ConnectionResetError(str(exc or "the connection was closed")))

    def _fail(self, fault: Exception) -> None:
        self.is_open = False
        self._lost = self._lost or fault
        self._wake()

    # The parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None, "headers come from the connection's parser"
        self.status = self._parser.get_status_code()
        self._has_begun = True

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._num_held += len(body)

    def on_message_complete(self) -> None:
        assert self._parser is not None, "the end of an answer comes from the connection's parser"
        self._may_be_kept = self._parser.should_keep_alive()
        self._has_ended = True
