"""The HTTP application: routes, errors in one form, and what wraps them all."""

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from onward.api.abort import Aborting
from onward.api.admin import Admin
from onward.api.chat import Chat
from onward.api.completions import Completions
from onward.api.dialect import Dialect
from onward.api.envelope import Envelope
from onward.api.failures import error_body, error_headers, info_of
from onward.api.generate import Generate
from onward.api.generation import Backend, GenerationEndpoint
from onward.api.wrong_role import WrongRole
from onward.errors import InternalError, OnwardError
from onward.obs.metrics import Registry
from onward.proto.request import ErrorInfo


def build_app(backend: Backend, admin: Admin, registry: Registry) -> Starlette:
    prompts, config = backend.prompts, backend.config
    dialects: dict[str, Dialect] = {
        "/v1/chat/completions": Chat(prompts),
        "/v1/completions": Completions(prompts),
        "/v1/generate": Generate(prompts, config.internal_adapter),
    }
    routes = [
        *(Route(path, _endpoint(dialect, backend), methods=["POST"]) for path, dialect in dialects.items()),
        *Aborting(backend.client, config.max_body_bytes).routes(),
        *admin.routes(),
    ]
    requests = registry.counter("onward_http_requests_total", "HTTP responses begun", ["path", "status"])
    paths = [route.path for route in routes]
    handlers: Any = {
        OnwardError: _on_onward_error,
        HTTPException: _on_http_exception,
        Exception: _on_fault,
    }
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(Envelope, clock=backend.clock, requests=requests, paths=paths),
            *_cors(config.cors_origin),
        ],
        exception_handlers=handlers,
    )


def _endpoint(dialect: Dialect, backend: Backend) -> ASGIApp:
    # A class instance, since Starlette takes a plain function for a handler of its own kind.
    return WrongRole() if backend.config.role == "prefill" else GenerationEndpoint(dialect, backend)


def _cors(origins: tuple[str, ...]) -> list[Middleware]:
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    ]


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
