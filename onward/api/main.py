"""An api process: `python -m onward.api.main --control-fd N`, started by the supervisor and never by hand.

Wires the parts together and owns what they must not know: the event loop, the listening socket, signals, the way out.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import uvicorn
import uvloop

from onward import log
from onward.api.admin import Admin
from onward.api.app import build_app
from onward.api.engine_client import EngineClient
from onward.api.jobs import Backend
from onward.api.ledger import Ledger
from onward.api.prompts import Prompts
from onward.api.registering import Description, Registering
from onward.api.streams import Streams
from onward.api.supervisor_link import SupervisorLink
from onward.clock import SystemClock
from onward.errors import OnwardError
from onward.obs.metrics import Registry
from onward.proto.control import Ready, StartApi, StartFailed
from onward.transport.control import ChannelClosed, ControlChannel, join_supervisor
from onward.transport.zmq import EngineSocket

NUM_TEXT_THREADS = 2
KEEP_ALIVE_S = 75
EXPIRE_EVERY_S = 5.0
LAST_WORDS_S = 1.0
"""After the grace, for the last events of streams that had to be ended."""

_logger = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """uvicorn on a socket that others listen on too. Signals are not its business: the supervisor says when to stop."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ApiProcess:
    def __init__(self, start: StartApi, channel: ControlChannel, prompts: Prompts) -> None:
        self._channel = channel
        self._registry = Registry()
        self._link = SupervisorLink(channel, self._registry.snapshot)
        clock = SystemClock()
        self._client = EngineClient(
            Ledger(self._registry),
            clock,
            connect=lambda address: EngineSocket(address, start.incarnation),
            on_fault=_leave_at_once,
        )
        backend = Backend(
            config=start.config,
            model=start.model,
            prompts=prompts,
            client=self._client,
            clock=clock,
            threads=ThreadPoolExecutor(NUM_TEXT_THREADS, thread_name_prefix="text"),
            unknown_fields=self._registry.counter(
                "onward_unknown_fields_total", "Request fields that nobody knows, ignored"
            ),
        )
        self._streams = Streams(self._client, clock, start.config.detach_ttl_s)
        admin = Admin(start.config, start.model, self._client, self._link, self._streams)
        description = Description(start.config, start.model, self._client, self._link, self._streams, clock)
        app = build_app(backend, admin, self._streams, description, self._registry)
        self._server = _http_server(app, self._on_started)
        # Of several processes one speaks for all.
        self._registering = Registering(start.config, description, clock) if start.index == 0 else None

    async def run(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._channel.fileno(), self._on_control)
        try:
            self._forget_old_records()
            await self._server.serve([listening])
            if self._registering is not None:
                await self._registering.close()
        finally:
            loop.remove_reader(self._channel.fileno())
            await self._client.close()

    def _on_started(self) -> None:
        self._send(Ready())
        if self._registering is not None:
            self._registering.start()

    def _forget_old_records(self) -> None:
        self._streams.expire()
        asyncio.get_running_loop().call_later(EXPIRE_EVERY_S, self._forget_old_records)

    def _on_control(self) -> None:
        try:
            self._link.read(self._client, self._streams.drain, self._stop)
        except ChannelClosed:
            _logger.warning("the supervisor is gone")
            _leave_at_once()
        except Exception:
            _logger.critical("the supervisor's message could not be handled", exc_info=True)
            _leave_at_once()

    def _stop(self, grace_s: float) -> None:
        """No new connections. What a router sent goes on elsewhere; clients' own streams have the grace, and are then
        told."""
        _logger.info(log.event("stopping", grace_s=grace_s))
        self._streams.drain()
        if self._registering is not None:
            self._registering.leave()
        self._server.config.timeout_graceful_shutdown = int(grace_s + LAST_WORDS_S + 1)
        self._server.should_exit = True
        asyncio.get_running_loop().call_later(grace_s, self._client.fail_all)

    def _send(self, message: Ready) -> None:
        try:
            self._channel.send(message)
        except ChannelClosed:
            _leave_at_once()


def _http_server(app: object, on_started: Callable[[], None]) -> HttpServer:
    config = uvicorn.Config(
        app,  # pyright: ignore[reportArgumentType]
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    return HttpServer(config, on_started)


def _leave_at_once() -> None:
    """For when nothing can be put right from here. The supervisor, if there is one, starts another."""
    logging.shutdown()
    os._exit(1)


async def _serve(start: StartApi, channel: ControlChannel, prompts: Prompts) -> None:
    listening = socket.socket(fileno=start.listen_fd)
    await ApiProcess(start, channel, prompts).run(listening)


def main() -> None:
    parser = argparse.ArgumentParser(prog="onward.api.main")
    parser.add_argument("--control-fd", type=int, required=True)
    channel = join_supervisor(parser.parse_args().control_fd)
    start = channel.wait_receive()
    assert isinstance(start, StartApi), "the first message says what to be"
    log.set_up(f"api-{start.index}", start.config.log_level)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        prompts = Prompts(start.model)
    except OnwardError as error:
        channel.send(StartFailed(error.message))
        raise SystemExit(1) from error
    uvloop.run(_serve(start, channel, prompts))
    channel.close()


if __name__ == "__main__":
    main()
