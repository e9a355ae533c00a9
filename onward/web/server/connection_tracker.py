"""All HTTP connections of a process: how many there may be, and what each may take in bytes and in time.

A connection is busy while a request of it is under way, and idle otherwise. Only the busy ones are a bound for others:
where there is no room, the one that has been idle for longest makes some. Knows nothing of HTTP; `connection` does.
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
"""What a process has open beside its connections."""
FILES_PER_CONNECTION = 2
"""A router has one to an instance for each."""
KEPT_PROBES = 3

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Of one process's connections. Where no flag is named, nobody has needed another value yet."""

    max_connections: int = 4096
    """That are busy: `--max-connections`."""
    num_spare_connections: int = 64
    """More, that are idle, or ask whether the process is alive."""
    max_url_bytes: int = 8 << 10
    max_headers: int = 128
    max_head_bytes: int = MAX_CURSOR_CHARS + (32 << 10)
    """Of URL and headers. Whoever comes back to a stream brings a cursor along."""
    head_timeout_s: float = 20.0
    """From a connection's beginning, or from the first byte of a later request, until the head is whole."""
    handshake_timeout_s: float = 10.0
    idle_timeout_s: float = 75.0
    close_timeout_s: float = 2.0
    """For a client to read its refusal, and to stop sending."""
    shutdown_close_timeout_s: float = 0.5
    """The same, when the server stops."""
    max_discarded_bytes: int = 64 << 20
    write_timeout_s: float = 30.0
    """For a client that does not read: within each such time it takes all there is, or `min_read_bytes`."""
    min_read_bytes: int = 32 << 10
    slow_reader_paths: frozenset[str] = frozenset({ATTEMPT_PATH})
    """Who asks here reads as its own clients do, and ends those that do not read."""
    slow_reader_factor: float = 5.0
    """As many times longer, there."""
    send_buffer_bytes: int = 64 << 10
    """In the kernel, which doubles it. Without a bound it grows to megabytes for each that does not read."""
    keep_alive_probe_s: int = 30
    """Whether a silent client is still there is asked so often; `KEPT_PROBES` without an answer are a no."""


class ConnectionTracker:
    def __init__(self, limits: ConnectionLimits, registry: Registry) -> None:
        self.limits = limits
        self.write_batcher = WriteBatcher()
        self._busy: set[LimitedHttpProtocol] = set()
        self._idle: dict[LimitedHttpProtocol, None] = {}
        """In the order in which they became so."""
        self._ended_counter = registry.counter(
            "onward_http_connections_ended_total", "HTTP connections ended since they reached a bound", ["why"]
        )
        registry.gauge("onward_http_connections", "HTTP connections", ["state"], self._counts)

    def _counts(self) -> dict[LabelValues, float]:
        return {("busy",): len(self._busy), ("idle",): len(self._idle)}

    def add(self, connection: "LimitedHttpProtocol") -> None:
        """A new one. May end another, or this one."""
        self._idle[connection] = None
        if len(self._busy) + len(self._idle) > self.limits.max_connections + self.limits.num_spare_connections:
            oldest = next(iter(self._idle))
            self.remove(oldest)
            self.count_end("no_room")
            oldest.evict()

    @property
    def has_room(self) -> bool:
        """For one more that is busy."""
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
        """The server stops, and its grace is over."""
        for connection in list(self._busy):
            connection.shut_down()

    def count_end(self, reason: str) -> None:
        self._ended_counter.inc(reason)


def prepare_listener(listener: socket.socket, limits: ConnectionLimits) -> None:
    """What every accepted connection takes over from the socket. Not all systems have all of it."""
    options = [
        (socket.SOL_SOCKET, "SO_SNDBUF", limits.send_buffer_bytes),
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", limits.keep_alive_probe_s),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", limits.keep_alive_probe_s),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", KEPT_PROBES),
        # A client that has vanished while something was on its way to it.
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", KEPT_PROBES * limits.keep_alive_probe_s * 1000),
    ]
    for level, name, value in options:
        with contextlib.suppress(AttributeError, OSError):
            listener.setsockopt(level, getattr(socket, name), value)


def allowed_connections(requested: int) -> int:
    """As many as the limit of open files allows, which is raised as far as we may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed_files = FILES_PER_CONNECTION * requested + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed_files:
        return requested
    new_limit = needed_files if hard == resource.RLIM_INFINITY else min(needed_files, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))
        soft = new_limit
    num_connections = max(1, min(requested, (soft - OTHER_FILES) // FILES_PER_CONNECTION))
    if num_connections < requested:
        _logger.warning(log.event("fewer connections than asked for", connections=num_connections, open_files=soft))
    return num_connections
