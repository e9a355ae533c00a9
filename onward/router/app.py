"""The router's HTTP application: routes, errors in one form, and what wraps them all."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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
STATUS_PATH = "/internal/status"

Handler = Callable[[Request], Awaitable[Response]]


def build_app(serving: Serving, registry: Registry, cluster_key: str) -> Starlette:
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
        *(Route(path, GenerationEndpoint(serving), methods=["GET", "POST"]) for path in GENERATING_PATHS),
        Route("/v1/abort", aborting.abort, methods=["POST"]),
        Route(REGISTER_PATH, admin.register, methods=["POST"]),
        *(Route(path, handler, methods=["GET"]) for path, handler in asked.items()),
    ]
    paths = [route.path for route in routes]
    handlers: Any = {OnwardError: _on_onward_error, HTTPException: _on_http_exception, Exception: _on_fault}
    envelope = Middleware(Envelope, requests=serving.core.metrics.requests, paths=paths, api_key=config.api_key)
    return Starlette(routes=routes, middleware=[envelope], exception_handlers=handlers)


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
