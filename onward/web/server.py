"""The HTTP server of a process: uvicorn on a socket that is open already, and how it stops."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from onward import log

KEEP_ALIVE_S = 75
LAST_WORDS_S = 1.0
"""After the grace, for the last events of streams that had to be ended."""

_logger = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """Others may listen on the socket too. Signals are not its business: whoever runs it says when to stop."""

    def __init__(self, app: ASGIApp, on_started: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,  # pyright: ignore[reportArgumentType]
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self, grace_s: float, at_its_end: Callable[[], object]) -> None:
        """No new connections; what is under way has the grace. `at_its_end` ends what is left, and tells its clients."""
        _logger.info(log.event("stopping", grace_s=grace_s))
        self.config.timeout_graceful_shutdown = int(grace_s + LAST_WORDS_S + 1)
        self.should_exit = True
        asyncio.get_running_loop().call_later(grace_s, at_its_end)
