"""The HTTP application: routes, and what wraps them all."""

from urllib.parse import urlsplit

from starlette.middleware import Middleware
from starlette.types import ASGIApp

from onward.api import openapi
from onward.api.endpoints.abort import AbortEndpoints
from onward.api.endpoints.admin import AdminEndpoints
from onward.api.endpoints.attempts import AttemptEndpoint, FindStreamEndpoint
from onward.api.endpoints.chat import ChatAdapter
from onward.api.endpoints.close_attempt import CloseAttemptEndpoint
from onward.api.endpoints.cluster_auth import ClusterAuth
from onward.api.endpoints.completions import CompletionsAdapter
from onward.api.endpoints.embeddings import EmbeddingsEndpoint, EmbeddingService, RoutedEmbeddingsEndpoint
from onward.api.endpoints.generate import GenerateAdapter
from onward.api.endpoints.tokenize import TokenizeEndpoints
from onward.api.endpoints.tokenizer_files import TokenizerEndpoint
from onward.api.endpoints.wrong_role import WrongRoleEndpoint
from onward.api.lifecycle.endpoint_adapter import EndpointAdapter
from onward.api.lifecycle.generation_runner import GenerationEndpoint, GenerationRunner
from onward.api.lifecycle.request_builder import ApiServices, RequestBuilder, validation_context
from onward.api.lifecycle.stream_registry import StreamRegistry
from onward.api.requests.request_context import RequestContextMiddleware
from onward.api.responses.background import BackgroundResponses
from onward.api.responses.create_endpoint import CreateResponseEndpoint
from onward.api.responses.response_formatters import make_response_formatter as response_form_of
from onward.api.responses.response_store import InstanceResponseStore
from onward.api.responses.responses_adapter import ResponseRequestBuilder, ResponsesAdapter
from onward.api.responses.router_endpoint import RoutedResponseEndpoint
from onward.api.router_registration import InstanceDescription, ProbeEndpoint
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
from onward.web.auth.allowed_hosts import AllowedHosts
from onward.web.auth.authenticator import (
    ActiveKeys,
    Authenticator,
    ConnectionLimitMiddleware,
    GuardedRoute,
    RouteAccess,
)
from onward.web.auth.content_type import check_content_type
from onward.web.auth.cors import with_cors
from onward.web.auth.cross_site import CrossSiteGuard
from onward.web.openai_api import response_ids
from onward.web.openai_api.response_endpoint import StoredResponseEndpoint
from onward.web.request_id_middleware import RequestIdMiddleware, first_refusal, respond_refusal
from onward.web.starlette_app import make_starlette_app
from onward.web.throttle_middleware import ThrottleMiddleware


