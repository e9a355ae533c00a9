"""The HTTP application: its routes and the middleware around them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.middleware import Middleware
from starlette.types import ASGIApp

from onward.api import openapi
from onward.api.endpoints import embedding_kinds
from onward.api.endpoints.abort import AbortEndpoints
from onward.api.endpoints.admin import AdminEndpoints
from onward.api.endpoints.attempts import AttemptEndpoint, FindStreamEndpoint, TokenizerEndpoint, WrongRoleEndpoint
from onward.api.endpoints.chat import ChatAdapter
from onward.api.endpoints.close_attempt import CloseAttemptEndpoint
from onward.api.endpoints.cluster_auth import ClusterAuth
from onward.api.endpoints.completions import CompletionsAdapter
from onward.api.endpoints.demo import KillEndpoints
from onward.api.endpoints.embeddings import EmbeddingsEndpoint, EmbeddingService
from onward.api.endpoints.generate import GenerateAdapter
from onward.api.endpoints.question_runner import QuestionRunner
from onward.api.endpoints.tokenize import TokenizeEndpoints
from onward.api.endpoints.tokenizer_info import TokenizerInfoEndpoint
from onward.api.instance_description import InstanceDescription, ProbeEndpoint
from onward.api.lifecycle.endpoint_adapter import EndpointAdapter
from onward.api.lifecycle.generation_runner import GenerationEndpoint, GenerationRunner
from onward.api.lifecycle.request_builder import ApiServices, RequestBuilder, validation_context
from onward.api.lifecycle.stream_registry import StreamRegistry
from onward.api.messages.count_tokens import CountTokensEndpoint
from onward.api.messages.message_formatters import make_client_formatter, make_message_formatter
from onward.api.messages.messages_adapter import MessagesAdapter
from onward.api.requests.request_context import RequestContextMiddleware
from onward.api.responses.create_endpoint import CreateResponseEndpoint
from onward.api.responses.input_tokens import CountInputTokensEndpoint
from onward.api.responses.response_formatters import make_response_formatter
from onward.api.responses.response_store import BackgroundResponses, InstanceResponseStore
from onward.api.responses.responses_adapter import ResponsesAdapter
from onward.api.responses.router_endpoint import RoutedResponseEndpoint
from onward.api.supervisor_client import SupervisorClient
from onward.batches.batch_routes import batch_routes
from onward.batches.batch_service import BatchService
from onward.obs.metrics import Registry
from onward.proto.router import (
    ABORT_PATH,
    ATTEMPT_PATH,
    CLOSE_PATH,
    COUNT_TOKENS_PATH,
    DETOKENIZE_PATH,
    EMBED_PATH,
    FIND_PATH,
    INPUT_TOKENS_PATH,
    PROBE_PATH,
    RESPONSE_PATH,
    TOKENIZE_PATH,
    TOKENIZER_FILES_PATH,
    TOKENIZER_INFO_PATH,
)
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


def build_app(
    services: ApiServices,
    admin: AdminEndpoints,
    streams: StreamRegistry,
    instance_description: InstanceDescription,
    registry: Registry,
    active_keys: ActiveKeys,
    live_feed: LiveFeed,
    supervisor: SupervisorClient,
    batches: BatchService | None = None,
) -> RequestIdMiddleware:
    config = services.config
    routes = build_routes(services, admin, streams, instance_description, live_feed, supervisor, batches)
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
    request_counter = registry.counter(
        "onward_http_requests_total", "HTTP responses that have begun", ["path", "status"]
    )
    paths = [route.path for route in routes]
    request_context = Middleware(RequestContextMiddleware, clock=services.clock, random=services.random)
    # Inside `request_context`: the time that a request waits counts against its deadline.
    pacing = Middleware(PacingMiddleware, clock=services.clock, registry=registry)
    app = make_starlette_app(routes, [Middleware(ConnectionLimitMiddleware), request_context, pacing])
    access_log = AccessLog(services.clock, services.tracer)
    if batches is not None:
        # Without the limits on connections and on the rate of refusals: a batch has no connection, and waits by itself.
        batch_app = make_starlette_app(routes, [request_context])
        batches.set_app(RequestIdMiddleware(batch_app, request_counter, paths, access_log=access_log))
    # Refusals get CORS headers too: without them a web page cannot read why its request was refused.
    checks = (authenticator.check, check_content_type, message_paths.check_version)
    return RequestIdMiddleware(
        with_cors(app, origins),
        request_counter,
        paths,
        first_refusal(*checks),
        with_cors(respond_refusal, origins),
        access_log,
        chain_wrappers(with_message_errors, with_ollama_errors),
    )


def build_routes(
    services: ApiServices,
    admin: AdminEndpoints,
    streams: StreamRegistry,
    instance_description: InstanceDescription,
    live_feed: LiveFeed,
    supervisor: SupervisorClient,
    batches: BatchService | None = None,
) -> list[GuardedRoute]:
    """Returns all routes, each with the access that it requires."""
    config = services.config
    cluster_auth = ClusterAuth(config.cluster_key, services.clock)
    generation_routes = [*_generation_routes(services, streams, cluster_auth)]
    endpoints = {route.path: route.endpoint for route in generation_routes}
    routes = [
        *generation_routes,
        *ollama_routes(
            OllamaServices(
                admin, services.clock, config.max_body_bytes, endpoints, services.executors.run_preprocessing
            )
        ),
        *_tool_routes(services, streams, instance_description, cluster_auth),
        *batch_routes(batches, services.random),
        *admin.routes(cluster_auth),
        GuardedRoute(docs_page.PATH, docs_page.show, methods=["GET"], access=RouteAccess.OPEN),
        GuardedRoute(root_page.PATH, root_page.show, methods=["GET"], access=RouteAccess.OPEN),
    ]
    routes.append(openapi.route(routes, validation_context(services)))
    session = session_route(
        lambda: UiServerInfo(config.role, config.role != "prefill", config.demo, config.trace_url or "")
    )
    demo = KillEndpoints(config, supervisor, cluster_auth)
    # A new list, since `/openapi.json` does not describe the routes of our own pages.
    return [*routes, *static_routes(), session, *live_feed.routes(), *demo.routes()]


def _generation_routes(
    services: ApiServices, streams: StreamRegistry, cluster_auth: ClusterAuth
) -> Iterator[GuardedRoute]:
    """Yields the routes that generate or embed, for clients and for routers. A prefill instance refuses these requests."""
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
    runners[message_paths.PATH] = GenerationRunner(
        RequestBuilder(MessagesAdapter(text_processor), message_paths.PATH, services),
        services,
        streams,
        make_message_formatter,
        make_client_formatter,
    )
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
        **{path: (EmbeddingsEndpoint(embedding_service, path), ["POST"]) for path in embedding_kinds.KINDS},
    }
    serves_clients = config.role != "prefill"
    for path, (endpoint, methods) in client_routes.items():
        served = endpoint if serves_clients else WrongRoleEndpoint()
        yield GuardedRoute(path, served, methods=methods, access=RouteAccess.USER)
    input_tokens = CountInputTokensEndpoint(services, QuestionRunner(services, cluster_auth), response_store)
    count = input_tokens.count if serves_clients else WrongRoleEndpoint()
    yield GuardedRoute(response_ids.INPUT_TOKENS_PATH, count, methods=["POST"], access=RouteAccess.USER)
    compact = CompactEndpoint(endpoints[response_ids.PATH], response_store, config.max_body_bytes)
    served = compact if serves_clients else WrongRoleEndpoint()
    yield GuardedRoute(response_ids.COMPACT_PATH, served, methods=["POST"], access=RouteAccess.USER)
    routed_response = RoutedResponseEndpoint(response_store, cluster_auth, config.max_body_bytes)
    yield from _posts(
        RouteAccess.CLUSTER,
        {
            ATTEMPT_PATH: AttemptEndpoint(runners if serves_clients else {}, services, streams, cluster_auth),
            CLOSE_PATH: close_endpoint.close,
            RESPONSE_PATH: routed_response.query_response,
            INPUT_TOKENS_PATH: input_tokens.count_for_router,
            EMBED_PATH: EmbeddingsEndpoint(embedding_service, EMBED_PATH, cluster_auth),
        },
    )


def _tool_routes(
    services: ApiServices, streams: StreamRegistry, description: InstanceDescription, cluster_auth: ClusterAuth
) -> Iterator[GuardedRoute]:
    """Yields the routes that do not generate: aborts, tokenization, and queries of routers about the instance."""
    abort = AbortEndpoints(services.engine_client, streams, services.config.max_body_bytes, cluster_auth)
    questions = QuestionRunner(services, cluster_auth)
    tokens, counts = TokenizeEndpoints(services, questions), CountTokensEndpoint(services, questions)
    yield from _posts(
        RouteAccess.USER,
        {
            "/v1/abort": abort.abort,
            "/tokenize": tokens.tokenize,
            "/detokenize": tokens.detokenize,
            message_paths.COUNT_TOKENS_PATH: counts.count,
        },
    )
    info = TokenizerInfoEndpoint(services, questions)
    yield GuardedRoute("/tokenizer_info", info.show, methods=["GET"], access=RouteAccess.USER)
    yield from _posts(
        RouteAccess.CLUSTER,
        {
            TOKENIZER_INFO_PATH: info.show_for_router,
            FIND_PATH: FindStreamEndpoint(streams, cluster_auth).find,
            PROBE_PATH: ProbeEndpoint(description, cluster_auth).probe,
            TOKENIZER_FILES_PATH: TokenizerEndpoint(services, cluster_auth).get_tokenizer_files,
            ABORT_PATH: abort.abort_for_router,
            TOKENIZE_PATH: tokens.tokenize_for_router,
            DETOKENIZE_PATH: tokens.detokenize_for_router,
            COUNT_TOKENS_PATH: counts.count_for_router,
        },
    )


def _posts(access: RouteAccess, endpoints: Mapping[str, Callable[..., Any]]) -> Iterator[GuardedRoute]:
    return (GuardedRoute(path, endpoint, methods=["POST"], access=access) for path, endpoint in endpoints.items())
