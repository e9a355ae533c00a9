"""The router's HTTP application: routes, and what wraps them all."""

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from onward.obs.metrics import Registry
from onward.proto.router import REGISTER_PATH
from onward.router import embedding
from onward.router.aborting import Aborting
from onward.router.admin import Admin
from onward.router.embedding import Embedding
from onward.router.generation import GenerationEndpoint
from onward.router.passing_on import PATHS as PASSED_ON
from onward.router.passing_on import PassingOn
from onward.router.response_creation import ResponseCreation
from onward.router.responses import FoundResponses
from onward.router.serving import Serving
from onward.router.tokenizing import Tokenizing
from onward.web import docs_page, response_ids, root_page
from onward.web.allowed_hosts import AllowedHosts
from onward.web.application import application
from onward.web.browsers import for_browsers
from onward.web.callers import Access, BoundedConnections, Callers, GuardedRoute, Keyring
from onward.web.cross_site import CrossSiteGuard
from onward.web.envelope import Envelope, first_of, refuse
from onward.web.media_type import media_type_refusal
from onward.web.paced_callers import PacedCallers
from onward.web.response_endpoint import ResponseEndpoint

GENERATING_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/generate", response_ids.PATH)
GENERATING_METHODS = ("GET", "POST")
STATUS_PATH = "/internal/status"

Handler = Callable[[Request], Awaitable[Response]]


def build_app(serving: Serving, registry: Registry, cluster_key: str, keyring: Keyring) -> ASGIApp:
    # Only `prefix` looks at the tokens of a prompt; without it no tokenizer is fetched, and nothing costs.
    tokenizing = Tokenizing(serving, registry) if serving.core.replicas.index is not None else None
    plain = GenerationEndpoint(serving, tokenizing)
    found = FoundResponses(serving)
    generating = dict.fromkeys(GENERATING_PATHS, plain) | {
        response_ids.PATH: ResponseCreation(serving, tokenizing, found)
    }
    routes = routes_of(serving, Admin(serving, registry, cluster_key), generating, tokenizing, found)
    config = serving.core.config
    origins = config.cors_origin
    guard = CrossSiteGuard(AllowedHosts.of(config.host, config.allowed_host), origins)
    callers = Callers(keyring, routes, cluster_key, serving.clock, answers_preflights=bool(origins), guard=guard)
    app = _Streams(generating, application(routes))
    paths = [route.path for route in routes]
    inside = for_browsers(BoundedConnections(PacedCallers(app, serving.clock, registry)), origins)
    refusal = first_of(callers.refusal, media_type_refusal)
    return Envelope(inside, serving.core.metrics.requests, paths, refusal, for_browsers(refuse, origins))


def routes_of(
    serving: Serving,
    admin: Admin,
    generating: Mapping[str, GenerationEndpoint],
    tokenizing: Tokenizing | None,
    found: FoundResponses,
) -> list[GuardedRoute]:
    """All there are, each with those who may use it."""
    config = serving.core.config
    asked: dict[str, tuple[Access, Handler]] = {
        "/v1/models": (Access.USER, admin.told_by_an_instance),
        "/v1/models/{model:path}": (Access.USER, admin.told_by_an_instance),
        "/openapi.json": (Access.USER, admin.told_by_an_instance),
        docs_page.PATH: (Access.OPEN, docs_page.show),
        root_page.PATH: (Access.OPEN, root_page.show),
        "/health": (Access.OPEN, admin.health),
        "/live": (Access.OPEN, admin.live),
        "/version": (Access.USER, admin.version),
        "/metrics": (Access.OPEN if config.open_metrics else Access.ADMIN, admin.metrics),
        "/info": (Access.ADMIN, admin.info),
        STATUS_PATH: (Access.ADMIN, admin.status),
    }
    aborting = Aborting(serving, found, config.max_body_bytes)
    passing_on = PassingOn(serving, config.max_body_bytes)
    of_response = ResponseEndpoint(found)
    register = _looking_for_text(admin.register, tokenizing)
    return [
        *(GuardedRoute(path, one, methods=GENERATING_METHODS, access=Access.USER) for path, one in generating.items()),
        GuardedRoute(response_ids.ITEM_PATH, of_response, methods=["GET", "DELETE"], access=Access.USER),
        GuardedRoute(response_ids.CANCEL_PATH, of_response, methods=["POST"], access=Access.USER),
        GuardedRoute(response_ids.INPUT_PATH, of_response, methods=["GET"], access=Access.USER),
        GuardedRoute(embedding.PATH, Embedding(serving, config.max_body_bytes), methods=["POST"], access=Access.USER),
        GuardedRoute("/v1/abort", aborting.abort, methods=["POST"], access=Access.USER),
        *(GuardedRoute(path, passing_on.ask, methods=["POST"], access=Access.USER) for path in PASSED_ON),
        GuardedRoute(REGISTER_PATH, register, methods=["POST"], access=Access.CLUSTER),
        *(GuardedRoute(path, handler, methods=["GET"], access=access) for path, (access, handler) in asked.items()),
    ]


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
