"""The HTTP application: routes, errors in one form, and what wraps them all."""

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from onward.api.abort import Aborting
from onward.api.admin import Admin
from onward.api.attempts import AttemptEndpoint, Finding
from onward.api.chat import Chat
from onward.api.completions import Completions
from onward.api.dialect import Dialect
from onward.api.envelope import Envelope
from onward.api.failures import RequestFailed, error_body, error_headers, info_of
from onward.api.generate import Generate
from onward.api.generation import GenerationEndpoint, Generator
from onward.api.jobs import Backend, Jobs
from onward.api.proven import Proven
from onward.api.registering import Description, Probing
from onward.api.streams import Streams
from onward.api.wrong_role import WrongRole
from onward.errors import InternalError, OnwardError
from onward.obs.metrics import Registry
from onward.proto.request import ErrorInfo
from onward.proto.router import ATTEMPT_PATH, FIND_PATH, PROBE_PATH


def build_app(
    backend: Backend, admin: Admin, streams: Streams, description: Description, registry: Registry
) -> Starlette:
    prompts, config = backend.prompts, backend.config
    dialects: dict[str, Dialect] = {
        "/v1/chat/completions": Chat(prompts),
        "/v1/completions": Completions(prompts),
        "/v1/generate": Generate(prompts, config.internal_adapter),
    }
    generates = config.role != "prefill"
    proven = Proven(config.cluster_key, backend.clock)
    generators = {path: Generator(Jobs(one, path, backend), backend, streams) for path, one in dialects.items()}
    endpoints = {path: GenerationEndpoint(one, backend, streams) for path, one in generators.items()}
    attempts = AttemptEndpoint(generators if generates else {}, backend, streams, proven)
    routes = [
        *(Route(path, one if generates else WrongRole(), methods=["GET", "POST"]) for path, one in endpoints.items()),
        Route(ATTEMPT_PATH, attempts, methods=["POST"]),
        Route(FIND_PATH, Finding(streams, proven).find, methods=["POST"]),
        Route(PROBE_PATH, Probing(description, proven).probe, methods=["POST"]),
        *Aborting(backend.client, streams, config.max_body_bytes).routes(),
        *admin.routes(),
    ]
    requests = registry.counter("onward_http_requests_total", "HTTP responses begun", ["path", "status"])
    paths = [route.path for route in routes]
    handlers: Any = {
        OnwardError: _on_onward_error,
        RequestFailed: _on_failed_request,
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


async def _on_failed_request(_: Request, failure: RequestFailed) -> Response:
    return _error_response(failure.info)


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
