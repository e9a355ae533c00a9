"""The router's HTTP application: routes, and what wraps them all."""

from collections.abc import Awaitable, Callable, Mapping

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from onward.obs.metrics import Registry
from onward.proto.router import REGISTER_PATH
from onward.router.aborting import Aborting
from onward.router.admin import Admin
from onward.router.api_key import ApiKey
from onward.router.generation import GenerationEndpoint
from onward.router.serving import Serving
from onward.router.tokenizing import Tokenizing
from onward.web.envelope import Envelope
from onward.web.error_answers import EXCEPTION_HANDLERS

GENERATING_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/generate")
GENERATING_METHODS = ("GET", "POST")
STATUS_PATH = "/internal/status"

Handler = Callable[[Request], Awaitable[Response]]


def build_app(serving: Serving, registry: Registry, cluster_key: str) -> ASGIApp:
    config, admin = serving.core.config, Admin(serving, registry, cluster_key)
    # Only `prefix` looks at the tokens of a prompt; without it no tokenizer is fetched, and nothing costs.
    tokenizing = Tokenizing(serving, registry) if serving.core.replicas.index is not None else None
    generating = GenerationEndpoint(serving, tokenizing)
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
        *(Route(path, generating, methods=GENERATING_METHODS) for path in GENERATING_PATHS),
        Route("/v1/abort", aborting.abort, methods=["POST"]),
        Route(REGISTER_PATH, _looking_for_text(admin.register, tokenizing), methods=["POST"]),
        *(Route(path, handler, methods=["GET"]) for path, handler in asked.items()),
    ]
    paths = [route.path for route in routes]
    others = Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS)
    app = _Streams(dict.fromkeys(GENERATING_PATHS, generating), others)
    return Envelope(app, serving.core.metrics.requests, paths, ApiKey(config.api_key).refusal)


def _looking_for_text(register: Handler, tokenizing: Tokenizing | None) -> Handler:
    """A new instance's tokenizer is fetched before a request needs it."""
    if tokenizing is None:
        return register
    source = tokenizing.source

    async def register_and_look(request: Request) -> Response:
        answer = await register(request)
        source.look()
        return answer

    return register_and_look


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
