"""Sends registrations of this instance to each of its routers, once a second, and deregisters it when it stops.

Each router has a task of its own, so a router that hangs or is unreachable delays no other one. It is retried for ever. A
registration carries the changes of the engine's prefix cache as `kv_events` if the router's last reply asked for them.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import aiohttp
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onward import log
from onward.api.endpoints.admin import instance_state, pids_by_role
from onward.api.endpoints.attempts import MSGPACK, read_cluster_message
from onward.api.endpoints.cluster_auth import ClusterAuth
from onward.api.lifecycle.request_builder import ApiServices
from onward.api.lifecycle.stream_registry import StreamRegistry
from onward.api.supervisor_client import SupervisorClient
from onward.clock import Clock
from onward.config import ApiConfig
from onward.errors import Unavailable
from onward.obs.metrics import LabelValues
from onward.proto import SCHEMA_VERSION
from onward.proto.control import InstanceView
from onward.proto.kv_events import KvEvents
from onward.proto.router import REGISTER_PATH, SIGNATURE_HEADER, InstanceLoad, Registration, RegistrationReply
from onward.proto.stats import EngineStats
from onward.text.prompt_tokenizer import read_tokenizer_files, tokenizer_hash
from onward.transport.cluster_signature import sign_request

POST_TIMEOUT_S = 2.0
REPLACED_TIMEOUT_S = 1.0
"""How long the last registration of an instance may take if a new server replaces it. The new server serves after this
process has ended, and registers by itself."""
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
MIN_AGAIN_S, MAX_AGAIN_S = 0.1, 10.0
MAX_VIEW_AGE_S = 0.3
"""How long a view of the instance is reused, so that several routers share one query of the supervisor."""
FREE_BLOCKS = ("free", "cached")
RUNNING = ("running", "preempting")
RESTARTING = "restarting"
RETRYABLE_ERRORS = (aiohttp.ClientError, TimeoutError, OSError, Unavailable, msgspec.MsgspecError)
"""Errors of a registration that is tried again."""
PATIENCE_S = 15.0
"""How long a router that has answered before may be silent before a warning is logged. It is longer than a router takes by
default to stop (`drain_s` and its last messages), and than a restart. An operator who stops a cluster stops the router
first."""
MAX_COUNT_AGE_S = 10.0
"""How long a router's report of the number of other instances is valid."""
MAX_COUNTED_ROUTERS = 64

_logger = logging.getLogger(__name__)


