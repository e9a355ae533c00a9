"""`/openapi.json`: what can be asked, written from the structs that decode requests and from the application's routes.

Types come from the structs and ranges from the table that they are checked by, so they cannot differ from what is
checked. Rules about several fields are told by the errors. Routes between instances are left out.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from onward.api.endpoints.tokenize import DetokenizeRequest, TokenizeRequest
from onward.api.field_descriptions import field_descriptions
from onward.api.requests.embedding_request import EmbeddingRequest
from onward.api.requests.schemas import ChatCompletionRequest, CompletionRequest, GenerateRequest, ValidationContext
from onward.api.requests.validation import FIELD_RANGES
from onward.api.response_schemas import RESPONSES, RESPONSES_BY_METHOD, ErrorResponse
from onward.api.responses.create_request import CreateResponseRequest
from onward.version import __version__
from onward.web.auth.authenticator import GuardedRoute, RouteAccess
from onward.web.error_format import ErrorFields
from onward.web.http_responses import json_response
from onward.web.openai_api.abort_request import AbortRequest
from onward.web.openai_api.previous_response import CONTEXT_FIELD

PATH = "/openapi.json"
_SCHEMAS = "#/components/schemas/{name}"
BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/generate": GenerateRequest,
    "/v1/responses": CreateResponseRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/abort": AbortRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}

SUMMARIES: dict[str, str] = {
    "/v1/chat/completions": "Answers a chat. GET with Last-Event-ID goes on with a stream",
    "/v1/completions": "Continues texts. GET with Last-Event-ID goes on with a stream",
    "/v1/generate": "Token ids in, token ids out. GET with Last-Event-ID goes on with a stream",
    "/v1/responses": "Answers a chat, as items. GET with Last-Event-ID goes on with a stream",
    "/v1/responses/{response_id}": "One that is stored: shown, followed by stream=true, or deleted",
    "/v1/responses/{response_id}/cancel": "Ends one that runs in the background",
    "/v1/responses/{response_id}/input_items": "What one was made from",
    "/v1/embeddings": "A vector of each text",
    "/v1/abort": "Ends requests by their ids or labels",
    "/tokenize": "The token ids of a text or a chat",
    "/detokenize": "The text of token ids",
    "/v1/models": "The model that is served",
    "/v1/models/{model}": "The same by its name",
    "/health": "Whether requests can be served now",
    "/live": "Whether this process answers at all",
    "/version": "The version of the server",
    "/metrics": "Numbers for Prometheus",
    "/info": "The configuration and the processes",
    "/drain": "Takes the instance out of service",
    "/undrain": "Takes the instance back into service",
    "/docs": "This, as a page",
    "/": "What this server is, and where its pages are; a browser is sent to /ui",
    "/openapi.json": "This document",
}

NOT_EMPTY = ("messages", "prompt_token_ids")
"""Lists that have at least one item, where a request has them."""

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
"""Fields of which a request has one; the structs leave that to the checks."""


def route(routes: Sequence[GuardedRoute], context: ValidationContext) -> GuardedRoute:
    @cache  # who never asks does not wait for it
    def cached_document() -> dict[str, Any]:
        return document([*routes], context)

    async def serve(_: Request) -> Response:
        return json_response(cached_document())

    return GuardedRoute(PATH, serve, methods=["GET"], access=RouteAccess.USER)


def document(routes: Sequence[GuardedRoute], context: ValidationContext) -> dict[str, Any]:
    structs = [*BODIES.values(), *{*RESPONSES.values()}, *RESPONSES_BY_METHOD.values(), ErrorResponse]
    _, schemas = msgspec.json.schema_components(structs, ref_template=_SCHEMAS)
    for struct in [*structs, ErrorFields]:
        _add_descriptions(schemas[struct.__name__]["properties"], struct)
    for struct, names in REQUIRED_ONE_OF.items():
        schemas[struct.__name__]["anyOf"] = [{"required": [name]} for name in names]
    for struct in (ChatCompletionRequest, CompletionRequest, GenerateRequest, CreateResponseRequest):
        _add_ranges(schemas[struct.__name__]["properties"], context)
    del schemas[CreateResponseRequest.__name__]["properties"][CONTEXT_FIELD]
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


def _add_ranges(properties: dict[str, dict[str, Any]], context: ValidationContext) -> None:
    for name in properties.keys() & FIELD_RANGES.keys():
        properties[name] |= FIELD_RANGES[name]
    for name in properties.keys() & NOT_EMPTY:
        properties[name]["minItems"] = 1
    for name in properties.keys() & DESCRIPTIONS.keys():
        properties[name]["description"] = DESCRIPTIONS[name]
    properties["model"]["enum"] = [context.model]
    for name in properties.keys() & {"n", "best_of"}:
        properties[name] |= {"minimum": 1, "maximum": context.max_choices}
    if "prompt_token_ids" in properties:
        _bound_numbers(properties["prompt_token_ids"], {"minimum": 0, "maximum": context.vocab_size - 1})


def _bound_numbers(schema: dict[str, Any], limits: dict[str, int]) -> None:
    """Of lists, and of lists of them."""
    if schema.get("type") == "integer":
        schema |= limits
    for inner in [*schema.get("anyOf", []), *([schema["items"]] if "items" in schema else [])]:
        _bound_numbers(inner, limits)


def _path(route: GuardedRoute) -> str:
    return route.path.replace(":path}", "}")


def _operations(route: GuardedRoute) -> dict[str, Any]:
    methods = {"POST"} if route.path in BODIES else (route.methods or set()) - {"HEAD"}
    return {method.lower(): _operation(route, method) for method in sorted(methods)}


def _operation(route: GuardedRoute, method: str) -> dict[str, Any]:
    error_response = {
        "description": "An error",
        "content": _json({"$ref": _SCHEMAS.format(name=ErrorResponse.__name__)}),
    }
    response: dict[str, Any] = {"description": "The answer"}
    if answered := RESPONSES_BY_METHOD.get((method, _path(route))) or RESPONSES.get(_path(route)):
        response["content"] = _json({"$ref": _SCHEMAS.format(name=answered.__name__)})
    operation: dict[str, Any] = {"responses": {"200": response, "default": error_response}}
    if summary := SUMMARIES.get(_path(route)):
        operation["summary"] = summary
    if route.access is not RouteAccess.OPEN:
        operation["security"] = [{"key": []}]
        operation["description"] = f"For a key of the role {route.access.value}, where there are keys."
    if body := BODIES.get(route.path):
        operation["requestBody"] = {"required": True, "content": _json({"$ref": _SCHEMAS.format(name=body.__name__)})}
    if parameters := [_parameter(name) for name in route.param_convertors]:
        operation["parameters"] = parameters
    return operation


def _parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
