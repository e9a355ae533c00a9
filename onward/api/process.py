"""Builds an api process from its parts. The event loop, sockets, threads and process exit are passed in (`Runtime`).

`main` passes the real ones, the simulator its own.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onward import log
from onward.api.app import build_app
from onward.api.endpoints.admin import AdminEndpoints
from onward.api.endpoints.live import InstanceLiveView
from onward.api.engine_link.engine_client import EngineClient, EngineTransport, LoadShedder
from onward.api.engine_link.request_tracker import RequestTracker
from onward.api.instance_description import InstanceDescription, OtherInstanceCounts
from onward.api.lifecycle.request_builder import ApiServices
from onward.api.lifecycle.request_metrics import RequestLatencyMetrics
from onward.api.lifecycle.stream_registry import REPLACED_BY_NEW_SERVER, StreamRegistry
from onward.api.lifecycle.stream_store_client import StreamStoreClient, StreamStoreTransport
from onward.api.requests.preprocessing_executors import ExecutorFactory, make_executors
from onward.api.requests.text_processor import TextProcessor
from onward.api.requests.unsupported_fields import UnknownFieldReporter
from onward.api.supervisor_client import SupervisorChannel, SupervisorClient
from onward.batches.batch_routes import make_service
from onward.clock import Clock
from onward.config import OtelSettings
from onward.obs.metrics import Registry
from onward.obs.tracer import ProcessTracing
from onward.proto.control import (
    ChildReady,
    Drain,
    EngineGone,
    EngineUp,
    StartApi,
    StartListening,
    StopChild,
    StreamStoreGone,
    StreamStoreUp,
    ToChild,
    Undrain,
    UpdateApiKeys,
)
from onward.random_source import RandomSource
from onward.transport.control_channel import ChannelClosed
from onward.web.auth.api_key_table import ApiKeyTable
from onward.web.auth.authenticator import ActiveKeys
from onward.web.task_pool import TaskPool
from onward.web.ui.live_feed import LiveFeed

if TYPE_CHECKING:
    import aiohttp

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Runtime:
    """The clock, randomness, sockets, threads and exit of an api process, which must not create them itself."""

    clock: Clock
    random: RandomSource
    connect_engine: Callable[[str], EngineTransport]
    """Connects to the engine at this address."""
    connect_stream_store: Callable[[str], StreamStoreTransport]
    new_session: "Callable[[], aiohttp.ClientSession]"
    new_executor: ExecutorFactory
    stop_server: Callable[[float, Callable[[], object]], None]
    """Closes the listening sockets. Open requests have this grace period, then the callback is called."""
    exit_now: Callable[[], None]
    """Exits after an unrecoverable fault. The supervisor, if it is alive, starts another api process."""
    otel: OtelSettings | None = None
    """None: tracing is off."""


class ApiProcess:
    """One api process with all its parts. The constructor needs a running event loop."""

    def __init__(
        self, start: StartApi, channel: SupervisorChannel, text_processor: TextProcessor, runtime: Runtime
    ) -> None:
        self._channel, self._runtime = channel, runtime
        self._may_listen = asyncio.Event()
        self.registry = registry = Registry()
        self._supervisor = SupervisorClient(channel, registry.snapshot)
        self._client = EngineClient(RequestTracker(registry), runtime.clock, runtime.connect_engine, runtime.exit_now)
        self._tasks = TaskPool()
        attributes = {
            "service.instance.id": start.incarnation,
            "onward.role": start.config.role,
            "onward.instance": str(start.config.serve_config.get("instance_name", "")),
        }
        self._tracing = ProcessTracing(runtime.otel, runtime.clock, runtime.random, registry, attributes)
        unknown_fields = registry.counter("onward_unknown_fields_total", "Unknown request fields, ignored")
        services = ApiServices(
            config=start.config,
            model=start.model,
            text_processor=text_processor,
            engine_client=self._client,
            clock=runtime.clock,
            executors=make_executors(runtime.new_executor, runtime.clock),
            unknown_fields=UnknownFieldReporter(unknown_fields),
            random=runtime.random,
            load_shedder=LoadShedder(runtime.clock, registry),
            latency=RequestLatencyMetrics(registry),
            tasks=self._tasks,
            tracer=self._tracing.tracer,
        )
        self._stream_store = StreamStoreClient(runtime.connect_stream_store, runtime.exit_now, registry)
        self._streams = StreamRegistry(
            self._client, runtime.clock, start.config.detach_ttl_s, self._stream_store, start.config.response_ttl_s
        )
        admin = AdminEndpoints(services, self._supervisor, self._streams)
        self._other_instances = other_instances = OtherInstanceCounts(runtime.clock)
        registry.gauge("onward_live_streams", "Running streams, by origin", ["origin"], self._streams.counts)
        registry.gauge(
            "onward_other_instances",
            "Other instances that could take over streams, as each router has reported",
            ["router"],
            other_instances.by_router,
        )
        instance_description = InstanceDescription(services, self._supervisor, self._streams, other_instances)
        self._active_keys = ActiveKeys(ApiKeyTable(start.keys))
        watch = InstanceLiveView(
            start.config, start.model.name, self._client, self._supervisor, self._streams, runtime.clock
        )
        self._live_feed = LiveFeed(watch.look, runtime.clock)
        self._batches = make_service(start.config, self._active_keys, runtime.clock)
        self.app = build_app(
            services,
            admin,
            self._streams,
            instance_description,
            registry,
            self._active_keys,
            self._live_feed,
            self._supervisor,
            self._batches,
        )
        self._registrar = None
        # Only one of several api processes registers the instance.
        if start.index == 0 and start.config.routers:
            # Imported here because its HTTP client takes a fifth of a second, which the start without routers saves.
            from onward.api.router_registration import RouterRegistrar

            self._registrar = RouterRegistrar(start.config, instance_description, runtime.clock, runtime.new_session)

    @property
    def num_unfinished(self) -> int:
        """Zero if and only if no request is live: neither in the engine client nor in the stream registry. A request that
        runs counts in both."""
        return self._client.num_open + self._streams.num_live

    async def wait_for_turn(self) -> None:
        """Waits until this server may accept connections on the listening socket. Everything else is ready."""
        self._send(ChildReady())
        await self._may_listen.wait()

    def on_listening(self) -> None:
        """Reports to the supervisor that connections are accepted, and starts the registration with routers and the
        batches."""
        self._send(ChildReady())
        if self._registrar is not None:
            self._registrar.start()
        if self._batches is not None:
            self._batches.start()

    def read_control(self) -> None:
        """Handles all messages that have arrived from the supervisor. Exits if the supervisor is gone."""
        try:
            while (message := self._supervisor.receive()) is not None:
                self._on_control_message(message)
        except ChannelClosed:
            _logger.warning("the supervisor is gone")
            self._runtime.exit_now()
        except Exception:
            _logger.critical("the supervisor's message could not be handled", exc_info=True)
            self._runtime.exit_now()

    async def close(self) -> None:
        self._live_feed.close()
        if self._registrar is not None:
            await self._registrar.close()
        if self._batches is not None:
            await self._batches.close()
        await self._tasks.close()
        await self._client.close()
        await self._stream_store.close()
        await asyncio.to_thread(self._tracing.close)

    def _on_control_message(self, message: ToChild) -> None:
        match message:
            case EngineUp():
                self._client.engine_up(message)
            case EngineGone():
                self._client.engine_gone(message)
            case StreamStoreUp():
                self._stream_store.store_up(message)
            case StreamStoreGone():
                self._stream_store.store_gone(message)
            case Drain():
                self._streams.drain()
                self._notify_routers()
            case Undrain():
                self._streams.undrain()
                self._notify_routers()
            case UpdateApiKeys():
                self._active_keys.keys = ApiKeyTable(message.keys)
            case StartListening():
                self._may_listen.set()
            case StopChild():
                self._stop(message.grace_s, is_replaced=message.is_replaced)
            case _:
                raise AssertionError(f"not a message for an api process: {type(message).__name__}")

    def _stop(self, grace_s: float, *, is_replaced: bool) -> None:
        """Stops accepting connections. Routed streams end at once, and their router continues them at another instance,
        or, if this server is replaced, at the new one. If no other instance can take them, they have the grace period,
        as direct streams do."""
        self._streams.stop()
        self._live_feed.close()
        if self._batches is not None:
            self._batches.stop()
        if is_replaced:
            self._streams.end_routed_streams(REPLACED_BY_NEW_SERVER)
        elif not self._other_instances.is_only_instance:
            self._streams.end_routed_streams()
        if self._registrar is not None:
            self._registrar.deregister(is_replaced=is_replaced)
        self._runtime.stop_server(grace_s, self._end_streams)

    def _end_streams(self) -> None:
        counts = self._streams.counts()
        if any(counts.values()):
            _logger.warning(
                log.event("streams cut", clients=int(counts[("client",)]), routers=int(counts[("router",)]))
            )
        self._streams.end_routed_streams()
        self._client.fail_all()

    def _notify_routers(self) -> None:
        if self._registrar is not None:
            self._registrar.register_now()

    def _send(self, message: ChildReady) -> None:
        try:
            self._channel.send(message)
        except ChannelClosed:
            self._runtime.exit_now()