class OtherInstanceCounts:
    """The number of other instances that could take over this one's streams, as each router has last reported."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counts: dict[str, tuple[int, float]] = {}

    def record(self, router: str, num_others: int) -> None:
        """Records a router's report. `router` is its incarnation. A negative number means that the router does not know
        the field, and removes its earlier report."""
        self._counts.pop(router, None)
        while len(self._counts) >= MAX_COUNTED_ROUTERS:
            del self._counts[next(iter(self._counts))]
        if num_others >= 0:
            self._counts[router] = num_others, self._clock.now_s()

    def by_router(self) -> dict[LabelValues, float]:
        oldest_s = self._clock.now_s() - MAX_COUNT_AGE_S
        return {
            (router,): float(num_others)
            for router, (num_others, recorded_at_s) in self._counts.items()
            if recorded_at_s >= oldest_s
        }

    @property
    def is_only_instance(self) -> bool:
        """Whether all recent reports say that there is no other instance. False without a recent report."""
        counts = self.by_router().values()
        return bool(counts) and not any(counts)


class RegistrationLog:
    """Logs when one router stops accepting the registration of this instance, and when it accepts it again."""

    def __init__(self, router_url: str, clock: Clock) -> None:
        self._url = router_url
        self._clock = clock
        self._answered_at_s: float | None = None
        self._has_warned = False

    def accepted(self) -> None:
        self._answered_at_s = self._clock.now_s()
        if self._has_warned:
            self._has_warned = False
            _logger.info(log.event("registered", url=self._url))

    def refused(self, cause: str) -> None:
        """Records that the router has answered with a refusal."""
        self._answered_at_s = self._clock.now_s()
        self._warn(cause)

    def unreachable(self, cause: str) -> None:
        """Records that the router has not answered. Warns at once if it never has, since its address may be wrong."""
        if self._answered_at_s is None or self._clock.now_s() - self._answered_at_s > PATIENCE_S:
            self._warn(cause)

    def _warn(self, cause: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(log.event("router does not take us", url=self._url, cause=cause))


class InstanceDescription:
    """Builds the registrations of this instance."""

    def __init__(
        self,
        services: ApiServices,
        supervisor: SupervisorClient,
        streams: StreamRegistry,
        other_instances: OtherInstanceCounts,
    ) -> None:
        self.others = other_instances
        self._config, self._model, self._client = services.config, services.model, services.engine_client
        self._supervisor, self._streams, self._clock = supervisor, streams, services.clock
        self._text_hash = tokenizer_hash(read_tokenizer_files(services.model))
        self._view: InstanceView | None = None
        self._viewed_at_s = 0.0
        self._view_lock = asyncio.Lock()

    async def registration(
        self, last_reply: RegistrationReply | None = None, *, is_leaving: bool = False
    ) -> Registration:
        """Returns the message that registers the instance with a router. `last_reply`: the last reply of that router;
        None: the registration has no KV events."""
        view = await self._instance()
        # Awaited last, so that the events and the engine's incarnation below belong together.
        kv_events = None if last_reply is None else await self._kv_events(last_reply)
        stats, worker = view.engine, self._client.worker
        return Registration(
            schema_version=SCHEMA_VERSION,
            instance=view.incarnation,
            url=self._config.url,
            role=self._config.role,
            state="leaving"
            if is_leaving
            else instance_state(self._client, self._streams, stats is not None and stats.worker_ready),
            model=self._model.name,
            fingerprint=self._model.fingerprint if worker is None else worker.fingerprint,
            kv_layout=None if worker is None else worker.kv_layout,
            handoff_address=self._config.handoff_address,
            max_tokens=0 if worker is None else worker.max_request_tokens,
            block_size=0 if worker is None else worker.block_size,
            engine=self._client.engine or "",
            step=0 if stats is None else stats.step,
            load=InstanceLoad() if stats is None else instance_load(stats),
            kv_events=kv_events,
            pids_by_role=pids_by_role(view),
            oom_kills=view.oom_kills,
            tokenizer_hash=self._text_hash,
            model_aliases=list(self._model.aliases),
            name=self._config.instance_name,
            generation=self._config.instance_generation,
            node=self._config.node_name,
        )

    async def _kv_events(self, last_reply: RegistrationReply) -> KvEvents | None:
        return await self._client.kv_events(last_reply.next_kv_event) if last_reply.wants_kv_events else None

    async def _instance(self) -> InstanceView:
        async with self._view_lock:
            if self._view is None or self._clock.now_s() - self._viewed_at_s > MAX_VIEW_AGE_S:
                try:
                    self._view = await self._supervisor.query_instance()
                except Unavailable:
                    if self._view is None:
                        raise
                self._viewed_at_s = self._clock.now_s()
            return self._view


class RouterRegistrar:
    """Runs one task for each router, which sends registrations for as long as the process runs."""

    def __init__(
        self,
        config: ApiConfig,
        description: InstanceDescription,
        clock: Clock,
        new_session: Callable[[], aiohttp.ClientSession],
    ) -> None:
        self._config = config
        self._description = description
        self._clock = clock
        self._new_session = new_session
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._leaving: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._register_loop(url)) for url in self._config.routers]

    def register_now(self) -> None:
        """Sends a registration to all routers at once, after a change that they act on."""
        self._changed.set()
        self._changed = asyncio.Event()

    def deregister(self, *, is_replaced: bool = False) -> None:
        """Sends one last registration with the state `leaving`. A router that does not receive it notices the silence.
        An instance that is replaced sends `restarting` instead, since the new one registers at the same URL."""
        if self._tasks and self._leaving is None:
            self._leaving = asyncio.create_task(self._deregister(is_replaced=is_replaced))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        tasks = self._tasks + ([self._leaving] if self._leaving else [])
        if tasks:
            await asyncio.wait(tasks, timeout=2 * POST_TIMEOUT_S)

    async def _deregister(self, *, is_replaced: bool) -> None:
        for task in self._tasks:
            task.cancel()
        timeout_s = REPLACED_TIMEOUT_S if is_replaced else 2 * POST_TIMEOUT_S
        with contextlib.suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(timeout_s), self._new_session() as session:
                message = await asyncio.wait_for(self._description.registration(is_leaving=True), POST_TIMEOUT_S)
                if is_replaced:
                    message = msgspec.structs.replace(message, state=RESTARTING)
                posts = [self._post(session, url, message) for url in self._config.routers]
                await asyncio.gather(*posts, return_exceptions=True)

    async def _register_loop(self, router_url: str) -> None:
        pause_s, registration_log = FIRST_PAUSE_S, RegistrationLog(router_url, self._clock)
        reply: RegistrationReply | None = None
        async with self._new_session() as session:
            while True:
                changed = self._changed
                try:
                    reply = await self._post(session, router_url, await self._description.registration(reply))
                    wait_s, pause_s = min(max(reply.interval_s, MIN_AGAIN_S), MAX_AGAIN_S), FIRST_PAUSE_S
                    _log_reply(registration_log, reply)
                    self._description.others.record(reply.router, reply.num_other_instances)
                except RETRYABLE_ERRORS as fault:
                    wait_s, pause_s = pause_s, min(2 * pause_s, MAX_PAUSE_S)
                    _log_fault(registration_log, fault)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), wait_s)

    async def _post(self, session: aiohttp.ClientSession, router_url: str, message: Registration) -> RegistrationReply:
        body = msgspec.msgpack.encode(message)
        headers = {"content-type": MSGPACK}
        if key := self._config.cluster_key:
            headers[SIGNATURE_HEADER] = sign_request(key, "POST", REGISTER_PATH, body, self._clock.wall_s())
        timeout = aiohttp.ClientTimeout(total=POST_TIMEOUT_S)
        url = router_url.rstrip("/") + REGISTER_PATH
        async with session.post(url, data=body, headers=headers, timeout=timeout) as response:
            response.raise_for_status()
            return msgspec.msgpack.decode(await response.read(), type=RegistrationReply)


class ProbeEndpoint:
    """Returns the registration to a router that probes its instances itself."""

    def __init__(self, description: InstanceDescription, cluster_auth: ClusterAuth) -> None:
        self._description = description
        self._cluster_auth = cluster_auth
        self._decoder = msgspec.msgpack.Decoder(RegistrationReply)

    async def probe(self, request: Request) -> Response:
        reply = await read_cluster_message(request, self._cluster_auth, self._decoder)
        self._description.others.record(reply.router, reply.num_other_instances)
        return Response(msgspec.msgpack.encode(await self._description.registration(reply)), media_type=MSGPACK)


def _log_reply(registration_log: RegistrationLog, reply: RegistrationReply) -> None:
    if reply.error:
        registration_log.refused(reply.error)
    else:
        registration_log.accepted()


def _log_fault(registration_log: RegistrationLog, fault: Exception) -> None:
    cause = str(fault) or type(fault).__name__
    if isinstance(fault, aiohttp.ClientResponseError) and fault.status < 500:
        registration_log.refused(cause)
    else:
        registration_log.unreachable(cause)


def instance_load(stats: EngineStats) -> InstanceLoad:
    running = sum(stats.requests.get(status, 0) for status in RUNNING)
    return InstanceLoad(
        running=running,
        waiting=sum(stats.requests.values()) - running,
        max_running=running + stats.free_slots,
        free_blocks=sum(stats.kv_blocks.get(state, 0) for state in FREE_BLOCKS),
        num_blocks=sum(stats.kv_blocks.values()),
    )
