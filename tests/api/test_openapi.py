import json
import urllib.request
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import pytest

from onward.api.openapi import BODIES, REQUIRED_ONE_OF, SUMMARIES
from onward.api.requests.decoding import decode_chat, decode_tokens
from onward.api.requests.schemas import ChatCompletionRequest, ValidationContext
from onward.api.requests.validation import FIELD_RANGES
from onward.api.responses.chat_request import decode_response
from onward.errors import InvalidRequest
from onward.proto.engine import ErrorInfo
from onward.web.error_format import error_fields
from tests.api.instance import Instance
from tests.api.reader import NO_CERTIFICATES


@pytest.fixture
def document(instance: Instance) -> dict[str, Any]:
    with urllib.request.urlopen(f"{instance.url}/openapi.json", timeout=20) as answer:
        return json.load(answer)


WHOLE = (
    "ChatCompletionResponse",
    "CompletionResponse",
    "GenerateResponse",
    "ResponseObject",
    "MessageObject",
    "OllamaChatResponse",
)
"""Schemas that name every field of their answers."""


def test_every_field_that_is_read_is_told(document: dict[str, Any]) -> None:
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatCompletionRequest"}
    schema = document["components"]["schemas"]["ChatCompletionRequest"]
    assert list(schema["properties"]) == list(ChatCompletionRequest.__struct_fields__)
    assert not schema.get("required"), "the only model need not be named, and token ids may stand instead of messages"


def test_the_model_that_is_served_is_named(document: dict[str, Any], instance: Instance) -> None:
    assert document["components"]["schemas"]["GenerateRequest"]["properties"]["model"]["enum"] == [
        instance.model.name,
        None,
    ]


def test_every_route_but_those_between_instances_is_told(document: dict[str, Any]) -> None:
    paths = set(document["paths"])
    assert {"/v1/completions", "/v1/generate", "/v1/abort", "/v1/models", "/live", "/metrics", "/drain"} <= paths
    assert not [path for path in paths if path.startswith("/internal")]
    for operations in document["paths"].values():
        for operation in operations.values():
            assert set(operation["responses"]) == {"200", "default"}


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    for reference in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert reference in document["components"]["schemas"]


def _beyond(rule: dict[str, Any]) -> list[Any]:
    beyond = {
        "minimum": lambda limit: limit - 1,
        "maximum": lambda limit: limit + 1,
        "exclusiveMinimum": lambda limit: limit,
        "maxLength": lambda limit: "x" * (limit + 1),
    }
    return [beyond[word](limit) for word, limit in rule.items()]


def test_ranges_and_lists_that_must_not_be_empty_are_told(document: dict[str, Any]) -> None:
    properties = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    for field, limits in FIELD_RANGES.items():
        assert field not in properties or limits.items() <= properties[field].items()
    assert properties["messages"]["minItems"] == properties["prompt_token_ids"]["minItems"] == 1


@pytest.mark.parametrize("field", FIELD_RANGES)
def test_ranges_are_told_as_they_are_checked(field: str) -> None:
    bounds = ValidationContext("m", vocab_size=10, max_choices=4)
    is_chat = field in ChatCompletionRequest.__struct_fields__ and field != "logprobs"
    plain = {"messages": [{"role": "user", "content": "a"}]} if is_chat else {"prompt_token_ids": [1]}
    decode: Callable[[bytes, ValidationContext], object] = decode_chat if is_chat else decode_tokens
    if field == "max_output_tokens":
        plain, decode = {"input": "a"}, decode_response
    for value in _beyond(FIELD_RANGES[field]):
        with pytest.raises(InvalidRequest) as refused:
            decode(json.dumps({"model": "m", **plain, field: value}).encode(), bounds)
        assert refused.value.param == field
    for word in ("minimum", "maximum"):
        if word in FIELD_RANGES[field]:
            more = {"logprobs": True} if field == "top_logprobs" else {}
            decode(json.dumps({"model": "m", **plain, **more, field: FIELD_RANGES[field][word]}).encode(), bounds)


def test_every_route_says_what_it_is_for(document: dict[str, Any]) -> None:
    summaries = {path: each.get("summary") for path, one in document["paths"].items() for each in one.values()}
    assert all(summaries.values()) and set(summaries) == set(SUMMARIES)


