"""One HTTP connection with limits: uvicorn's protocol reads and writes, and this module enforces the limits.

A head that is too large or too slow is answered with an error and ends the connection; so is input that is not HTTP.
Requests are served one at a time: a request that arrives before the current response is over is not read, and the
connection ends with that response. A client that does not read is disconnected, and its stream ends like that of any
client that disconnects. A client that closes its sending side after a complete request gets its response (see
`half_closed`).
"""

import asyncio
import http as status_codes
from enum import Enum, auto
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from onward.errors import RETRY_SOON_S
from onward.proto.engine import ErrorInfo
from onward.proto.router import INTERNAL_PREFIX
from onward.web.access_log import log_refused_connection, note_connection_refusal
from onward.web.error_format import error_body, error_headers
from onward.web.server.close_delimited import CloseDelimitedCycle
from onward.web.server.connection_tracker import ConnectionTracker
from onward.web.server.half_closed import HalfClosedWatcher, skippable_bytes
from onward.web.server.write_batcher import BatchedTransport

ALIVE_URL = b"/live"
_OF_UPGRADES = frozenset({b"upgrade", b"http2-settings"})

INVALID_HTTP = ErrorInfo("invalid_http", "this is not an HTTP/1.1 request", 400)
HEAD_TIMEOUT = ErrorInfo("head_timeout", "headers: did not arrive in time", 408, True)
TOO_MANY_CONNECTIONS = ErrorInfo(
    "too_many_connections",
    "this server has no room for more connections; try again later",
    503,
    True,
    retry_after_s=RETRY_SOON_S,
)
STOPPING = ErrorInfo("unavailable", "the server is stopping", 503, True)


class _ReadState(Enum):
    NOTHING = auto()
    """Between requests."""
    HEAD = auto()
    BODY = auto()
    AHEAD = auto()
    """The request is complete, and its response is not."""
    DISCARDING = auto()
    """Further input is discarded."""


class _StopParsing(Exception):
    """Stops the parser."""


