"""All parts of an api process, joined; but for its rim: the event loop, the sockets, the threads and the way out.

`main` brings the real ones, the simulator others.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from onward import log
from onward.api.app import build_app
from onward.api.endpoints.admin import AdminEndpoints
from onward.api.endpoints.live import InstanceLiveView
from onward.api.engine_link.engine_client import EngineClient, EngineTransport, LoadShedder
from onward.api.engine_link.request_tracker import RequestTracker
from onward.api.lifecycle.request_builder import ApiServices
from onward.api.lifecycle.request_metrics import RequestLatencyMetrics
from onward.api.lifecycle.stream_registry import StreamRegistry
from onward.api.lifecycle.stream_store_client import StreamStoreClient, StreamStoreTransport
from onward.api.requests.preprocessing_executors import ExecutorFactory, make_executors
from onward.api.requests.text_processor import TextProcessor
from onward.api.requests.unsupported_fields import UnknownFieldReporter
from onward.api.router_registration import InstanceDescription, OtherInstanceCounts, RouterRegistrar
from onward.api.supervisor_client import SupervisorChannel, SupervisorClient
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

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Runtime:
    """What an api process must not make for itself."""

    clock: Clock
    random: RandomSource
    connect_engine: Callable[[str], EngineTransport]
    """To the engine at this address."""
    connect_stream_store: Callable[[str], StreamStoreTransport]
    new_session: Callable[[], aiohttp.ClientSession]
    new_executor: ExecutorFactory
    stop_server: Callable[[float, Callable[[], object]], None]
    """No new connections; what is under way has the grace, and at its end somebody is called."""
    exit_now: Callable[[], None]
    """For when nothing can be put right from here. The supervisor, if there is one, starts another."""
    otel: OtelSettings | None = None
    """None: nothing is traced."""


class ApiProcess:
    """Needs a running event loop."""

    def __init__(
        self, start: StartApi, channel: SupervisorChannel, text_processor: TextProcessor, runtime: Runtime
    ) -> None:
        self._channel, self._runtime = channel, runtime
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
        registry.gauge("onward_live_streams", "Streams that run", ["origin"], self._streams.counts)
        registry.gauge(
            "onward_other_instances",
            "Other instances that could take over streams, as each router has said",
            ["router"],
            other_instances.by_router,
        )
        instance_description = InstanceDescription(services, self._supervisor, self._streams, other_instances)
        self._active_keys = ActiveKeys(ApiKeyTable(start.keys))
        watch = InstanceLiveView(start.config, self._client, self._supervisor, self._streams, runtime.clock)
        self._live_feed = LiveFeed(watch.look, runtime.clock)
        self.app = build_app(
            services,
            admin,
            self._streams,
            instance_description,
            registry,
            self._active_keys,
            self._live_feed,
            self._supervisor,
        )
        # Of several processes one speaks for all.
        registers = start.index == 0
        self._registrar = (
            RouterRegistrar(start.config, instance_description, runtime.clock, runtime.new_session)
            if registers
            else None
        )

    @property
    def num_unfinished(self) -> int:
        """Requests that are not over."""
        return self._client.num_open + self._streams.num_live

    def on_listening(self) -> None:
        """Connections are taken."""
        self._send(ChildReady())
        if self._registrar is not None:
            self._registrar.start()

    def read_control(self) -> None:
        """The supervisor has said something."""
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
            case StopChild():
                self._stop(message.grace_s)
            case _:
                raise AssertionError(f"not a message for an api process: {type(message).__name__}")

    def _stop(self, grace_s: float) -> None:
        """No new connections. Streams of a router go on elsewhere at once, or, where no other instance can take them, have
        the grace, as clients' own streams do."""
        self._streams.stop()
        self._live_feed.close()
        if not self._other_instances.is_only_instance:
            self._streams.end_routed_streams()
        if self._registrar is not None:
            self._registrar.deregister()
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
