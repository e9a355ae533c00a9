"""A router as the live view shows it: its streams, and each instance as the instance itself shows it. Also the buttons:
drain and undrain an instance."""

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onward.errors import RETRY_SOON_S, ClientError, NotFound, Unavailable
from onward.router.stream_routing_state import StreamRoutingState
from onward.router.stream_runner import StreamRunner
from onward.web import asgi
from onward.web.auth import audit_log
from onward.web.auth.authenticator import GuardedRoute, RouteAccess, get_caller
from onward.web.json_body import decode
from onward.web.ui.demo_guard import DEMO_PATHS, check_own_page
from onward.web.ui.live_feed import SNAPSHOT_PATH
from onward.web.ui.static_files import PAGE_PATH

DRAIN_PATH, UNDRAIN_PATH = f"{PAGE_PATH}/drain", f"{PAGE_PATH}/undrain"
MAX_STREAMS = 256
MAX_INSTANCES = 16
"""Instances that are queried for details in one update, at most."""
MAX_RESUMES = 16
MAX_LABEL = 64
LOOK_TIMEOUT_S = 0.8
OPERATE_TIMEOUT_S = 5.0
MAX_BODY_BYTES = 4096


class InstanceChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    instance: str


_choices = msgspec.json.Decoder(InstanceChoice)


class RouterLiveView:
    """Builds the JSON snapshot of a router's streams and instances that /ui and `onward top` show."""

    def __init__(self, runner: StreamRunner) -> None:
        self._runner, self._core = runner, runner.core

    async def look(self) -> bytes:
        now_s = self._runner.clock.now_s()
        status = self._core.status(now_s)
        details = await asyncio.gather(*(self._details(one["url"]) for one in status["instances"][:MAX_INSTANCES]))
        instances = [
            known | detail
            for known, detail in zip(
                map(_without_load, status["instances"]),
                [*details, *({} for _ in status["instances"][MAX_INSTANCES:])],
                strict=True,
            )
        ]
        streams = self._core.live_streams()
        return msgspec.json.encode(
            {
                "at_s": now_s,
                "role": "router",
                "id": self._core.incarnation,
                "instances": instances,
                "num_streams": len(streams),
                "streams": [_describe_stream(routing, now_s) for routing in streams[:MAX_STREAMS]],
                "resumes": status["resumes"][-MAX_RESUMES:],
            }
        )

    async def _details(self, url: str) -> dict[str, Any]:
        """Returns the instance's own snapshot, or nothing if it is late or refuses the request."""
        try:
            reply = await asyncio.wait_for(self._runner.upstream.get(url, SNAPSHOT_PATH), LOOK_TIMEOUT_S)
            if reply is None or reply[0] != 200:
                return {}
            [instance] = msgspec.json.decode(reply[1])["instances"]
            return {name: instance[name] for name in ("processes", "restarts", "engine")}
        except (TimeoutError, msgspec.DecodeError, LookupError, TypeError, ValueError):
            return {}


class InstanceOperator:
    """Passes an admin's button on to the instance that it names."""

    def __init__(self, runner: StreamRunner) -> None:
        self._runner, self._config = runner, runner.core.config

    def routes(self) -> list[GuardedRoute]:
        async def drain(request: Request) -> Response:
            return await self.forward(request, "/drain", "drain")

        async def undrain(request: Request) -> Response:
            return await self.forward(request, "/undrain", "undrain")

        demo_routes = [self._demo_route(target) for target in DEMO_PATHS] if self._config.demo else []
        return [
            *demo_routes,
            GuardedRoute(DRAIN_PATH, drain, methods=["POST"], access=RouteAccess.ADMIN),
            GuardedRoute(UNDRAIN_PATH, undrain, methods=["POST"], access=RouteAccess.ADMIN),
        ]

    def _demo_route(self, target: str) -> GuardedRoute:
        async def kill(request: Request) -> Response:
            check_own_page(request.scope, self._config.host)
            return await self.forward(request, DEMO_PATHS[target], f"kill_{target}")

        return GuardedRoute(DEMO_PATHS[target], kill, methods=["POST"], access=RouteAccess.ADMIN)

    async def forward(self, request: Request, path: str, action: str) -> Response:
        """Forwards the request to the instance without its body: the signature covers the path, so that is enough."""
        url = self._url_of(await _read_choice(request))
        audit_log.log_action(get_caller(request.scope), action, 1)
        reply = await self._runner.upstream.forward(url, path, b"", OPERATE_TIMEOUT_S)
        if reply is None:
            raise Unavailable("the instance does not answer", retry_after_s=RETRY_SOON_S)
        return Response(reply.body, reply.status, media_type="application/json")

    def _url_of(self, instance_id: str) -> str:
        for instance in self._runner.core.instances.list_instances(self._runner.clock.now_s()):
            if instance.instance_id == instance_id:
                return instance.url
        raise NotFound("instance: there is no instance of this id behind the router", param="instance")


async def _read_choice(request: Request) -> str:
    try:
        return decode(await asgi.read_body(request.receive, MAX_BODY_BYTES), _choices).instance
    except asgi.ClientDisconnected:
        raise ClientError("the client has gone") from None


def _without_load(known: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in known.items() if name in ("id", "role", "model", "state", "url", "streams")}


def _describe_stream(routing: StreamRoutingState, now_s: float) -> dict[str, Any]:
    stream = routing.stream
    return {
        "id": stream.request_id,
        "label": stream.request.client_request_id[:MAX_LABEL],
        "caller": stream.request.caller,
        "instance": stream.instance_id if stream.is_attempt_running else None,
        "is_paused": routing.pending_resume is not None,
        "model": stream.model,
        "attempt": stream.epoch,
        "num_tokens": stream.num_tokens,
        "trace_id": "" if routing.trace is None else routing.trace.trace_id,
        "num_resumes": stream.num_resumes,
        "age_s": now_s - routing.opened_at_s,
    }
