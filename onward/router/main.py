"""The router's process: the event loop, the listening socket, signals, and the way out."""

import asyncio
import signal
import socket
from collections.abc import Callable

import uvloop

from onward import log
from onward.clock import Clock, SystemClock
from onward.config import RouterConfig
from onward.errors import StartupError
from onward.obs.process_usage import register_own_usage
from onward.obs.tracer import resolve_settings
from onward.random_source import SystemRandomSource
from onward.router import client_writer
from onward.router.router import Router
from onward.router.stream_runner import STARTUP_GRACE_S
from onward.router.upstream_client import new_session
from onward.router.upstream_connections import UpstreamConnectionPool
from onward.web.auth import audit_log
from onward.web.auth.api_key_file import ApiKeySource
from onward.web.server.connection_tracker import ConnectionLimits
from onward.web.server.http_server import HttpServer
from onward.web.server.tls_files import tls_files


class RouterProcess:
    def __init__(
        self,
        config: RouterConfig,
        cluster_key: str,
        *,
        key_source: ApiKeySource | None = None,
        clock: Clock | None = None,
        settle_s: float = STARTUP_GRACE_S,
        keep_alive_s: float = client_writer.KEEP_ALIVE_S,
        on_started: Callable[[], None] = lambda: None,
    ) -> None:
        clock = clock or SystemClock()
        self._connections = UpstreamConnectionPool(clock)
        self._key_source = key_source or ApiKeySource(config.api_key, config.api_keys)
        router = Router(
            config,
            cluster_key,
            clock,
            SystemRandomSource(),
            new_session(),
            self._connections.post,
            keys=self._key_source.read(),
            settle_s=settle_s,
            keep_alive_s=keep_alive_s,
            otel=resolve_settings(config.otlp_endpoint, config.trace_sample_ratio),
        )
        self._tracing = router.tracing
        register_own_usage(router.registry, "router")
        self._keyring = router.keyring
        self._batches = router.batches
        self._live_feed = router.live_feed
        self.stream_runner = router.stream_runner
        self._drain_s = config.drain_s
        self._is_stopping = False
        limits = ConnectionLimits(max_connections=config.max_connections)
        self._server = HttpServer(
            router.app, on_started, tls=tls_files(config), limits=limits, registry=router.registry
        )

    async def run(self, listening: socket.socket) -> None:
        maintenance = asyncio.create_task(self.stream_runner.run_maintenance())
        if self._batches is not None:
            self._batches.start()
        try:
            await self._server.serve([listening])
        finally:
            if self._batches is not None:
                await self._batches.close()
            maintenance.cancel()
            await asyncio.wait((maintenance,))
            self._connections.close()
            await self.stream_runner.close()
            await asyncio.to_thread(self._tracing.close)

    @property
    def key_file(self) -> str | None:
        return self._key_source.file

    def reload_keys(self) -> None:
        """Reads the file again. One that is broken changes nothing."""
        try:
            keys = self._key_source.read()
        except StartupError as fault:
            audit_log.log_failed_key_reload(fault.message)
            return
        self._keyring.keys = keys
        audit_log.log_key_reload(len(keys))

    def stop(self) -> None:
        """Stops accepting connections. Running streams get the grace period, or none at the second call; then they are
        cut with an error event."""
        self._live_feed.close()
        if self._batches is not None:
            self._batches.stop()
        if self._is_stopping:
            self.stream_runner.stop_all()
            return
        self._is_stopping = True
        self._server.stop(self._drain_s, self.stream_runner.stop_all)


async def _run(
    config: RouterConfig,
    cluster_key: str,
    listening: socket.socket,
    on_started: Callable[[], None],
    key_source: ApiKeySource | None,
) -> None:
    process = RouterProcess(config, cluster_key, key_source=key_source, on_started=on_started)
    loop = asyncio.get_running_loop()
    if process.key_file is not None:
        # Without one there is nothing to read again, and the end of a terminal ends us.
        loop.add_signal_handler(signal.SIGHUP, process.reload_keys)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, process.stop)
    await process.run(listening)


def run(
    config: RouterConfig,
    cluster_key: str,
    listening: socket.socket,
    on_started: Callable[[], None] = lambda: None,
    key_source: ApiKeySource | None = None,
) -> None:
    """Serves until told to stop. `on_started` is called once connections are accepted. `key_source` is read again on
    SIGHUP; without one, keys come from the configuration."""
    log.configure("router", config.log_level, config.log_format)
    uvloop.run(_run(config, cluster_key, listening, on_started, key_source))