def test_real_answers_and_errors_are_as_their_schemas_say(document: dict[str, Any], instance: Instance) -> None:
    model = instance.model.name
    chat = {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": chat,
        "/v1/completions": {"model": model, "prompt": "a", "max_tokens": 3},
        "/v1/generate": {"model": model, "prompt_token_ids": [5, 6], "max_tokens": 3, "logprobs": 1},
        "/v1/responses": {"model": model, "input": "a", "max_output_tokens": 3},
        "/v1/responses/input_tokens": {"model": model, "input": "a"},
        "/v1/messages": {key: chat[key] for key in ("model", "messages", "max_tokens")},
        "/v1/messages/count_tokens": {"model": model, "messages": chat["messages"]},
        "/v1/embeddings": {"model": model, "input": "a"},
        "/v1/rerank": {"model": model, "query": "a", "documents": ["b"]},
        "/v1/score": {"model": model, "text_1": "a", "text_2": ["b"]},
        "/pooling": {"input": ["a"]},
        "/v2/rerank": {"query": "a", "documents": ["b"]},
        "/rerank": {"query": "a", "documents": ["b"]},
        "/score": {"text_1": "a", "text_2": ["b"]},
        "/api/chat": {"model": model, "messages": chat["messages"], "stream": False, "options": {"num_predict": 3}},
        "/api/generate": {"model": model, "prompt": "a", "stream": False, "options": {"num_predict": 3}},
        "/api/embed": {"model": model, "input": ["a"]},
        "/api/show": {"model": model},
        "/v1/abort": {"ids": ["nothing"]},
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [1]},
    }

    def check(path: str, method: str, status: str, answer: Any) -> None:
        schema = document["paths"][path][method]["responses"][status]["content"]["application/json"]["schema"]
        jsonschema.validate(answer, {**schema, "components": document["components"]})
        name = schema["$ref"].rpartition("/")[2]
        told = document["components"]["schemas"][name]["properties"]
        assert name not in WHOLE or set(answer) <= set(told), "every field is told"

    with httpx.Client(base_url=instance.url, timeout=60, verify=NO_CERTIFICATES) as client:
        for path, body in asked.items():
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            check(path, "post", "200", answer.json())
            refused = client.post(path, json={"model": 5, "ids": 5, "tokens": "x"})
            assert refused.status_code == 400
            check(path, "post", "default", refused.json())
        for path in ("/v1/models", "/health", "/live", "/version", "/api/tags", "/api/ps", "/api/version"):
            check(path, "get", "200", client.get(path).json())


def test_stored_responses_are_as_their_schemas_say(document: dict[str, Any], instance: Instance) -> None:
    asked = {"model": instance.model.name, "input": "a", "max_output_tokens": 3}
    with httpx.Client(base_url=instance.url, timeout=60, verify=NO_CERTIFICATES) as client:
        path = f"/v1/responses/{client.post('/v1/responses', json=asked).json()['id']}"
        for method, suffix in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
            answer = client.request(method, path + suffix)
            assert answer.status_code == 200, answer.text
            operation = document["paths"]["/v1/responses/{response_id}" + suffix][method.lower()]
            schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
            jsonschema.validate(answer.json(), {**schema, "components": document["components"]})


def test_an_error_s_schema_has_all_that_an_error_may_say(document: dict[str, Any]) -> None:
    info = ErrorInfo("overloaded", "full", 429, True, param="x", retry_after_s=1.5, stage="decode")
    fields = document["components"]["schemas"]["ErrorFields"]
    assert set(fields["properties"]) == set(error_fields(info)) >= {"retryable", "stage", "retry_after_s"}
    assert set(fields["required"]) == set(error_fields(ErrorInfo("overloaded", "full", 429, True)))
    assert all(one.get("description") for one in fields["properties"].values())


@pytest.mark.parametrize("struct", REQUIRED_ONE_OF, ids=lambda struct: struct.__name__)
def test_a_request_without_any_of_the_fields_of_which_it_needs_one_is_refused(
    document: dict[str, Any], instance: Instance, struct: Any
) -> None:
    path = next(path for path, body in BODIES.items() if body is struct)
    assert document["components"]["schemas"][struct.__name__]["anyOf"][0] == {"required": [REQUIRED_ONE_OF[struct][0]]}
    body = {"model": instance.model.name} if "model" in struct.__struct_fields__ else {}
    answer = httpx.post(instance.url + path, json=body, timeout=60, verify=NO_CERTIFICATES)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, REQUIRED_ONE_OF[struct][0])
