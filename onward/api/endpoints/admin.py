"""Routes about the server itself: models, health, version, metrics, configuration and drain."""

from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from onward.api.endpoints.cluster_auth import ClusterAuth
from onward.api.engine_link.engine_client import EngineClient
from onward.api.lifecycle.request_builder import ApiServices
from onward.api.lifecycle.stream_registry import StreamRegistry
from onward.api.model_meta import model_meta
from onward.api.supervisor_client import SupervisorClient
from onward.errors import Unavailable
from onward.obs.metric_names import MetricsRelabeling
from onward.proto.control import InstanceView
from onward.proto.stats import MetricFamily
from onward.version import __version__
from onward.web.auth import audit_log
from onward.web.auth.api_key_table import ANONYMOUS
from onward.web.auth.authenticator import CLUSTER, GuardedRoute, RouteAccess, get_caller
from onward.web.http_responses import health_response, json_response, metrics_response
from onward.web.openai_api.model_names import model_not_found

MAX_STALL_S = 30.0
"""The instance is unhealthy if it has work and has completed no step for this long."""
MAX_DRAIN_BYTES = 4096
PROCESS_ROLES = ("supervisor", "stream_store", "api", "engine", "worker", "worker_rank")


class AdminEndpoints:
    def __init__(self, services: ApiServices, supervisor: SupervisorClient, streams: StreamRegistry) -> None:
        self._config, self._model, self._client = services.config, services.model, services.engine_client
        self._text_processor = services.text_processor
        self._supervisor, self._streams = supervisor, streams
        self._names = (self._model.name, *self._model.aliases)

    def routes(self, cluster_auth: ClusterAuth) -> list[GuardedRoute]:
        """Returns the routes. Without API keys, `cluster_auth` decides which requests may drain the instance."""

        async def check_operator(request: Request, action: str) -> None:
            caller = get_caller(request.scope)
            if caller is ANONYMOUS:
                await cluster_auth.authenticated_body(request, MAX_DRAIN_BYTES)
            audit_log.log_action(CLUSTER if caller is ANONYMOUS and self._config.cluster_key else caller, action, 1)

        async def drain(request: Request) -> Response:
            await check_operator(request, "drain")
            return self.drain()

        async def undrain(request: Request) -> Response:
            await check_operator(request, "undrain")
            return self.undrain()

        endpoints: dict[str, tuple[RouteAccess, Callable[[Request], Awaitable[Response]]]] = {
            "/v1/models": (RouteAccess.USER, self.models),
            "/v1/models/{model:path}": (RouteAccess.USER, self.model),
            "/health": (RouteAccess.OPEN, self.health),
            "/live": (RouteAccess.OPEN, self.live),
            "/version": (RouteAccess.USER, self.version),
            "/metrics": (RouteAccess.OPEN if self._config.open_metrics else RouteAccess.ADMIN, self.metrics),
            "/info": (RouteAccess.ADMIN, self.info),
        }
        return [
            *(
                GuardedRoute(path, endpoint, methods=["GET"], access=access)
                for path, (access, endpoint) in endpoints.items()
            ),
            GuardedRoute("/drain", drain, methods=["POST"], access=RouteAccess.ADMIN),
            GuardedRoute("/undrain", undrain, methods=["POST"], access=RouteAccess.ADMIN),
        ]

    async def models(self, _: Request) -> Response:
        return json_response({"object": "list", "data": await self.model_cards()})

    def served_names(self) -> Collection[str]:
        """Returns every name by which requests may address the model."""
        return self._names

    async def model_cards(self) -> list[dict[str, Any]]:
        """Returns a model card for each of these names."""
        return [self._model_card(name) for name in self._names]

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name not in self._names:
            raise model_not_found(name, self._names)
        return json_response(self._model_card(name))

    async def health(self, request: Request) -> Response:
        if self._streams.is_draining:
            return health_response(request, "draining", "this instance is being drained")
        problem = await self._problem()
        return health_response(request, "ok" if problem is None else "unavailable", problem)

    def drain(self) -> Response:
        """Drains the whole instance. Idempotent."""
        self._supervisor.request_drain()
        self._streams.drain()
        return json_response({"status": "draining"})

    def undrain(self) -> Response:
        self._streams.check_not_stopping()
        self._supervisor.request_undrain()
        self._streams.undrain()
        return json_response({"status": "ok"})

    async def live(self, _: Request) -> Response:
        return json_response({"status": "ok"})

    async def version(self, _: Request) -> Response:
        return json_response({"version": __version__})

    async def metrics(self, _: Request) -> Response:
        view = await self._supervisor.query_instance()
        labels = {"model_name": self._model.name, "role": self._config.role}
        return metrics_response(MetricsRelabeling(self._config.metrics_names, labels).apply(view.families))

    async def info(self, _: Request) -> Response:
        view = await self._supervisor.query_instance()
        return json_response(
            {
                "version": __version__,
                "model": self._model_card(self._model.name)
                | {
                    "aliases": self._model.aliases,
                    "fingerprint": self._model.fingerprint,
                    "architecture": self._model.config.architecture,
                    "precision": self._model.precision,
                    "weight_formats": self._model.weight_formats,
                },
                "resume": {"is_exact": self._model.is_exact, "guarantee": self._model.resume_guarantee},
                "role": self._config.role,
                "state": instance_state(
                    self._client, self._streams, view.engine is not None and view.engine.worker_ready
                ),
                "incarnation": view.incarnation,
                "pids": pids_by_role(view),
                "processes": view.processes,
                "restarts": view.restarts,
                "oom_kills": view.oom_kills,
                "kv_blocks": view.engine.kv_blocks if view.engine else {},
                "requests": view.engine.requests if view.engine else {},
                "live_streams": live_stream_counts(view.families),
                "engine": view.engine,
                "configuration": self._config.serve_config,
            }
        )

    async def _problem(self) -> str | None:
        """Returns the reason why requests cannot be served now, or None."""
        if self._client.engine is None:
            return "no engine is running"
        try:
            engine = (await self._supervisor.query_instance()).engine
        except Unavailable as fault:
            return fault.message
        if engine is None:
            return "the engine does not answer"
        if not engine.worker_ready:
            return "the engine has no worker"
        if engine.stalled_s > MAX_STALL_S:
            return f"no step was completed for {engine.stalled_s:.0f} s although there is work"
        return None

    def _model_card(self, name: str) -> dict[str, Any]:
        worker = self._client.worker
        return {
            "id": name,
            "object": "model",
            "created": self._model.created_s,
            "owned_by": "onward",
            "root": self._model.name,
            "max_model_len": worker.max_model_len if worker else self._model.config.max_position_embeddings,
            "meta": model_meta(self._model, self._text_processor),
        }


def pids_by_role(view: InstanceView) -> dict[str, list[int]]:
    return {role: [process.pid for process in view.processes if process.role == role] for role in PROCESS_ROLES}


def live_stream_counts(families: Iterable[MetricFamily]) -> dict[str, Any]:
    """Returns the live streams of all api processes by origin, and whether every router could move its own to another
    instance (`can_move`; None if no router has reported)."""
    found = {family.name: family.series for family in families}
    counts = {series.labels["origin"]: int(series.value) for series in found.get("onward_live_streams", [])}
    others = [series.value for series in found.get("onward_other_instances", [])]
    return {
        "routed": counts.get("router", 0),
        "direct": counts.get("client", 0),
        "can_move": all(others) if others else None,
    }


def instance_state(client: EngineClient, streams: StreamRegistry, has_worker: bool) -> str:
    """Returns the state of the whole instance for routers and operators: `starting`, `ready`, `restarting` or `draining`.
    `has_worker`: the engine replies and has a worker."""
    if streams.is_draining:
        return "draining"
    if client.worker is None:
        return "starting"
    return "ready" if client.engine is not None and has_worker else "restarting"
