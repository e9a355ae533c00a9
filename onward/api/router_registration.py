"""Tells routers about this instance, each of them each second, and that it leaves.

The routers are told side by side: one that hangs or is away holds up nobody else, and is tried again for ever. What the
engine's cache has learnt goes along as `kv_events`, to each router whose last answer wants them, from where it says.
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
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
MIN_AGAIN_S, MAX_AGAIN_S = 0.1, 10.0
MAX_VIEW_AGE_S = 0.3
"""So that several routers share one look at the instance."""
FREE_BLOCKS = ("free", "cached")
RUNNING = ("running", "preempting")
RETRYABLE_ERRORS = (aiohttp.ClientError, TimeoutError, OSError, Unavailable, msgspec.MsgspecError)
"""Of telling a router: it is tried again."""
PATIENCE_S = 15.0
"""How long a router that has answered before may be silent until that is worth a warning: longer than one that stops takes
by default (`drain_s` and its last words), and than a restart. Whoever stops a cluster stops the router first."""
MAX_COUNT_AGE_S = 10.0
"""The number of other instances that a router has said is forgotten after so long."""
MAX_COUNTED_ROUTERS = 64

_logger = logging.getLogger(__name__)


class OtherInstanceCounts:
    """Whether other instances could take over this one's streams, as its routers have said last."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counts: dict[str, tuple[int, float]] = {}

    def record(self, router: str, num_others: int) -> None:
        """`router`: its incarnation. A negative number says nothing: the router does not know the field."""
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
        """Every router that was heard lately knows no instance but this one. False where none was heard."""
        counts = self.by_router().values()
        return bool(counts) and not any(counts)


class RegistrationLog:
    """How an instance stands with one router: a log line when it is not taken, and one when it is again."""

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
        """It has answered, and said no."""
        self._answered_at_s = self._clock.now_s()
        self._warn(cause)

    def unreachable(self, cause: str) -> None:
        """It has not answered. One that never did may have another address."""
        if self._answered_at_s is None or self._clock.now_s() - self._answered_at_s > PATIENCE_S:
            self._warn(cause)

    def _warn(self, cause: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(log.event("router does not take us", url=self._url, cause=cause))


class InstanceDescription:
    """What this instance says of itself."""

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
        """`last_reply`: what the router that hears it has said last."""
        view = await self._instance()
        # The last to be waited for, so that they and what is said of the engine below belong together.
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
    """The task that does it, for as long as the process runs."""

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
        """Something has changed that routers act on."""
        self._changed.set()
        self._changed = asyncio.Event()

    def deregister(self) -> None:
        """Says so once; routers that do not hear it will notice by the silence."""
        if self._tasks and self._leaving is None:
            self._leaving = asyncio.create_task(self._deregister())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        tasks = self._tasks + ([self._leaving] if self._leaving else [])
        if tasks:
            await asyncio.wait(tasks, timeout=2 * POST_TIMEOUT_S)

    async def _deregister(self) -> None:
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(Unavailable, TimeoutError):
            message = await asyncio.wait_for(self._description.registration(is_leaving=True), POST_TIMEOUT_S)
            async with self._new_session() as session:
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
    """The same for a router that has a list of its instances, and asks."""

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
