"""The router's HTTP application: routes, and what wraps them all."""

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from onward.batches.batch_routes import batch_routes
from onward.batches.batch_service import BatchService
from onward.obs.metrics import Registry
from onward.obs.tracer import Tracer
from onward.proto.router import REGISTER_PATH
from onward.router.conversion_threads import ConversionThreads
from onward.router.endpoints import embeddings, tokenizer_info
from onward.router.endpoints.abort import RouterAbortEndpoint
from onward.router.endpoints.admin import RouterAdminEndpoints
from onward.router.endpoints.embeddings import RouterEmbeddingsEndpoint
from onward.router.endpoints.forward import INTERNAL_PATH_BY_CLIENT_PATH as PASSED_ON
from onward.router.endpoints.forward import RouterForwardEndpoint
from onward.router.endpoints.generation import RouterGenerationEndpoint
from onward.router.endpoints.input_tokens import RouterInputTokensEndpoint
from onward.router.endpoints.live import InstanceOperator
from onward.router.endpoints.messages import RouterMessagesEndpoint
from onward.router.endpoints.responses import RouterResponsesEndpoint
from onward.router.endpoints.tokenizer_info import RouterTokenizerInfoEndpoint
from onward.router.model_cards import MODELS_PATH
from onward.router.response_store import ClusterResponseStore
from onward.router.routing_tokenizer import RoutingTokenizer
from onward.router.stream_runner import StreamRunner
from onward.web import docs_page, root_page
from onward.web.access_log import AccessLog
from onward.web.anthropic_api import message_paths
from onward.web.anthropic_api.error_format import with_message_errors
from onward.web.auth.allowed_hosts import AllowedHosts
from onward.web.auth.authenticator import (
    ActiveKeys,
    Authenticator,
    ConnectionLimitMiddleware,
    GuardedRoute,
    RouteAccess,
)
from onward.web.auth.cross_site import CrossSiteGuard, check_content_type, with_cors
from onward.web.ollama_api.ollama_endpoints import OllamaServices, ollama_routes
from onward.web.ollama_api.ollama_errors import with_ollama_errors
from onward.web.openai_api import response_ids
from onward.web.openai_api.compact_endpoint import CompactEndpoint
from onward.web.openai_api.response_endpoint import StoredResponseEndpoint
from onward.web.pacing_middleware import PacingMiddleware
from onward.web.request_id_middleware import RequestIdMiddleware, chain_wrappers, first_refusal, respond_refusal
from onward.web.starlette_app import make_starlette_app
from onward.web.ui.live_feed import LiveFeed
from onward.web.ui.ui_routes import UiServerInfo, session_route, static_routes

GENERATION_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/generate",
    response_ids.PATH,
    message_paths.PATH,
)
GENERATION_METHODS = ("GET", "POST")
STATUS_PATH = "/internal/status"

Handler = Callable[[Request], Awaitable[Response]]


def build_app(
    runner: StreamRunner,
    registry: Registry,
    cluster_key: str,
    keyring: ActiveKeys,
    live_feed: LiveFeed,
    tracer: Tracer | None,
    batches: BatchService | None = None,
) -> ASGIApp:
    # Only `prefix` looks at the tokens of a prompt; without it no tokenizer is fetched, and nothing costs.
    routing_tokenizer = RoutingTokenizer(runner, registry) if runner.core.instances.index is not None else None
    generation_endpoint = RouterGenerationEndpoint(runner, routing_tokenizer)
    response_store = ClusterResponseStore(runner)
    generation_endpoints = dict.fromkeys(GENERATION_PATHS, generation_endpoint) | {
        response_ids.PATH: RouterResponsesEndpoint(runner, routing_tokenizer, response_store),
        message_paths.PATH: RouterMessagesEndpoint(runner, routing_tokenizer),
    }
    routes = build_routes(
        runner,
        RouterAdminEndpoints(runner, registry, cluster_key),
        generation_endpoints,
        routing_tokenizer,
        response_store,
        live_feed,
        batches,
    )
    config = runner.core.config
    origins = config.cors_origin
    guard = CrossSiteGuard(AllowedHosts.for_server(config.host, config.allowed_host), origins)
    callers = Authenticator(
        keyring, routes, cluster_key, runner.clock, answers_preflights=bool(origins), cross_site_guard=guard
    )
    app = _StreamingBypass(generation_endpoints, make_starlette_app(routes))
    paths = [route.path for route in routes]
    assert len(set(paths)) == len(paths), "each path has one route"
    access_log = AccessLog(runner.clock, tracer)
    if batches is not None:
        batches.set_app(RequestIdMiddleware(app, runner.core.metrics.requests, paths, access_log=access_log))
    inner_app = with_cors(ConnectionLimitMiddleware(PacingMiddleware(app, runner.clock, registry)), origins)
    refusal = first_refusal(callers.check, check_content_type, message_paths.check_version)
    return RequestIdMiddleware(
        inner_app,
        runner.core.metrics.requests,
        paths,
        refusal,
        with_cors(respond_refusal, origins),
        access_log,
        chain_wrappers(with_message_errors, with_ollama_errors),
    )


