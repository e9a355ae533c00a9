"""What a response cannot be asked for is refused, and the error names the field."""

from typing import Any

import httpx
import pytest

from tests.api.responses.reading import ask

CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": 7}, "input"),
    ({"input": [7]}, "input[0]"),
    ({"input": [{"role": "user", "content": "x"}, {"type": "web_search_call"}]}, "input[1].type"),
    ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [CALLED | {"arguments": "["}]}, "input[0].arguments"),
    ({"input": [CALLED | {"call_id": None}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "reasoning", "content": [{}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "string"}}]}, "tools[0].parameters.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
    (
        {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "name": "g"}},
        "tool_choice.name",
    ),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "odd"}}}}, "text.format.schema"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"reasoning": {"effort": "all"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"include": ["reasoning.encrypted_content"]}, "include[0]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"truncation": "auto"}, "truncation"),
    ({"metadata": {"k": "v" * 513}}, "metadata.k"),
    ({"metadata": {str(key): "" for key in range(17)}}, "metadata"),
    ({"background": True, "store": False}, "background"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"max_tool_calls": 3}, "max_tool_calls"),
    ({"messages": []}, "messages"),
    ({"n": 2}, "n"),
    ({"onward_context": [{"role": "user", "content": "x"}]}, "onward_context"),
    ({"previous_response_id": 7}, "previous_response_id"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_a_wrong_field_is_named(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    refused = ask(http, "POST", json={"model": "small-model", "input": "hi"} | fields)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


def test_what_asks_for_nothing_is_let_pass(http: httpx.Client) -> None:
    inert = {"conversation": None, "max_tool_calls": None, "prompt_cache_key": "k", "service_tier": "auto", "tools": []}
    body = {"model": "small-model", "input": "hi", "max_output_tokens": 2, "truncation": "disabled"} | inert
    assert ask(http, "POST", json=body).status_code == 200


@pytest.mark.parametrize("given", ["resp_x", "resp_" + "0" * 31, "chatcmpl-" + "0" * 32, "resp_" + "0" * 32])
def test_an_id_that_nobody_has_given_is_unknown(http: httpx.Client, given: str) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        error = ask(http, method, f"/{given}{path}")
        assert (error.status_code, error.json()["error"]["code"]) == (404, "response_not_found")
    earlier = ask(http, "POST", json={"model": "small-model", "input": "hi", "previous_response_id": given})
    assert (earlier.status_code, earlier.json()["error"]["param"]) == (404, "previous_response_id")


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("", {"stream": "maybe"}, "stream"),
        ("", {"starting_after": "3"}, "starting_after"),
        ("", {"stream": "true", "starting_after": "-1"}, "starting_after"),
        ("/input_items", {"limit": "0"}, "limit"),
        ("/input_items", {"order": "up"}, "order"),
        ("/input_items", {"after": "in_9"}, "after"),
    ],
)
def test_a_wrong_query_is_named(http: httpx.Client, path: str, query: dict[str, str], param: str) -> None:
    body = {"model": "small-model", "input": "hi", "max_output_tokens": 2}
    response_id = ask(http, "POST", json=body).json()["id"]
    refused = ask(http, "GET", f"/{response_id}{path}", params=query)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
