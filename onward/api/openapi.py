"""Builds `/openapi.json` from the structs that decode requests and from the application's routes.

Types come from the structs and ranges from the table that validation uses, so they cannot differ from what is checked.
Rules about several fields are not described; the errors state them. Routes between routers and instances are left out.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onward.api.endpoints import embedding_kinds
from onward.api.endpoints.tokenize import DetokenizeRequest, TokenizeRequest
from onward.api.field_descriptions import field_descriptions
from onward.api.messages.create_request import CountTokensRequest, CreateMessageRequest
from onward.api.requests.embedding_request import EmbeddingRequest
from onward.api.requests.schemas import ChatCompletionRequest, CompletionRequest, GenerateRequest, ValidationContext
from onward.api.requests.similarity_request import RerankRequest, ScoreRequest
from onward.api.requests.validation import FIELD_RANGES
from onward.api.response_schemas import RESPONSES, RESPONSES_BY_METHOD, ErrorResponse, OllamaErrorResponse
from onward.api.responses.create_request import CreateResponseRequest
from onward.api.responses.input_tokens import CountInputTokensRequest
from onward.batches import batch_routes
from onward.batches.batch_policy import MAX_EXPIRY_S, MIN_EXPIRY_S
from onward.batches.records import CreateBatchRequest
from onward.version import __version__
from onward.web.anthropic_api import message_paths
from onward.web.auth.authenticator import GuardedRoute, RouteAccess
from onward.web.auth.cross_site import FILES_PATH, FORM_DATA
from onward.web.error_format import ErrorFields
from onward.web.http_responses import json_response
from onward.web.ollama_api import ollama_paths
from onward.web.ollama_api.ollama_requests import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from onward.web.openai_api import response_ids
from onward.web.openai_api.abort_request import AbortRequest
from onward.web.openai_api.compaction import CompactRequest
from onward.web.openai_api.previous_response import CONTEXT_FIELD

PATH = "/openapi.json"
_SCHEMAS = "#/components/schemas/{name}"
BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/generate": GenerateRequest,
    "/v1/responses": CreateResponseRequest,
    response_ids.INPUT_TOKENS_PATH: CountInputTokensRequest,
    response_ids.COMPACT_PATH: CompactRequest,
    message_paths.PATH: CreateMessageRequest,
    message_paths.COUNT_TOKENS_PATH: CountTokensRequest,
    "/v1/embeddings": EmbeddingRequest,
    batch_routes.BATCHES_PATH: CreateBatchRequest,
    embedding_kinds.POOLING_PATH: EmbeddingRequest,
    **dict.fromkeys(embedding_kinds.RERANK_PATHS, RerankRequest),
    **dict.fromkeys(embedding_kinds.SCORE_PATHS, ScoreRequest),
    ollama_paths.CHAT_PATH: OllamaChatRequest,
    ollama_paths.GENERATE_PATH: OllamaGenerateRequest,
    ollama_paths.EMBED_PATH: OllamaEmbedRequest,
    ollama_paths.SHOW_PATH: OllamaShowRequest,
    "/v1/abort": AbortRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}

SUMMARIES: dict[str, str] = {
    "/v1/chat/completions": "Answers a chat. GET with Last-Event-ID resumes a stream",
    "/v1/completions": "Continues texts. GET with Last-Event-ID resumes a stream",
    "/v1/generate": "Continues token ids. GET with Last-Event-ID resumes a stream",
    "/v1/responses": "Creates a response. GET with Last-Event-ID resumes a stream",
    "/v1/responses/{response_id}": "Returns a stored response, streams it (stream=true), or deletes it",
    "/v1/responses/{response_id}/cancel": "Cancels a background response",
    "/v1/responses/{response_id}/input_items": "Lists the input items of a stored response",
    response_ids.INPUT_TOKENS_PATH: "Counts the tokens of a response's prompt",
    response_ids.COMPACT_PATH: "Shortens a conversation to the user's messages and a summary",
    message_paths.PATH: "Creates a message, as Anthropic's API does. GET with Last-Event-ID resumes a stream",
    message_paths.COUNT_TOKENS_PATH: "Counts the tokens of a message's prompt",
    "/v1/embeddings": "Returns a vector for each text",
    "/v1/rerank": "Orders documents by the similarity of their vectors to a query's",
    "/v1/score": "Returns the similarity of the vectors of pairs of texts",
    FILES_PATH: "Uploads a file of requests (multipart/form-data), or lists the caller's files",
    batch_routes.FILE_PATH: "Returns or deletes a file",
    batch_routes.CONTENT_PATH: "Returns the content of a file",
    batch_routes.BATCHES_PATH: "Creates a batch of the requests in a file, or lists the caller's batches",
    batch_routes.BATCH_PATH: "Returns a batch",
    batch_routes.CANCEL_PATH: "Cancels a batch, and keeps the answers so far",
    embedding_kinds.POOLING_PATH: "Returns a vector for each text, in the form of vLLM's /pooling",
    **dict.fromkeys(embedding_kinds.RERANK_PATHS[1:], "The same as /v1/rerank"),
    **dict.fromkeys(embedding_kinds.SCORE_PATHS[1:], "The same as /v1/score"),
    "/tokenizer_info": "Returns the special tokens and the chat template, with --tokenizer-info",
    ollama_paths.CHAT_PATH: "Answers a chat, as Ollama does",
    ollama_paths.GENERATE_PATH: "Answers a prompt, as Ollama does",
    ollama_paths.EMBED_PATH: "Returns a vector for each text, as Ollama does",
    ollama_paths.SHOW_PATH: "Describes a served model, as Ollama does",
    ollama_paths.TAGS_PATH: "Lists the served models, as Ollama does",
    ollama_paths.PS_PATH: "Lists the loaded models, as Ollama does",
    ollama_paths.VERSION_PATH: "Returns the version of Ollama's API",
    "/v1/abort": "Ends requests by their ids or labels",
    "/tokenize": "Returns the token ids of a text or a chat",
    "/detokenize": "Returns the text of token ids",
    "/v1/models": "Lists the served models",
    "/v1/models/{model}": "Returns one model",
    "/health": "Reports whether requests can be served now",
    "/live": "Reports whether this process answers",
    "/version": "Returns the version of the server",
    "/metrics": "Returns the metrics for Prometheus",
    "/info": "Returns the configuration and the processes",
    "/drain": "Takes the instance out of service",
    "/undrain": "Takes the instance back into service",
    "/docs": "Shows this document as a page",
    "/": "Names the server and its pages; redirects a browser to /ui",
    "/openapi.json": "Returns this document",
}

UPLOADS: dict[str, dict[str, Any]] = {
    FILES_PATH: {
        "type": "object",
        "properties": {
            "file": {"type": "string", "format": "binary", "description": "One JSON object on each line."},
            "purpose": {"type": "string", "enum": ["batch"]},
            "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
            "expires_after[seconds]": {"type": "integer", "minimum": MIN_EXPIRY_S, "maximum": MAX_EXPIRY_S},
        },
        "required": ["file", "purpose"],
        "additionalProperties": False,
    }
}
"""Fields of `multipart/form-data` bodies, by path."""

NOT_EMPTY = ("messages", "prompt_token_ids")
"""Lists that must have at least one item if a request has them."""

DESCRIPTIONS = {
    "completion_token_ids": "Another name of generated_token_ids. A request that has both must give both the same value.",
}


REQUIRED_ONE_OF: dict[type[msgspec.Struct], tuple[str, ...]] = {
    ChatCompletionRequest: ("messages", "prompt_token_ids"),
    CompletionRequest: ("prompt", "prompt_token_ids"),
    EmbeddingRequest: ("input",),
    TokenizeRequest: ("prompt", "messages"),
    AbortRequest: ("ids", "all"),
}
"""Fields of which a request must have at least one. The structs do not enforce it; validation does."""


def route(routes: Sequence[GuardedRoute], context: ValidationContext) -> GuardedRoute:
    @cache  # built at the first request, so that the start does not wait for it
    def cached_document() -> dict[str, Any]:
        return document([*routes], context)

    async def serve(_: Request) -> Response:
        return json_response(cached_document())

    return GuardedRoute(PATH, serve, methods=["GET"], access=RouteAccess.USER)


_RANGED = (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateRequest,
    CreateResponseRequest,
    CountInputTokensRequest,
    CompactRequest,
    CreateMessageRequest,
    CountTokensRequest,
)
_OLLAMA = (OllamaChatRequest, OllamaGenerateRequest, OllamaEmbedRequest, OllamaShowRequest)


def document(routes: Sequence[GuardedRoute], context: ValidationContext) -> dict[str, Any]:
    structs = [
        *BODIES.values(),
        *{*RESPONSES.values()},
        *RESPONSES_BY_METHOD.values(),
        ErrorResponse,
        OllamaErrorResponse,
    ]
    _, schemas = msgspec.json.schema_components(structs, ref_template=_SCHEMAS)
    for struct in [*structs, ErrorFields]:
        _add_descriptions(schemas[struct.__name__]["properties"], struct)
    for struct, names in REQUIRED_ONE_OF.items():
        schemas[struct.__name__]["anyOf"] = [{"required": [name]} for name in names]
    for struct in _RANGED:
        _add_ranges(schemas[struct.__name__]["properties"], context)
    # With `echo`, a request may ask for the prompt alone.
    schemas[CompletionRequest.__name__]["properties"]["max_tokens"]["minimum"] = 0
    for struct in _OLLAMA:
        _add_field_ranges(schemas[struct.__name__]["properties"], context)
    for struct in (CreateResponseRequest, CountInputTokensRequest):
        del schemas[struct.__name__]["properties"][CONTEXT_FIELD]
    schemas["ContentPart"]["properties"]["type"]["enum"] = ["text"]
    schemas["ContentPart"]["required"] = ["type", "text"]
    return {
        "openapi": "3.1.0",
        "info": {"title": "onward", "version": __version__},
        "paths": {_path(route): _operations(route) for route in routes if route.access is not RouteAccess.CLUSTER},
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _add_descriptions(properties: dict[str, dict[str, Any]], struct: type[msgspec.Struct]) -> None:
    for name, description in field_descriptions(struct).items():
        properties[name].setdefault("description", description)


def _add_field_ranges(properties: dict[str, dict[str, Any]], context: ValidationContext) -> None:
    for name in properties.keys() & FIELD_RANGES.keys():
        properties[name] |= FIELD_RANGES[name]
    properties["model"]["enum"] = list(context.model_names)


def _add_ranges(properties: dict[str, dict[str, Any]], context: ValidationContext) -> None:
    _add_field_ranges(properties, context)
    for name in properties.keys() & NOT_EMPTY:
        properties[name]["minItems"] = 1
    for name in properties.keys() & DESCRIPTIONS.keys():
        properties[name]["description"] = DESCRIPTIONS[name]
    properties["model"]["enum"] = [*context.model_names, None]
    for name in properties.keys() & {"n", "best_of"}:
        properties[name] |= {"minimum": 1, "maximum": context.max_choices}
    if "prompt_token_ids" in properties:
        _bound_numbers(properties["prompt_token_ids"], {"minimum": 0, "maximum": context.vocab_size - 1})


def _bound_numbers(schema: dict[str, Any], limits: dict[str, int]) -> None:
    """Adds limits to the integers in a schema: in lists, in lists of lists, and in alternatives."""
    if schema.get("type") == "integer":
        schema |= limits
    for inner in [*schema.get("anyOf", []), *([schema["items"]] if "items" in schema else [])]:
        _bound_numbers(inner, limits)


def _path(route: GuardedRoute) -> str:
    return route.path.replace(":path}", "}")


def _operations(route: GuardedRoute) -> dict[str, Any]:
    # GET of a generating endpoint resumes a stream, which is no operation by itself.
    resumes = route.path in BODIES and ("GET", route.path) not in RESPONSES_BY_METHOD
    methods = {"POST"} if resumes else (route.methods or set()) - {"HEAD"}
    return {method.lower(): _operation(route, method) for method in sorted(methods)}


def _operation(route: GuardedRoute, method: str) -> dict[str, Any]:
    error_struct = OllamaErrorResponse if ollama_paths.is_ollama_path(route.path) else ErrorResponse
    error_response = {
        "description": "An error",
        "content": _json({"$ref": _SCHEMAS.format(name=error_struct.__name__)}),
    }
    response: dict[str, Any] = {"description": "The answer"}
    if answered := RESPONSES_BY_METHOD.get((method, _path(route))) or RESPONSES.get(_path(route)):
        response["content"] = _json({"$ref": _SCHEMAS.format(name=answered.__name__)})
    operation: dict[str, Any] = {"responses": {"200": response, "default": error_response}}
    if summary := SUMMARIES.get(_path(route)):
        operation["summary"] = summary
    if route.access is not RouteAccess.OPEN:
        operation["security"] = [{"key": []}]
        operation["description"] = f"Needs a key of the role {route.access.value} if the server has API keys."
    if method == "POST" and (upload := UPLOADS.get(route.path)):
        operation["requestBody"] = {"required": True, "content": {FORM_DATA: {"schema": upload}}}
    elif method == "POST" and (body := BODIES.get(route.path)):
        operation["requestBody"] = {"required": True, "content": _json({"$ref": _SCHEMAS.format(name=body.__name__)})}
    if parameters := [_parameter(name) for name in route.param_convertors]:
        operation["parameters"] = parameters
    return operation


def _parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
