"""The router's HTTP application: routes, errors in one form, and what wraps them all."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from onward.errors import InternalError, OnwardError
from onward.obs.metrics import Registry
from onward.proto.request import ErrorInfo
from onward.proto.router import REGISTER_PATH
from onward.router.aborting import Aborting
from onward.router.admin import Admin
from onward.router.envelope import Envelope
from onward.router.failures import error_body, error_headers, info_of
from onward.router.generation import GenerationEndpoint
from onward.router.serving import Serving

GENERATING_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/generate")
GENERATING_METHODS = ("GET", "POST")
STATUS_PATH = "/internal/status"

Handler = Callable[[Request], Awaitable[Response]]


def build_app(serving: Serving, registry: Registry, cluster_key: str) -> ASGIApp:
    config, admin = serving.core.config, Admin(serving, registry, cluster_key)
    aborting = Aborting(serving, config.max_body_bytes)
    asked: dict[str, Handler] = {
        "/v1/models": admin.models,
        "/v1/models/{model:path}": admin.models,
        "/health": admin.health,
        "/live": admin.live,
        "/version": admin.version,
        "/metrics": admin.metrics,
        "/info": admin.info,
        STATUS_PATH: admin.status,
    }
    routes = [
        *(Route(path, GenerationEndpoint(serving), methods=GENERATING_METHODS) for path in GENERATING_PATHS),
        Route("/v1/abort", aborting.abort, methods=["POST"]),
        Route(REGISTER_PATH, admin.register, methods=["POST"]),
        *(Route(path, handler, methods=["GET"]) for path, handler in asked.items()),
    ]
    paths = [route.path for route in routes]
    handlers: Any = {OnwardError: _on_onward_error, HTTPException: _on_http_exception, Exception: _on_fault}
    others = Starlette(routes=routes, exception_handlers=handlers)
    app = _Streams({path: GenerationEndpoint(serving) for path in GENERATING_PATHS}, others)
    return Envelope(app, serving.core.metrics.requests, paths, config.api_key)


class _Streams:
    """Takes the requests that generate past Starlette, whose layers would each handle every event of a stream."""

    def __init__(self, generating: Mapping[str, ASGIApp], others: ASGIApp) -> None:
        self._generating = generating
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._others
        if scope["type"] == "http" and scope["method"] in GENERATING_METHODS:
            app = self._generating.get(scope["path"], app)
        await app(scope, receive, send)


async def _on_onward_error(_: Request, error: OnwardError) -> Response:
    return _error_response(info_of(error))


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    """Starlette's own refusals: no such route, or not this method."""
    if error.status_code == 405:
        message, code = f"{request.method} is not allowed on {request.url.path[:200]}", "method_not_allowed"
    else:
        message, code = f"there is nothing at {request.url.path[:200]}", "not_found"
    response = _error_response(ErrorInfo(code, message, error.status_code))
    response.headers.update(error.headers or {})
    return response


async def _on_fault(_: Request, __: Exception) -> Response:
    return _error_response(info_of(InternalError("internal error")))


def _error_response(info: ErrorInfo) -> Response:
    return Response(error_body(info), info.status, headers=error_headers(info), media_type="application/json")
