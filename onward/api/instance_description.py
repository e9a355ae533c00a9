"""What this instance reports about itself to routers.

`router_registration` sends it; a router that probes gets it as the reply.
"""

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onward.api.endpoints.admin import instance_state, pids_by_role
from onward.api.endpoints.attempts import MSGPACK, read_cluster_message
from onward.api.endpoints.cluster_auth import ClusterAuth
from onward.api.lifecycle.request_builder import ApiServices
from onward.api.lifecycle.stream_registry import StreamRegistry
from onward.api.supervisor_client import SupervisorClient
from onward.clock import Clock
from onward.errors import Unavailable
from onward.obs.metrics import LabelValues
from onward.proto import SCHEMA_VERSION
from onward.proto.control import InstanceView
from onward.proto.kv_events import KvEvents
from onward.proto.router import InstanceLoad, Registration, RegistrationReply
from onward.proto.stats import EngineStats
from onward.text.prompt_tokenizer import read_tokenizer_files, tokenizer_hash

MAX_VIEW_AGE_S = 0.3
"""How long a view of the instance is reused, so that several routers share one query of the supervisor."""
MAX_COUNT_AGE_S = 10.0
"""How long a router's report of the number of other instances is valid."""
MAX_COUNTED_ROUTERS = 64
FREE_BLOCKS = ("free", "cached")
RUNNING = ("running", "preempting")


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


def instance_load(stats: EngineStats) -> InstanceLoad:
    running = sum(stats.requests.get(status, 0) for status in RUNNING)
    return InstanceLoad(
        running=running,
        waiting=sum(stats.requests.values()) - running,
        max_running=running + stats.free_slots,
        free_blocks=sum(stats.kv_blocks.get(state, 0) for state in FREE_BLOCKS),
        num_blocks=sum(stats.kv_blocks.values()),
    )
