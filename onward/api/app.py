"""The HTTP application: routes, and what wraps them all."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.middleware import Middleware
from starlette.types import ASGIApp

from onward.api import openapi
from onward.api.endpoints.abort import AbortEndpoints
from onward.api.endpoints.admin import AdminEndpoints
from onward.api.endpoints.attempts import AttemptEndpoint, FindStreamEndpoint, TokenizerEndpoint, WrongRoleEndpoint
from onward.api.endpoints.chat import ChatAdapter
from onward.api.endpoints.close_attempt import CloseAttemptEndpoint
from onward.api.endpoints.cluster_auth import ClusterAuth
from onward.api.endpoints.completions import CompletionsAdapter
from onward.api.endpoints.demo import DemoEndpoints
from onward.api.endpoints.embeddings import EmbeddingsEndpoint, EmbeddingService
from onward.api.endpoints.generate import GenerateAdapter
from onward.api.endpoints.tokenize import TokenizeEndpoints
from onward.api.lifecycle.endpoint_adapter import EndpointAdapter
from onward.api.lifecycle.generation_runner import GenerationEndpoint, GenerationRunner
from onward.api.lifecycle.request_builder import ApiServices, RequestBuilder, validation_context
from onward.api.lifecycle.stream_registry import StreamRegistry
from onward.api.requests.request_context import RequestContextMiddleware
from onward.api.responses.create_endpoint import CreateResponseEndpoint
from onward.api.responses.response_formatters import make_response_formatter
from onward.api.responses.response_store import BackgroundResponses, InstanceResponseStore
from onward.api.responses.responses_adapter import ResponsesAdapter
from onward.api.responses.router_endpoint import RoutedResponseEndpoint
from onward.api.router_registration import InstanceDescription, ProbeEndpoint
from onward.api.supervisor_client import SupervisorClient
from onward.obs.metrics import Registry
from onward.proto.router import (
    ABORT_PATH,
    ATTEMPT_PATH,
    CLOSE_PATH,
    DETOKENIZE_PATH,
    EMBED_PATH,
    FIND_PATH,
    PROBE_PATH,
    RESPONSE_PATH,
    TOKENIZE_PATH,
    TOKENIZER_FILES_PATH,
)
from onward.web import docs_page, root_page
from onward.web.access_log import AccessLog
from onward.web.auth.allowed_hosts import AllowedHosts
from onward.web.auth.authenticator import (
    ActiveKeys,
    Authenticator,
    ConnectionLimitMiddleware,
    GuardedRoute,
    RouteAccess,
)
from onward.web.auth.cross_site import CrossSiteGuard, check_content_type, with_cors
from onward.web.openai_api import response_ids
from onward.web.openai_api.response_endpoint import StoredResponseEndpoint
from onward.web.pacing_middleware import PacingMiddleware
from onward.web.request_id_middleware import RequestIdMiddleware, first_refusal, respond_refusal
from onward.web.starlette_app import make_starlette_app
from onward.web.ui.live_feed import LiveFeed
from onward.web.ui.ui_routes import UiServerInfo, session_route, static_routes


def build_app(
    services: ApiServices,
    admin: AdminEndpoints,
    streams: StreamRegistry,
    instance_description: InstanceDescription,
    registry: Registry,
    active_keys: ActiveKeys,
    live_feed: LiveFeed,
    supervisor: SupervisorClient,
) -> RequestIdMiddleware:
    config = services.config
    cluster_auth = ClusterAuth(config.cluster_key, services.clock)
    demo = DemoEndpoints(config, supervisor, cluster_auth)
    routes = [
        *_generation_routes(services, streams, cluster_auth),
        *_tool_routes(services, streams, instance_description, cluster_auth),
        *admin.routes(cluster_auth),
        GuardedRoute(docs_page.PATH, docs_page.show, methods=["GET"], access=RouteAccess.OPEN),
        GuardedRoute(root_page.PATH, root_page.show, methods=["GET"], access=RouteAccess.OPEN),
    ]
    routes.append(openapi.route(routes, validation_context(services)))
    # A new list: the document of the API leaves out what is for our own pages.
    session = session_route(
        lambda: UiServerInfo(config.role, config.role != "prefill", config.demo, config.trace_url or "")
    )
    routes = [*routes, *static_routes(), session, *live_feed.routes(), *demo.routes()]
    origins = config.cors_origin
    own_host = urlsplit(config.url).hostname or ""
    cross_site_guard = CrossSiteGuard(AllowedHosts.for_server(config.host, (*config.allowed_host, own_host)), origins)
    authenticator = Authenticator(
        active_keys,
        routes,
        config.cluster_key,
        services.clock,
        answers_preflights=bool(origins),
        cross_site_guard=cross_site_guard,
    )
    request_counter = registry.counter("onward_http_requests_total", "HTTP responses begun", ["path", "status"])
    paths = [route.path for route in routes]
    request_context = Middleware(RequestContextMiddleware, clock=services.clock, random=services.random)
    # Inside `request_context`: the time that a request waits counts against its deadline.
    pacing = Middleware(PacingMiddleware, clock=services.clock, registry=registry)
    app = make_starlette_app(routes, [Middleware(ConnectionLimitMiddleware), request_context, pacing])
    # A browser is shown refusals too, or its page learns nothing but that something has failed.
    checks = (authenticator.check, check_content_type)
    return RequestIdMiddleware(
        with_cors(app, origins),
        request_counter,
        paths,
        first_refusal(*checks),
        with_cors(respond_refusal, origins),
        AccessLog(services.clock, services.tracer),
    )


def _generation_routes(
    services: ApiServices, streams: StreamRegistry, cluster_auth: ClusterAuth
) -> Iterator[GuardedRoute]:
    """What generates, for clients and for routers. A prefill instance refuses it."""
    text_processor, config = services.text_processor, services.config
    adapters: dict[str, EndpointAdapter] = {
        "/v1/chat/completions": ChatAdapter(text_processor, config.internal_adapter),
        "/v1/completions": CompletionsAdapter(text_processor, config.internal_adapter),
        "/v1/generate": GenerateAdapter(text_processor, config.internal_adapter),
    }
    runners = {
        path: GenerationRunner(RequestBuilder(adapter, path, services), services, streams)
        for path, adapter in adapters.items()
    }
    endpoints: dict[str, ASGIApp] = {
        path: GenerationEndpoint(runner, services, streams) for path, runner in runners.items()
    }
    close_endpoint = CloseAttemptEndpoint(dict(runners), services, cluster_auth)
    responses_runner = runners[response_ids.PATH] = GenerationRunner(
        RequestBuilder(ResponsesAdapter(text_processor), response_ids.PATH, services),
        services,
        streams,
        make_response_formatter,
    )
    background = BackgroundResponses(responses_runner, streams, services.tasks)
    response_store = InstanceResponseStore(responses_runner, services, streams, background)
    endpoints[response_ids.PATH] = CreateResponseEndpoint(
        responses_runner, services, streams, response_store, background
    )
    embedding_service = EmbeddingService(services, streams)
    stored_response = StoredResponseEndpoint(response_store)
    client_routes: dict[str, tuple[ASGIApp, list[str]]] = {
        **{path: (endpoint, ["GET", "POST"]) for path, endpoint in endpoints.items()},
        response_ids.ITEM_PATH: (stored_response, ["GET", "DELETE"]),
        response_ids.CANCEL_PATH: (stored_response, ["POST"]),
        response_ids.INPUT_PATH: (stored_response, ["GET"]),
        "/v1/embeddings": (EmbeddingsEndpoint(embedding_service), ["POST"]),
    }
    serves_clients = config.role != "prefill"
    for path, (endpoint, methods) in client_routes.items():
        served = endpoint if serves_clients else WrongRoleEndpoint()
        yield GuardedRoute(path, served, methods=methods, access=RouteAccess.USER)
    routed_response = RoutedResponseEndpoint(response_store, cluster_auth, config.max_body_bytes)
    yield from _posts(
        RouteAccess.CLUSTER,
        {
            ATTEMPT_PATH: AttemptEndpoint(runners if serves_clients else {}, services, streams, cluster_auth),
            CLOSE_PATH: close_endpoint.close,
            RESPONSE_PATH: routed_response.query_response,
            EMBED_PATH: EmbeddingsEndpoint(embedding_service, cluster_auth),
        },
    )


def _tool_routes(
    services: ApiServices, streams: StreamRegistry, description: InstanceDescription, cluster_auth: ClusterAuth
) -> Iterator[GuardedRoute]:
    """What does not generate: aborts, tokens, and what routers ask about the instance."""
    abort = AbortEndpoints(services.engine_client, streams, services.config.max_body_bytes, cluster_auth)
    tokens = TokenizeEndpoints(services, cluster_auth)
    yield from _posts(
        RouteAccess.USER, {"/v1/abort": abort.abort, "/tokenize": tokens.tokenize, "/detokenize": tokens.detokenize}
    )
    yield from _posts(
        RouteAccess.CLUSTER,
        {
            FIND_PATH: FindStreamEndpoint(streams, cluster_auth).find,
            PROBE_PATH: ProbeEndpoint(description, cluster_auth).probe,
            TOKENIZER_FILES_PATH: TokenizerEndpoint(services, cluster_auth).get_tokenizer_files,
            ABORT_PATH: abort.abort_for_router,
            TOKENIZE_PATH: tokens.tokenize_for_router,
            DETOKENIZE_PATH: tokens.detokenize_for_router,
        },
    )


def _posts(access: RouteAccess, endpoints: Mapping[str, Callable[..., Any]]) -> Iterator[GuardedRoute]:
    return (GuardedRoute(path, endpoint, methods=["POST"], access=access) for path, endpoint in endpoints.items())
