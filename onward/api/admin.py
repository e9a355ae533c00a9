"""Routes about the server itself: which model, whether it is well, what it counts."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from onward.api.engine_client import EngineClient
from onward.api.proven import Proven
from onward.api.streams import Streams
from onward.config import ApiConfig
from onward.errors import NotFound, Unavailable
from onward.proto.control import InstanceView
from onward.proto.model import PreparedModel
from onward.proto.stats import EngineStats, Family
from onward.version import __version__
from onward.web import audit
from onward.web.callers import CLUSTER, Access, GuardedRoute, caller_of
from onward.web.keys import ANONYMOUS
from onward.web.responses import health_response, json_response, metrics_response

MAX_STALL_S = 30.0
"""Work without a completed step for this long is no progress."""
MAX_DRAIN_BYTES = 4096
ROLES = ("supervisor", "shelf", "api", "engine", "worker")


class Instance(Protocol):
    """What `SupervisorLink` does."""

    async def instance(self) -> InstanceView: ...
    def ask_drain(self) -> None: ...
    def ask_undrain(self) -> None: ...


class Admin:
    def __init__(
        self,
        config: ApiConfig,
        model: PreparedModel,
        client: EngineClient,
        supervisor: Instance,
        streams: Streams,
    ) -> None:
        self._config = config
        self._model = model
        self._client = client
        self._supervisor = supervisor
        self._streams = streams

    def routes(self, proven: Proven) -> list[GuardedRoute]:
        """`proven`: who may take the instance out of service where there are no keys."""

        async def check_operator(request: Request, action: str) -> None:
            caller = caller_of(request.scope)
            if caller is ANONYMOUS:
                await proven.body(request, MAX_DRAIN_BYTES)
            audit.note(CLUSTER if caller is ANONYMOUS and self._config.cluster_key else caller, action, 1)

        async def drain(request: Request) -> Response:
            await check_operator(request, "drain")
            return self.drain()

        async def undrain(request: Request) -> Response:
            await check_operator(request, "undrain")
            return self.undrain()

        endpoints: dict[str, tuple[Access, Callable[[Request], Awaitable[Response]]]] = {
            "/v1/models": (Access.USER, self.models),
            "/v1/models/{model:path}": (Access.USER, self.model),
            "/health": (Access.OPEN, self.health),
            "/live": (Access.OPEN, self.live),
            "/version": (Access.USER, self.version),
            "/metrics": (Access.OPEN if self._config.open_metrics else Access.ADMIN, self.metrics),
            "/info": (Access.ADMIN, self.info),
        }
        return [
            *(GuardedRoute(path, one, methods=["GET"], access=access) for path, (access, one) in endpoints.items()),
            GuardedRoute("/drain", drain, methods=["POST"], access=Access.ADMIN),
            GuardedRoute("/undrain", undrain, methods=["POST"], access=Access.ADMIN),
        ]

    async def models(self, _: Request) -> Response:
        return json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name != self._model.name:
            raise NotFound(
                f"model: {name[:80]!r} is not served here; {self._model.name!r} is",
                code="model_not_found",
                param="model",
            )
        return json_response(self._model_card())

    async def health(self, request: Request) -> Response:
        if self._streams.is_draining:
            return health_response(request, "draining", "this instance is being drained")
        problem = await self._problem()
        return health_response(request, "ok" if problem is None else "unavailable", problem)

    def drain(self) -> Response:
        """Of the whole instance. Asking again changes nothing."""
        self._supervisor.ask_drain()
        self._streams.drain()
        return json_response({"status": "draining"})

    def undrain(self) -> Response:
        self._streams.check_not_stopping()
        self._supervisor.ask_undrain()
        self._streams.undrain()
        return json_response({"status": "ok"})

    async def live(self, _: Request) -> Response:
        return json_response({"status": "ok"})

    async def version(self, _: Request) -> Response:
        return json_response({"version": __version__})

    async def metrics(self, _: Request) -> Response:
        view = await self._supervisor.instance()
        return metrics_response(view.families)

    async def info(self, _: Request) -> Response:
        view = await self._supervisor.instance()
        pids = {role: [process.pid for process in view.processes if process.role == role] for role in ROLES}
        return json_response(
            {
                "version": __version__,
                "model": self._model_card()
                | {"fingerprint": self._model.fingerprint, "architecture": self._model.config.architecture},
                "resume": {"is_exact": self._model.is_exact, "guarantee": self._model.resume_guarantee},
                "role": self._config.role,
                "state": state_of(self._client, self._streams, view.engine),
                "incarnation": view.incarnation,
                "pids": pids,
                "processes": view.processes,
                "restarts": view.restarts,
                "oom_kills": view.oom_kills,
                "kv_blocks": view.engine.kv_blocks if view.engine else {},
                "requests": view.engine.requests if view.engine else {},
                "live_streams": streams_shown(view.families),
                "engine": view.engine,
                "configuration": self._config.instance,
            }
        )

    async def _problem(self) -> str | None:
        """Why requests would not be served now, if they would not."""
        if self._client.engine is None:
            return "there is no engine"
        try:
            engine = (await self._supervisor.instance()).engine
        except Unavailable as fault:
            return fault.message
        if engine is None:
            return "the engine does not answer"
        if not engine.worker_ready:
            return "the engine has no worker"
        if engine.stalled_s > MAX_STALL_S:
            return f"no step was completed for {engine.stalled_s:.0f} s although there is work"
        return None

    def _model_card(self) -> dict[str, Any]:
        worker = self._client.worker
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created_s,
            "owned_by": "onward",
            "max_model_len": worker.max_model_len if worker else self._model.config.max_position_embeddings,
        }


def streams_shown(families: Iterable[Family]) -> dict[str, Any]:
    """Live streams of all api processes, and whether a router could move its own: None if no router has said."""
    found = {family.name: family.series for family in families}
    counts = {one.labels["origin"]: int(one.value) for one in found.get("onward_live_streams", [])}
    others = [one.value for one in found.get("onward_other_instances", [])]
    return {
        "routed": counts.get("router", 0),
        "direct": counts.get("client", 0),
        "can_move": all(others) if others else None,
    }


def state_of(client: EngineClient, streams: Streams, engine: EngineStats | None) -> str:
    """Of the whole instance, as routers and people are told: `starting`, `ready`, `restarting` or `draining`."""
    if streams.is_draining:
        return "draining"
    if client.worker is None:
        return "starting"
    is_ready = client.engine is not None and engine is not None and engine.worker_ready
    return "ready" if is_ready else "restarting"
