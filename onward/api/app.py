"""The HTTP application: routes, and what wraps them all."""

from urllib.parse import urlsplit

from starlette.middleware import Middleware
from starlette.types import ASGIApp

from onward.api import openapi
from onward.api.abort import Aborting
from onward.api.admin import Admin
from onward.api.attempts import AttemptEndpoint, Finding
from onward.api.chat import Chat
from onward.api.closing import Closing
from onward.api.completions import Completions
from onward.api.dialect import Dialect
from onward.api.embeddings import Embeddings, OfClients, OfRouters
from onward.api.generate import Generate
from onward.api.generation import GenerationEndpoint, Generator
from onward.api.identity import Identified
from onward.api.jobs import Backend, Jobs, bounds_of
from onward.api.proven import Proven
from onward.api.registering import Description, Probing
from onward.api.responses.background import Background
from onward.api.responses.dialect import ResponseJobs, Responses
from onward.api.responses.endpoint import CreateEndpoint
from onward.api.responses.for_routers import ForRouters
from onward.api.responses.form import form_of as response_form_of
from onward.api.responses.stored import StoredResponses
from onward.api.streams import Streams
from onward.api.telling_text import TellingText
from onward.api.tokenizing import Tokenizing
from onward.api.wrong_role import WrongRole
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
    TEXT_PATH,
    TOKENIZE_PATH,
)
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


def build_app(
    backend: Backend, admin: Admin, streams: Streams, description: Description, registry: Registry, keyring: Keyring
) -> Envelope:
    prompts, config = backend.prompts, backend.config
    dialects: dict[str, Dialect] = {
        "/v1/chat/completions": Chat(prompts, config.internal_adapter),
        "/v1/completions": Completions(prompts, config.internal_adapter),
        "/v1/generate": Generate(prompts, config.internal_adapter),
    }
    generates = config.role != "prefill"
    proven = Proven(config.cluster_key, backend.clock)
    generators = {path: Generator(Jobs(one, path, backend), backend, streams) for path, one in dialects.items()}
    endpoints: dict[str, ASGIApp] = {
        path: GenerationEndpoint(one, backend, streams) for path, one in generators.items()
    }
    closing = Closing(dict(generators), backend, proven)
    responding = generators[response_ids.PATH] = Generator(
        ResponseJobs(Responses(prompts), response_ids.PATH, backend), backend, streams, response_form_of
    )
    background = Background(responding, streams, backend.tasks)
    stored = StoredResponses(responding, backend, streams, background)
    endpoints[response_ids.PATH] = CreateEndpoint(responding, backend, streams, stored, background)
    of_response = ResponseEndpoint(stored) if generates else WrongRole()
    attempts = AttemptEndpoint(generators if generates else {}, backend, streams, proven)
    aborting = Aborting(backend.client, streams, config.max_body_bytes, proven)
    tokenizing = Tokenizing(backend, proven)
    embeddings = Embeddings(backend, streams)
    embed = OfClients(embeddings, config.max_body_bytes)
    between = {
        ATTEMPT_PATH: attempts,
        CLOSE_PATH: closing.close,
        FIND_PATH: Finding(streams, proven).find,
        PROBE_PATH: Probing(description, proven).probe,
        TEXT_PATH: TellingText(backend, proven).tell,
        ABORT_PATH: aborting.abort_for_router,
        TOKENIZE_PATH: tokenizing.tokenize_for_router,
        DETOKENIZE_PATH: tokenizing.detokenize_for_router,
        RESPONSE_PATH: ForRouters(stored, proven, config.max_body_bytes).answer,
        EMBED_PATH: OfRouters(embeddings, config.max_body_bytes, proven, backend.clock),
    }
    routes = [
        *(
            GuardedRoute(path, one if generates else WrongRole(), methods=["GET", "POST"], access=Access.USER)
            for path, one in endpoints.items()
        ),
        GuardedRoute(response_ids.ITEM_PATH, of_response, methods=["GET", "DELETE"], access=Access.USER),
        GuardedRoute(response_ids.CANCEL_PATH, of_response, methods=["POST"], access=Access.USER),
        GuardedRoute(response_ids.INPUT_PATH, of_response, methods=["GET"], access=Access.USER),
        GuardedRoute("/v1/embeddings", embed if generates else WrongRole(), methods=["POST"], access=Access.USER),
        GuardedRoute("/v1/abort", aborting.abort, methods=["POST"], access=Access.USER),
        GuardedRoute("/tokenize", tokenizing.tokenize, methods=["POST"], access=Access.USER),
        GuardedRoute("/detokenize", tokenizing.detokenize, methods=["POST"], access=Access.USER),
        *(GuardedRoute(path, one, methods=["POST"], access=Access.CLUSTER) for path, one in between.items()),
        *admin.routes(proven),
        GuardedRoute(docs_page.PATH, docs_page.show, methods=["GET"], access=Access.OPEN),
        GuardedRoute(root_page.PATH, root_page.show, methods=["GET"], access=Access.OPEN),
    ]
    routes.append(openapi.route(routes, bounds_of(backend)))
    origins = config.cors_origin
    own_host = urlsplit(config.url).hostname or ""
    guard = CrossSiteGuard(AllowedHosts.of(config.host, (*config.allowed_host, own_host)), origins)
    callers = Callers(keyring, routes, config.cluster_key, backend.clock, answers_preflights=bool(origins), guard=guard)
    requests = registry.counter("onward_http_requests_total", "HTTP responses begun", ["path", "status"])
    paths = [route.path for route in routes]
    identified = Middleware(Identified, clock=backend.clock, chance=backend.chance)
    # Inside `identified`: the time that a request waits counts against its deadline.
    paced = Middleware(PacedCallers, clock=backend.clock, registry=registry)
    app = application(routes, [Middleware(BoundedConnections), identified, paced])
    # A browser is shown refusals too, or its page learns nothing but that something has failed.
    checks = (callers.refusal, media_type_refusal)
    return Envelope(for_browsers(app, origins), requests, paths, first_of(*checks), for_browsers(refuse, origins))