def build_app(
    backend: ApiServices,
    admin: AdminEndpoints,
    streams: StreamRegistry,
    description: InstanceDescription,
    registry: Registry,
    keyring: ActiveKeys,
) -> RequestIdMiddleware:
    prompts, config = backend.text_processor, backend.config
    dialects: dict[str, EndpointAdapter] = {
        "/v1/chat/completions": ChatAdapter(prompts, config.internal_adapter),
        "/v1/completions": CompletionsAdapter(prompts, config.internal_adapter),
        "/v1/generate": GenerateAdapter(prompts, config.internal_adapter),
    }
    generates = config.role != "prefill"
    proven = ClusterAuth(config.cluster_key, backend.clock)
    generators = {
        path: GenerationRunner(RequestBuilder(one, path, backend), backend, streams) for path, one in dialects.items()
    }
    endpoints: dict[str, ASGIApp] = {
        path: GenerationEndpoint(one, backend, streams) for path, one in generators.items()
    }
    closing = CloseAttemptEndpoint(dict(generators), backend, proven)
    responding = generators[response_ids.PATH] = GenerationRunner(
        ResponseRequestBuilder(ResponsesAdapter(prompts), response_ids.PATH, backend),
        backend,
        streams,
        response_form_of,
    )
    background = BackgroundResponses(responding, streams, backend.tasks)
    stored = InstanceResponseStore(responding, backend, streams, background)
    endpoints[response_ids.PATH] = CreateResponseEndpoint(responding, backend, streams, stored, background)
    of_response = StoredResponseEndpoint(stored) if generates else WrongRoleEndpoint()
    attempts = AttemptEndpoint(generators if generates else {}, backend, streams, proven)
    aborting = AbortEndpoints(backend.engine_client, streams, config.max_body_bytes, proven)
    tokenizing = TokenizeEndpoints(backend, proven)
    embeddings = EmbeddingService(backend, streams)
    embed = EmbeddingsEndpoint(embeddings, config.max_body_bytes)
    between = {
        ATTEMPT_PATH: attempts,
        CLOSE_PATH: closing.close,
        FIND_PATH: FindStreamEndpoint(streams, proven).find,
        PROBE_PATH: ProbeEndpoint(description, proven).probe,
        TOKENIZER_FILES_PATH: TokenizerEndpoint(backend, proven).get_tokenizer_files,
        ABORT_PATH: aborting.abort_for_router,
        TOKENIZE_PATH: tokenizing.tokenize_for_router,
        DETOKENIZE_PATH: tokenizing.detokenize_for_router,
        RESPONSE_PATH: RoutedResponseEndpoint(stored, proven, config.max_body_bytes).query_response,
        EMBED_PATH: RoutedEmbeddingsEndpoint(embeddings, config.max_body_bytes, proven, backend.clock),
    }
    routes = [
        *(
            GuardedRoute(
                path, one if generates else WrongRoleEndpoint(), methods=["GET", "POST"], access=RouteAccess.USER
            )
            for path, one in endpoints.items()
        ),
        GuardedRoute(response_ids.ITEM_PATH, of_response, methods=["GET", "DELETE"], access=RouteAccess.USER),
        GuardedRoute(response_ids.CANCEL_PATH, of_response, methods=["POST"], access=RouteAccess.USER),
        GuardedRoute(response_ids.INPUT_PATH, of_response, methods=["GET"], access=RouteAccess.USER),
        GuardedRoute(
            "/v1/embeddings", embed if generates else WrongRoleEndpoint(), methods=["POST"], access=RouteAccess.USER
        ),
        GuardedRoute("/v1/abort", aborting.abort, methods=["POST"], access=RouteAccess.USER),
        GuardedRoute("/tokenize", tokenizing.tokenize, methods=["POST"], access=RouteAccess.USER),
        GuardedRoute("/detokenize", tokenizing.detokenize, methods=["POST"], access=RouteAccess.USER),
        *(GuardedRoute(path, one, methods=["POST"], access=RouteAccess.CLUSTER) for path, one in between.items()),
        *admin.routes(proven),
        GuardedRoute(docs_page.PATH, docs_page.show, methods=["GET"], access=RouteAccess.OPEN),
        GuardedRoute(root_page.PATH, root_page.show, methods=["GET"], access=RouteAccess.OPEN),
    ]
    routes.append(openapi.route(routes, validation_context(backend)))
    origins = config.cors_origin
    own_host = urlsplit(config.url).hostname or ""
    guard = CrossSiteGuard(AllowedHosts.for_server(config.host, (*config.allowed_host, own_host)), origins)
    callers = Authenticator(
        keyring, routes, config.cluster_key, backend.clock, answers_preflights=bool(origins), guard=guard
    )
    requests = registry.counter("onward_http_requests_total", "HTTP responses begun", ["path", "status"])
    paths = [route.path for route in routes]
    identified = Middleware(RequestContextMiddleware, clock=backend.clock, chance=backend.random)
    # Inside `identified`: the time that a request waits counts against its deadline.
    paced = Middleware(ThrottleMiddleware, clock=backend.clock, registry=registry)
    app = make_starlette_app(routes, [Middleware(ConnectionLimitMiddleware), identified, paced])
    # A browser is shown refusals too, or its page learns nothing but that something has failed.
    checks = (callers.check, check_content_type)
    return RequestIdMiddleware(
        with_cors(app, origins), requests, paths, first_refusal(*checks), with_cors(respond_refusal, origins)
    )
