"""All HTTP connections of a process, with limits on their number, and on the bytes and the time of each.

A connection is busy while one of its requests is in progress, and idle otherwise. Only busy connections can keep others
out: if there are too many in all, the connection that has been idle longest is closed. This module knows nothing of
HTTP; `http_protocol` does.
"""

import contextlib
import logging
import resource
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onward import log
from onward.obs.metrics import LabelValues, Registry
from onward.proto.cursor import MAX_CURSOR_CHARS
from onward.proto.router import ATTEMPT_PATH
from onward.web.server.write_batcher import WriteBatcher

if TYPE_CHECKING:
    from onward.web.server.http_protocol import LimitedHttpProtocol

OTHER_FILES = 512
"""Files that a process has open beside its connections."""
FILES_PER_CONNECTION = 2
"""A router has another connection to an instance for each one."""
KEPT_PROBES = 3

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits on one process's connections. A limit without a named flag has none, because no other value has been
    needed yet."""

    max_connections: int = 4096
    """Busy connections: `--max-connections`."""
    num_spare_connections: int = 64
    """Further connections, which are idle or ask whether the process is alive."""
    max_url_bytes: int = 8 << 10
    max_headers: int = 128
    max_head_bytes: int = MAX_CURSOR_CHARS + (32 << 10)
    """Size of URL and headers. A client that resumes a stream sends a cursor in a header."""
    head_timeout_s: float = 20.0
    """From a connection's beginning, or from the first byte of a later request, until the head is complete."""
    handshake_timeout_s: float = 10.0
    idle_timeout_s: float = 75.0
    close_timeout_s: float = 2.0
    """For a client to read its refusal, and to stop sending."""
    shutdown_close_timeout_s: float = 0.5
    """Like `close_timeout_s`, when the server stops."""
    max_discarded_bytes: int = 64 << 20
    write_timeout_s: float = 30.0
    """A slow client has to read all pending output, or `min_read_bytes`, within each period of this length."""
    min_read_bytes: int = 32 << 10
    slow_reader_paths: frozenset[str] = frozenset({ATTEMPT_PATH})
    """Paths of routers, which read as fast as their own clients, and disconnect clients that do not read."""
    slow_reader_factor: float = 5.0
    """Factor of `write_timeout_s` for `slow_reader_paths`."""
    send_buffer_bytes: int = 64 << 10
    """Size of the kernel's send buffer, which the kernel doubles. Without a limit it grows to megabytes for each client
    that does not read."""
    keep_alive_probe_s: int = 30
    """Interval of TCP keep-alive probes to a silent client. After `KEPT_PROBES` unanswered probes it counts as gone."""


class ConnectionTracker:
    def __init__(self, limits: ConnectionLimits, registry: Registry) -> None:
        self.limits = limits
        self.write_batcher = WriteBatcher()
        self._busy: set[LimitedHttpProtocol] = set()
        self._idle: dict[LimitedHttpProtocol, None] = {}
        """Idle connections, in the order in which they became idle."""
        self._ended_counter = registry.counter(
            "onward_http_connections_ended_total",
            "HTTP connections closed because they reached a bound, by bound",
            ["why"],
        )
        registry.gauge("onward_http_connections", "HTTP connections", ["state"], self._counts)

    def _counts(self) -> dict[LabelValues, float]:
        return {("busy",): len(self._busy), ("idle",): len(self._idle)}

    def add(self, connection: "LimitedHttpProtocol") -> None:
        """Adds a new connection. If there are too many, ends the one that has been idle longest, which may be this
        one."""
        self._idle[connection] = None
        if len(self._busy) + len(self._idle) > self.limits.max_connections + self.limits.num_spare_connections:
            oldest = next(iter(self._idle))
            self.remove(oldest)
            self.count_end("no_room")
            oldest.evict()

    @property
    def has_room(self) -> bool:
        """Whether one more connection may become busy."""
        return len(self._busy) < self.limits.max_connections

    def set_busy(self, connection: "LimitedHttpProtocol") -> None:
        self._idle.pop(connection, None)
        self._busy.add(connection)

    def set_idle(self, connection: "LimitedHttpProtocol") -> None:
        self._busy.discard(connection)
        self._idle[connection] = None

    def remove(self, connection: "LimitedHttpProtocol") -> None:
        self._busy.discard(connection)
        self._idle.pop(connection, None)

    def shut_down(self) -> None:
        """Shuts busy connections down after the server's grace period."""
        for connection in list(self._busy):
            connection.shut_down()

    def count_end(self, reason: str) -> None:
        self._ended_counter.inc(reason)


def prepare_listener(listener: socket.socket, limits: ConnectionLimits) -> None:
    """Sets the options that every accepted connection inherits from the socket. Not all systems have all of them."""
    options = [
        (socket.SOL_SOCKET, "SO_SNDBUF", limits.send_buffer_bytes),
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", limits.keep_alive_probe_s),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", limits.keep_alive_probe_s),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", KEPT_PROBES),
        # Detects a client that has vanished while data was on its way to it.
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", KEPT_PROBES * limits.keep_alive_probe_s * 1000),
    ]
    for level, name, value in options:
        with contextlib.suppress(AttributeError, OSError):
            listener.setsockopt(level, getattr(socket, name), value)


def connections_within(open_files: int, requested: int) -> int:
    """Returns how many of the requested connections fit into a limit of open files."""
    return max(1, min(requested, (open_files - OTHER_FILES) // FILES_PER_CONNECTION))


def allowed_connections(requested: int) -> int:
    """Returns how many of the requested connections the limit of open files allows. Raises the limit as far as the
    system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed_files = FILES_PER_CONNECTION * requested + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed_files:
        return requested
    new_limit = needed_files if hard == resource.RLIM_INFINITY else min(needed_files, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))
        soft = new_limit
    num_connections = connections_within(soft, requested)
    if num_connections < requested:
        _logger.warning(log.event("fewer connections than asked for", connections=num_connections, open_files=soft))
    return num_connections
