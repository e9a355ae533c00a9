"""All parts of an api process, joined; but for its rim: the event loop, the sockets, the threads and the way out.

`main` brings the real ones, the simulator others.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from onward import log
from onward.api.admin import Admin
from onward.api.app import build_app
from onward.api.engine_client import EngineClient, Wire
from onward.api.fullness import Fullness
from onward.api.jobs import Backend
from onward.api.ledger import Ledger
from onward.api.other_instances import OtherInstances
from onward.api.prompts import Prompts
from onward.api.registering import Description, Registering
from onward.api.shelf_link import ShelfLink
from onward.api.shelf_link import Wire as ShelfWire
from onward.api.streams import Streams
from onward.api.supervisor_link import Channel, SupervisorLink
from onward.api.unknown_fields import UnknownFields
from onward.api.work_queues import NewThreads, work_queues
from onward.chance import Chance
from onward.clock import Clock
from onward.obs.metrics import Registry
from onward.proto.control import NewKeys, Ready, StartApi
from onward.transport.control import ChannelClosed
from onward.web.callers import Keyring
from onward.web.keys import Keys
from onward.web.tasks import Tasks

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rim:
    """What an api process must not make for itself."""

    clock: Clock
    chance: Chance
    connect: Callable[[str], Wire]
    """To the engine at this address."""
    connect_shelf: Callable[[str], ShelfWire]
    new_session: Callable[[], aiohttp.ClientSession]
    new_threads: NewThreads
    stop_server: Callable[[float, Callable[[], object]], None]
    """No new connections; what is under way has the grace, and at its end somebody is called."""
    leave_at_once: Callable[[], None]
    """For when nothing can be put right from here. The supervisor, if there is one, starts another."""


class Api:
    """Needs a running event loop."""

    def __init__(self, start: StartApi, channel: Channel, prompts: Prompts, rim: Rim) -> None:
        self._channel, self._rim = channel, rim
        self.registry = registry = Registry()
        self._link = SupervisorLink(channel, registry.snapshot)
        self._client = EngineClient(Ledger(registry), rim.clock, rim.connect, rim.leave_at_once)
        self._tasks = Tasks()
        unknown_fields = registry.counter("onward_unknown_fields_total", "Unknown request fields, ignored")
        backend = Backend(
            config=start.config,
            model=start.model,
            prompts=prompts,
            client=self._client,
            clock=rim.clock,
            queues=work_queues(rim.new_threads, rim.clock),
            unknown_fields=UnknownFields(unknown_fields),
            chance=rim.chance,
            fullness=Fullness(rim.clock, registry),
            tasks=self._tasks,
        )
        self._shelf = ShelfLink(rim.connect_shelf, rim.leave_at_once, registry)
        self._streams = Streams(
            self._client, rim.clock, start.config.detach_ttl_s, self._shelf, start.config.response_ttl_s
        )
        admin = Admin(start.config, start.model, self._client, self._link, self._streams)
        self._others = others = OtherInstances(rim.clock)
        registry.gauge("onward_live_streams", "Streams that run", ["origin"], self._streams.counts)
        registry.gauge(
            "onward_other_instances",
            "Other instances that could take over streams, as each router has said",
            ["router"],
            others.by_router,
        )
        description = Description(start.config, start.model, self._client, self._link, self._streams, rim.clock, others)
        self._keyring = Keyring(Keys(start.keys))
        self.app = build_app(backend, admin, self._streams, description, registry, self._keyring)
        # Of several processes one speaks for all.
        speaks = start.index == 0
        self._registering = Registering(start.config, description, rim.clock, rim.new_session) if speaks else None

    @property
    def num_held(self) -> int:
        """Requests that are not over."""
        return self._client.num_open + self._streams.num_live

    def started(self) -> None:
        """Connections are taken."""
        self._send(Ready())
        if self._registering is not None:
            self._registering.start()

    def read_control(self) -> None:
        """The supervisor has said something."""
        try:
            self._link.read(self._client, self._shelf, self._drain, self._undrain, self._stop, self._take_keys)
        except ChannelClosed:
            _logger.warning("the supervisor is gone")
            self._rim.leave_at_once()
        except Exception:
            _logger.critical("the supervisor's message could not be handled", exc_info=True)
            self._rim.leave_at_once()

    async def close(self) -> None:
        if self._registering is not None:
            await self._registering.close()
        await self._tasks.close()
        await self._client.close()
        await self._shelf.close()

    def _take_keys(self, message: NewKeys) -> None:
        self._keyring.keys = Keys(message.keys)

    def _stop(self, grace_s: float) -> None:
        """No new connections. Streams of a router go on elsewhere at once, or, where no other instance can take them, have
        the grace, as clients' own streams do."""
        self._streams.stop()
        if not self._others.are_none:
            self._streams.hand_back()
        if self._registering is not None:
            self._registering.leave()
        self._rim.stop_server(grace_s, self._end_streams)

    def _end_streams(self) -> None:
        counts = self._streams.counts()
        if any(counts.values()):
            _logger.warning(
                log.event("streams cut", clients=int(counts[("client",)]), routers=int(counts[("router",)]))
            )
        self._streams.hand_back()
        self._client.fail_all()

    def _drain(self) -> None:
        self._streams.drain()
        self._tell_routers()

    def _undrain(self) -> None:
        self._streams.undrain()
        self._tell_routers()

    def _tell_routers(self) -> None:
        if self._registering is not None:
            self._registering.tell_now()

    def _send(self, message: Ready) -> None:
        try:
            self._channel.send(message)
        except ChannelClosed:
            self._rim.leave_at_once()
