import json
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from onward.api.openapi import SUMMARIES
from onward.api.requests.decoding import decode_chat, decode_tokens
from onward.api.requests.schemas import ChatCompletionRequest, ValidationContext
from onward.api.requests.validation import FIELD_RANGES
from onward.api.responses.chat_request import decode_response
from onward.errors import InvalidRequest
from tests.api.instance import Instance


@pytest.fixture
def document(instance: Instance) -> dict[str, Any]:
    with urllib.request.urlopen(f"{instance.url}/openapi.json", timeout=20) as answer:
        return json.load(answer)


def test_every_field_that_is_read_is_told(document: dict[str, Any]) -> None:
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatCompletionRequest"}
    schema = document["components"]["schemas"]["ChatCompletionRequest"]
    assert list(schema["properties"]) == list(ChatCompletionRequest.__struct_fields__)
    assert schema["required"] == ["model"], "token ids may stand instead of messages"


def test_the_model_that_is_served_is_named(document: dict[str, Any], instance: Instance) -> None:
    assert document["components"]["schemas"]["GenerateRequest"]["properties"]["model"]["enum"] == [instance.model.name]


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