def build_routes(
    runner: StreamRunner,
    admin: RouterAdminEndpoints,
    generation_endpoints: Mapping[str, RouterGenerationEndpoint],
    routing_tokenizer: RoutingTokenizer | None,
    response_store: ClusterResponseStore,
    live_feed: LiveFeed,
    batches: BatchService | None = None,
) -> list[GuardedRoute]:
    """Returns all routes, each with the access that it requires."""
    config = runner.core.config
    get_routes: dict[str, tuple[RouteAccess, Handler]] = {
        MODELS_PATH: (RouteAccess.USER, admin.models),
        tokenizer_info.PATH: (RouteAccess.USER, RouterTokenizerInfoEndpoint(runner, config.max_body_bytes).show),
        MODELS_PATH + "/{model:path}": (RouteAccess.USER, admin.model),
        "/openapi.json": (RouteAccess.USER, admin.openapi),
        docs_page.PATH: (RouteAccess.OPEN, docs_page.show),
        root_page.PATH: (RouteAccess.OPEN, root_page.show),
        "/health": (RouteAccess.OPEN, admin.health),
        "/live": (RouteAccess.OPEN, admin.live),
        "/version": (RouteAccess.USER, admin.version),
        "/metrics": (RouteAccess.OPEN if config.open_metrics else RouteAccess.ADMIN, admin.metrics),
        "/info": (RouteAccess.ADMIN, admin.info),
        STATUS_PATH: (RouteAccess.ADMIN, admin.status),
    }
    abort_endpoint = RouterAbortEndpoint(runner, response_store, config.max_body_bytes)
    forward_endpoint = RouterForwardEndpoint(runner, config.max_body_bytes)
    forward_endpoints = {
        response_ids.INPUT_TOKENS_PATH: RouterInputTokensEndpoint(runner, config.max_body_bytes, response_store)
    }
    embedding_endpoints = {
        path: RouterEmbeddingsEndpoint(runner, path, config.max_body_bytes) for path in embeddings.PATHS
    }
    inner_endpoints = {**generation_endpoints, **embedding_endpoints}
    conversion_threads = ConversionThreads(runner.clock)
    response_endpoint = StoredResponseEndpoint(response_store)
    compact_endpoint = CompactEndpoint(generation_endpoints[response_ids.PATH], response_store, config.max_body_bytes)
    register = _with_tokenizer_refresh(admin.register, runner, routing_tokenizer)
    return [
        *(
            GuardedRoute(path, endpoint, methods=GENERATION_METHODS, access=RouteAccess.USER)
            for path, endpoint in generation_endpoints.items()
        ),
        GuardedRoute(response_ids.COMPACT_PATH, compact_endpoint, methods=["POST"], access=RouteAccess.USER),
        GuardedRoute(response_ids.ITEM_PATH, response_endpoint, methods=["GET", "DELETE"], access=RouteAccess.USER),
        GuardedRoute(response_ids.CANCEL_PATH, response_endpoint, methods=["POST"], access=RouteAccess.USER),
        GuardedRoute(response_ids.INPUT_PATH, response_endpoint, methods=["GET"], access=RouteAccess.USER),
        *(
            GuardedRoute(path, endpoint, methods=["POST"], access=RouteAccess.USER)
            for path, endpoint in embedding_endpoints.items()
        ),
        *batch_routes(batches, runner.random),
        *ollama_routes(
            OllamaServices(admin, runner.clock, config.max_body_bytes, inner_endpoints, conversion_threads.run)
        ),
        GuardedRoute("/v1/abort", abort_endpoint.__call__, methods=["POST"], access=RouteAccess.USER),
        *(
            GuardedRoute(
                path, forward_endpoints.get(path, forward_endpoint).__call__, methods=["POST"], access=RouteAccess.USER
            )
            for path in PASSED_ON
        ),
        GuardedRoute(REGISTER_PATH, register, methods=["POST"], access=RouteAccess.CLUSTER),
        *(
            GuardedRoute(path, handler, methods=["GET"], access=access)
            for path, (access, handler) in get_routes.items()
        ),
        *static_routes(),
        session_route(lambda: UiServerInfo("router", True, config.demo, config.trace_url or "")),
        *live_feed.routes(),
        *InstanceOperator(runner).routes(),
    ]


def _with_tokenizer_refresh(
    register: Handler, runner: StreamRunner, routing_tokenizer: RoutingTokenizer | None
) -> Handler:
    """Returns `register`, extended to fetch the tokenizers of all known models after each registration. So a new
    instance's tokenizer is fetched before a request needs it. Without a routing tokenizer, returns `register`
    unchanged."""
    if routing_tokenizer is None:
        return register
    source = routing_tokenizer.source

    async def register_and_look(request: Request) -> Response:
        answer = await register(request)
        for model in runner.core.instances.known_models():
            source.refresh(model)
        return answer

    return register_and_look


class _StreamingBypass:
    """Passes requests that generate by Starlette, whose layers would each handle every event of a stream."""

    def __init__(self, generation_endpoints: Mapping[str, ASGIApp], others: ASGIApp) -> None:
        self._generation_endpoints = generation_endpoints
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._others
        if scope["type"] == "http" and scope["method"] in GENERATION_METHODS:
            app = self._generation_endpoints.get(scope["path"], app)
        await app(scope, receive, send)
