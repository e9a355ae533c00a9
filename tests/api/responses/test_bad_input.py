"""What a response cannot be asked for is refused, and the error names the field."""

from typing import Any

import httpx
import pytest

from tests.api.responses.reading import ask

CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
CUSTOM = {"type": "custom", "name": "p"}
FUNCTION = {"type": "function", "name": "f"}
CUSTOM_CALLED = {"type": "custom_tool_call", "call_id": "c", "name": "p", "input": "x"}
NAMESPACE = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}
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
    ({"tools": [{"type": "web_find"}]}, "tools[0].type"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "web_search"}, {"type": "function", "name": "a b"}]}, "tools[1].name"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [7]}]}, "tools[0].tools[0]"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]}]}, "tools[0].tools[0].type"),
    ({"tools": [NAMESPACE, NAMESPACE]}, "tools[1].tools[0].name"),
    ({"tools": [NAMESPACE], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
    ({"tools": [NAMESPACE | {"name": "n" * 128}]}, "tools[0].tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "color": "red"}]}, "tools[0].color"),
    ({"input": [CALLED | {"namespace": 7}]}, "input[0].namespace"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "string"}}]}, "tools[0].parameters.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "custom"}}, "tool_choice.name"),
    ({"tools": [CUSTOM], "tool_choice": {"type": "function", "name": "p"}}, "tool_choice.name"),
    ({"tools": [CUSTOM | {"name": "a b"}]}, "tools[0].name"),
    ({"tools": [CUSTOM | {"parameters": {"type": "object"}}]}, "tools[0].parameters"),
    ({"tools": [CUSTOM | {"format": "text"}]}, "tools[0].format"),
    ({"tools": [CUSTOM | {"format": {"type": "json"}}]}, "tools[0].format.type"),
    (
        {"tools": [CUSTOM | {"format": {"type": "grammar", "syntax": "ebnf", "definition": "x"}}]},
        "tools[0].format.syntax",
    ),
    ({"tools": [CUSTOM | {"format": {"type": "grammar", "syntax": "lark"}}]}, "tools[0].format.definition"),
    ({"tools": [CUSTOM, CUSTOM | {"type": "function"}]}, "tools[1].name"),
    (
        {
            "tools": [CUSTOM | {"format": {"type": "grammar", "syntax": "lark", "definition": "start: ("}}],
            "tool_choice": {"type": "custom", "name": "p"},
        },
        "tools",
    ),
    (
        {
            "tools": [CUSTOM | {"format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}}, FUNCTION],
            "tool_choice": "required",
        },
        "tools",
    ),
    ({"input": [CUSTOM_CALLED | {"input": 7}]}, "input[0].input"),
    ({"input": [CUSTOM_CALLED | {"call_id": ""}]}, "input[0].call_id"),
    ({"input": [{"type": "custom_tool_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
    ({"tool_choice": {"type": "allowed_tools", "tools": [], "mode": "auto"}}, "tool_choice.tools"),
    (
        {
            "tools": [{"type": "function", "name": "f"}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
        },
        "tool_choice.tools[0].name",
    ),
    (
        {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function", "name": "g"}},
        "tool_choice.name",
    ),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "odd"}}}}, "text.format.schema"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"reasoning": {"effort": "all"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"reasoning": {"generate_summary": "auto"}}, "reasoning.generate_summary"),
    ({"include": ["reasoning.encrypted_content", "file_search_call.results"]}, "include[1]"),
    ({"safety_identifier": 7}, "safety_identifier"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"truncation": "middle"}, "truncation"),
    ({"metadata": {"k": "v" * 513}}, "metadata.k"),
    ({"metadata": {str(key): "" for key in range(17)}}, "metadata"),
    ({"background": True, "store": False}, "background"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
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
    inert |= {"client_metadata": {"installation": "a"}, "prompt_cache_retention": "24h"}
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
