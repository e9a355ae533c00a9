"""The HTTP application: routes, and what wraps them all."""

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from onward.api.abort import Aborting
from onward.api.admin import Admin
from onward.api.attempts import AttemptEndpoint, Finding
from onward.api.chat import Chat
from onward.api.completions import Completions
from onward.api.dialect import Dialect
from onward.api.generate import Generate
from onward.api.generation import GenerationEndpoint, Generator
from onward.api.identity import Identified
from onward.api.jobs import Backend, Jobs
from onward.api.proven import Proven
from onward.api.registering import Description, Probing
from onward.api.streams import Streams
from onward.api.telling_text import TellingText
from onward.api.wrong_role import WrongRole
from onward.obs.metrics import Registry
from onward.proto.router import ATTEMPT_PATH, FIND_PATH, PROBE_PATH, TEXT_PATH
from onward.web.envelope import Envelope
from onward.web.error_answers import EXCEPTION_HANDLERS


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
        Route(TEXT_PATH, TellingText(backend, proven).tell, methods=["POST"]),
        *Aborting(backend.client, streams, config.max_body_bytes).routes(),
        *admin.routes(proven),
    ]
    requests = registry.counter("onward_http_requests_total", "HTTP responses begun", ["path", "status"])
    paths = [route.path for route in routes]
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(Envelope, requests=requests, paths=paths),
            Middleware(Identified, clock=backend.clock, chance=backend.chance),
            *_cors(config.cors_origin),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
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
