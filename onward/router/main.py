"""The router's process: the event loop, the listening socket, signals, and the way out."""

import asyncio
import contextlib
import logging
import random
import secrets
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
import uvloop

from onward import log
from onward.clock import Clock, SystemClock
from onward.config import RouterConfig
from onward.obs.metrics import Registry
from onward.router import client_side
from onward.router.app import build_app
from onward.router.core import RouterCore
from onward.router.serving import SETTLE_S, Serving
from onward.router.upstream import Upstream

KEEP_ALIVE_S = 75
"""How long running streams may finish after SIGTERM."""
LAST_WORDS_S = 2.0
"""After that, for the last events of streams that had to be ended."""

_logger = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """uvicorn on a socket that was opened before. Signals are not its business."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class RouterProcess:
    def __init__(
        self,
        config: RouterConfig,
        cluster_key: str,
        *,
        clock: Clock | None = None,
        settle_s: float = SETTLE_S,
        keep_alive_s: float = client_side.KEEP_ALIVE_S,
        on_started: Callable[[], None] = lambda: None,
    ) -> None:
        clock = clock or SystemClock()
        registry = Registry()
        core = RouterCore(config, f"router-{secrets.token_hex(8)}", registry, random.SystemRandom().randrange)
        self.serving = Serving(core, Upstream(cluster_key, clock), clock, settle_s, keep_alive_s)
        self._drain_s = config.drain_s
        self._is_stopping = False
        uvicorn_config = uvicorn.Config(
            build_app(self.serving, registry, cluster_key),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = HttpServer(uvicorn_config, on_started)

    async def run(self, listening: socket.socket) -> None:
        clockwork = asyncio.create_task(self.serving.run_clockwork())
        try:
            await self._server.serve([listening])
        finally:
            clockwork.cancel()
            await asyncio.wait((clockwork,))
            await self.serving.close()

    def stop(self) -> None:
        """No new connections; running streams have the grace, and are then told. Asked twice, they are told at once."""
        if self._is_stopping:
            self.serving.stop_all()
            return
        self._is_stopping = True
        _logger.info(log.event("stopping", grace_s=self._drain_s))
        self._server.config.timeout_graceful_shutdown = int(self._drain_s + LAST_WORDS_S + 1)
        self._server.should_exit = True
        asyncio.get_running_loop().call_later(self._drain_s, self.serving.stop_all)


async def _run(
    config: RouterConfig, cluster_key: str, listening: socket.socket, on_started: Callable[[], None]
) -> None:
    process = RouterProcess(config, cluster_key, on_started=on_started)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, process.stop)
    await process.run(listening)


def run(
    config: RouterConfig,
    cluster_key: str,
    listening: socket.socket,
    on_started: Callable[[], None] = lambda: None,
) -> None:
    """Serves until told to stop. `on_started`: called once connections are taken."""
    log.set_up("router", config.log_level)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    uvloop.run(_run(config, cluster_key, listening, on_started))