class LimitedHttpProtocol(HttpToolsProtocol):
    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        connections: ConnectionTracker,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._tracker, self._limits = connections, connections.limits
        self.timeout_keep_alive = connections.limits.idle_timeout_s
        self._read_state = _ReadState.NOTHING
        self._refusal: tuple[str, ErrorInfo] | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._half_closed: HalfClosedWatcher | None = None
        self._num_unread = 0
        self._num_headers = self._num_header_bytes = 0
        self._num_pending_bytes = 0
        """Bytes that have arrived since the parser last reported progress, or that were discarded."""

    # The connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(BatchedTransport(transport, self._tracker.write_batcher))
        # Data that the kernel does not accept at once counts as unread, until the kernel has accepted all of it.
        transport.set_write_buffer_limits(high=1)
        self._set_timer(self._limits.head_timeout_s, self._on_head_timeout)
        self._tracker.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        self._stop_unread_timer()
        if self._half_closed is not None:
            self._half_closed.stop()
        self._unset_keepalive_if_required()
        self._tracker.remove(self)
        super().connection_lost(exc)

    def evict(self) -> None:
        self.transport.abort()

    def shut_down(self) -> None:
        """Handles the end of the server's grace period. A request that has not arrived completely is refused, unless
        its response has begun."""
        if self._read_state is _ReadState.BODY and not self.cycle.response_started:
            self._send_final_error(STOPPING, self._limits.shutdown_close_timeout_s)

    def _set_timer(self, timeout_s: float | None, callback: Any = None) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
        self._read_timer = None if timeout_s is None else self.loop.call_later(timeout_s, callback)

    # Reading.

    def data_received(self, data: bytes) -> None:
        self._num_pending_bytes += len(data)
        if self._read_state is _ReadState.DISCARDING:
            if self._num_pending_bytes > self._limits.max_discarded_bytes:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        if self._read_state is _ReadState.NOTHING and self._read_timer is None:
            self._set_timer(self._limits.head_timeout_s, self._on_head_timeout)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            if self._read_state is _ReadState.AHEAD:
                self._stop_reading()
            else:
                self._refuse(*(self._refusal or ("invalid_http", INVALID_HTTP)))
            return
        if self._num_pending_bytes > self._limits.max_head_bytes:
            self._refuse("head_too_large", self._headers_too_large_error())

    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns whether the connection stays open for writing: after a complete request, until its response is over.
        A router closes its whole connection to give an attempt up, and never half of it."""
        if not self._is_answering or self.scheme == "https" or self.scope["path"].startswith(INTERNAL_PREFIX):
            self.transport.close()  # after writing the data that waits for the end of this turn
            return False
        self.cycle.keep_alive = False
        if probe := skippable_bytes(self.cycle.scope, self.cycle):  # pyright: ignore[reportArgumentType]
            self.transport.write(probe)
        self._half_closed = HalfClosedWatcher(self.transport, self.transport.abort)
        return True

    @property
    def _is_answering(self) -> bool:
        """Whether a request has arrived completely and its response is not over."""
        is_received = self._read_state in (_ReadState.AHEAD, _ReadState.DISCARDING) and self.cycle is not None
        return is_received and not (self.cycle.response_complete or self.cycle.disconnected)

    def _feed(self, data: bytes) -> None:
        assert self.parser is not None, "nothing comes after the end"
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as proposed:
            # The parser does not parse what follows such a head, not even a body. Many clients propose HTTP/2 with
            # every first request. The request is served as if they had not.
            head = self._head_without_upgrade()
            self._read_state, self.parser = _ReadState.NOTHING, httptools.HttpRequestParser(self)
            self.parser.feed_data(head + data[proposed.args[0] :])

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(token for token in value.split(b",") if token.strip().lower() not in _OF_UPGRADES)
            if name not in _OF_UPGRADES:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        if self._read_state is _ReadState.AHEAD:
            raise _StopParsing
        self._read_state = _ReadState.HEAD
        self._num_headers = self._num_header_bytes = 0
        # The request may have begun in the same read in which the last one ended. Then the idle timer has just been
        # set, and the head timer has not.
        self._unset_keepalive_if_required()
        if self._read_timer is None:
            self._set_timer(self._limits.head_timeout_s, self._on_head_timeout)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.max_url_bytes:
            problem = f"URL: is longer than {self._limits.max_url_bytes} bytes, the limit of this server"
            self._stop_parser("url_too_long", ErrorInfo("url_too_long", problem, 414))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._num_header_bytes += len(name) + len(value)
        if self._num_headers > self._limits.max_headers:
            problem = f"headers: are more than {self._limits.max_headers}, the limit of this server"
            self._stop_parser("head_too_large", ErrorInfo("headers_too_large", problem, 431))
        if self._num_header_bytes > self._limits.max_head_bytes:
            self._stop_parser("head_too_large", self._headers_too_large_error())
        # Headers after a body count towards the limits, but are not used.
        if self._read_state is _ReadState.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                self._stop_parser("invalid_http", INVALID_HTTP)
            return  # the same head is parsed again without the upgrade
        self._set_timer(None)
        self._num_pending_bytes = 0
        if not self._tracker.has_room and self.url.partition(b"?")[0] != ALIVE_URL:
            self._stop_parser("no_room", TOO_MANY_CONNECTIONS)
        super().on_headers_complete()
        self._read_state = _ReadState.BODY
        self._tracker.set_busy(self)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self.scope["http_version"] != "1.1":
            cycle = self.cycle = CloseDelimitedCycle.replacing(cycle)
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._num_pending_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._num_pending_bytes = 0
        if not self.cycle.response_complete:
            self._read_state = _ReadState.AHEAD
        elif self._read_state is _ReadState.BODY:
            # This was the rest of a body that was not needed for the response.
            self._set_timer(None)
            self._await_next()
            self.timeout_keep_alive_task = self.loop.call_later(
                self._limits.idle_timeout_s, self.timeout_keep_alive_handler
            )

    def _headers_too_large_error(self) -> ErrorInfo:
        problem = f"headers: are larger than {self._limits.max_head_bytes} bytes, the limit of this server"
        return ErrorInfo("headers_too_large", problem, 431)

    def _stop_parser(self, reason: str, info: ErrorInfo) -> None:
        self._refusal = (reason, info)
        raise _StopParsing

    def _on_head_timeout(self) -> None:
        if self._read_state is _ReadState.HEAD:
            self._refuse("head_timeout", HEAD_TIMEOUT)
        else:
            self._tracker.count_end("head_timeout")
            self.transport.close()

    # Answering.

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._read_state is _ReadState.AHEAD:
            self._await_next()
        elif self._read_state is _ReadState.BODY:
            # The client may read its response only after it has sent the whole body.
            self._unset_keepalive_if_required()
            self._tracker.set_idle(self)
            self._set_timer(self._limits.close_timeout_s, self.transport.close)

    def _await_next(self) -> None:
        self._read_state = _ReadState.NOTHING
        self._tracker.set_idle(self)

    def _stop_reading(self) -> None:
        """Makes the current response the last one, and discards further input."""
        self._tracker.count_end("pipelined")
        self._read_state, self._num_pending_bytes = _ReadState.DISCARDING, 0
        self.cycle.keep_alive = False

    def _refuse(self, reason: str, info: ErrorInfo) -> None:
        self._tracker.count_end(reason)
        self._send_final_error(info, self._limits.close_timeout_s)

    def _send_final_error(self, info: ErrorInfo, timeout_s: float) -> None:
        """Sends an error as the last response of this connection. An application that still works on a request gets a
        disconnect."""
        if self._read_state in (_ReadState.NOTHING, _ReadState.HEAD):
            # Once its head is complete, a request gets its log line from the application.
            url = self.url if self._read_state is _ReadState.HEAD else b""
            log_refused_connection(self.parser.get_method() if url else b"", url, info.status, info.code)
        self._read_state, self._num_pending_bytes = _ReadState.DISCARDING, 0
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.response_started:
                self.transport.abort()
                return
            note_connection_refusal(self.scope, info.status, info.code)  # pyright: ignore[reportArgumentType]
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._set_timer(timeout_s, self.transport.close)
        self.transport.write(_final_error_response(info))
        self._tracker.set_idle(self)

    # Writing.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_read_deadline()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread_timer()

    def _start_read_deadline(self) -> None:
        is_slow_reader = self.scope is not None and self.scope.get("path") in self._limits.slow_reader_paths
        timeout_s = self._limits.write_timeout_s * (self._limits.slow_reader_factor if is_slow_reader else 1.0)
        self._num_unread = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(timeout_s, self._check_read_deadline)

    def _check_read_deadline(self) -> None:
        if self._num_unread - self.transport.get_write_buffer_size() >= self._limits.min_read_bytes:
            self._start_read_deadline()
            return
        self._tracker.count_end("unread")
        self.transport.abort()

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None


def _final_error_response(info: ErrorInfo) -> bytes:
    body = error_body(info)
    headers = {
        **error_headers(info),
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
    }
    phrase = status_codes.HTTPStatus(info.status).phrase
    lines = [f"HTTP/1.1 {info.status} {phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
