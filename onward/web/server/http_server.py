"""The HTTP server of a process: uvicorn on sockets that are open already, and its shutdown."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

import uvicorn
from starlette.types import ASGIApp

from onward import log
from onward.obs.metrics import Registry
from onward.web.server.connection_tracker import (
    ConnectionLimits,
    ConnectionTracker,
    allowed_connections,
    prepare_listener,
)
from onward.web.server.http_protocol import LimitedHttpProtocol
from onward.web.server.tls_files import TlsFiles

FINAL_EVENTS_S = 1.0
"""Time after the grace period for the last events of streams that had to be ended."""

_logger = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """A uvicorn server for sockets on which other processes may listen too. It handles no signals; its owner calls
    `stop`."""

    def __init__(
        self,
        app: ASGIApp,
        on_started: Callable[[], None],
        *,
        tls: TlsFiles | None = None,
        limits: ConnectionLimits | None = None,
        registry: Registry | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,  # pyright: ignore[reportArgumentType]
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            # Otherwise a header would set the client's address, for peers that FORWARDED_ALLOW_IPS names.
            proxy_headers=False,
            ssl_certfile=None if tls is None else tls.cert,
            ssl_keyfile=None if tls is None else tls.key,
        )
        super().__init__(config)
        self._on_started = on_started
        limits = limits or ConnectionLimits()
        limits = replace(limits, max_connections=allowed_connections(limits.max_connections))
        self._limits, self._connections = limits, ConnectionTracker(limits, registry or Registry())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts like uvicorn, but with `LimitedHttpProtocol` and a timeout for TLS handshakes."""
        loop, tls = asyncio.get_running_loop(), self.config.ssl
        self.servers = []
        for listener in sockets or []:
            prepare_listener(listener, self._limits)
            self.servers.append(
                await loop.create_server(
                    self._new_connection,
                    sock=listener,
                    ssl=tls,
                    ssl_handshake_timeout=None if tls is None else self._limits.handshake_timeout_s,
                    backlog=self.config.backlog,
                )
            )
        self.started = True
        self._on_started()

    def _new_connection(self) -> LimitedHttpProtocol:
        return LimitedHttpProtocol(self.config, self.server_state, {}, self._connections)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self, grace_s: float, on_end: Callable[[], object]) -> None:
        """Stops accepting connections, and gives running requests `grace_s` to finish. `on_end` then ends the remaining
        streams and informs their clients."""
        _logger.info(log.event("stopping", grace_s=grace_s))
        self.config.timeout_graceful_shutdown = int(grace_s + FINAL_EVENTS_S + 1)
        self.should_exit = True
        asyncio.get_running_loop().call_later(grace_s, self._end_grace, on_end)

    def _end_grace(self, on_end: Callable[[], object]) -> None:
        on_end()
        self._connections.shut_down()
