"""What a message cannot be asked for is refused in Anthropic's form, and the error names the field or the block."""

from typing import Any

import httpx
import pytest

from tests.api.instance import Instance
from tests.api.messages.reading import COUNT_PATH, MODEL, PATH, TOOLS, check_error
from tests.api.thinking_model import speak, tokens_of

WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search"}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": list(blocks)}]}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": ["x"]}, "messages[0]"),
    ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (user("x"), "messages[0].content[0]"),
    (user({"type": "text"}), "messages[0].content[0].text"),
    (user({"type": "text", "text": "x"}, IMAGE), "messages[0].content[1].type"),
    (user(DOCUMENT), "messages[0].content[0].type"),
    (user({"type": "search_result"}), "messages[0].content[0].type"),
    (user(USE), "messages[0].content[0].type"),
    (user({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
    (user(RESULT | {"content": [{"type": "search_result"}]}), "messages[0].content[0].content[0].type"),
    (user(RESULT | {"content": [{"type": "tool_reference"}]}), "messages[0].content[0].content[0].tool_name"),
    (user(RESULT | {"content": 7}), "messages[0].content[0].content"),
    (assistant({"type": "thinking"}), "messages[1].content[0].thinking"),
    (assistant(USE | {"id": ""}), "messages[1].content[0].id"),
    (assistant(USE | {"name": 7}), "messages[1].content[0].name"),
    (assistant(USE | {"input": "{}"}), "messages[1].content[0].input"),
    (assistant(RESULT), "messages[1].content[0].type"),
    (assistant({"type": "server_tool_use"}), "messages[1].content[0].type"),
    (assistant({"type": "text", "text": "x"}, USE), "messages[1].content[1].type"),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"system": [{"type": "text"}]}, "system[0].text"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"stop_sequences": ["x"], "stop": "y"}, "stop"),
    ({"tools": [{"type": "web_find_20250305", "name": "web_find"}]}, "tools[0].type"),
    ({"tools": [WEB_SEARCH], "tool_choice": {"type": "any"}}, "tool_choice"),
    (
        {"tools": [WEB_SEARCH, *TOOLS["tools"]], "tool_choice": {"type": "tool", "name": "web_search"}},
        "tool_choice.name",
    ),
    ({"tools": [WEB_SEARCH, {"name": "f", "input_schema": {"type": "array"}}]}, "tools[1].input_schema.type"),
    ({"tools": [{"name": "x" * 129, "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "f", "input_schema": {}, "defer_loading": 1}]}, "tools[0].defer_loading"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    (TOOLS | {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    (TOOLS | {"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
    (TOOLS | {"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "disabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "display": "short"}}, "thinking.display"),
    ({"output_config": {"effort": "all"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "grammar"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "odd"}}}},
        "output_config.format.schema",
    ),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"generated_finish_reasons": ["stop"]}, "generated_finish_reasons[0]"),
    ({"generated_token_ids": [10**6]}, "generated_token_ids[0]"),
    ({"chat_template_kwargs": 7}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_a_wrong_field_is_named(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9} | fields
    refused = http.post(PATH, json=body)
    assert refused.status_code == 400, refused.text
    error = check_error(refused)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"].startswith(f"{param}: ")


def test_a_block_that_is_no_text_is_named_by_its_type(http: httpx.Client) -> None:
    for block in (IMAGE, DOCUMENT):
        error = check_error(http.post(PATH, json={"model": MODEL, "max_tokens": 9, **user(block)}))
        assert f"{block['type']} blocks are not supported" in error["message"]


def test_what_changes_nothing_is_accepted(keeper: Instance, http: httpx.Client) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": MODEL,
        "max_tokens": 9,
        "system": [{"type": "text", "text": "be brief"} | cached],
        **user({"type": "text", "text": "hi"} | cached, {"type": "tool_result", "tool_use_id": "t"} | cached),
        "tools": [{"type": "custom", "name": "f", "input_schema": {}, "eager_input_streaming": True} | cached],
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "container": None,
        "mcp_servers": [],
        **cached,
    }
    speak(keeper, tokens_of("ok"))
    answer = http.post(PATH, json=body)
    assert answer.status_code == 200 and "x-onward-ignored-fields" not in answer.headers, answer.text


def test_an_unknown_field_is_reported(keeper: Instance, http: httpx.Client) -> None:
    speak(keeper, tokens_of("ok"))
    answer = http.post(PATH, json={"model": MODEL, "max_tokens": 9, **user({"type": "text", "text": "x"}), "odd": 1})
    assert answer.headers["x-onward-ignored-fields"] == "odd"


def test_tools_and_blocks_that_the_model_does_not_see_are_named(keeper: Instance, http: httpx.Client) -> None:
    speak(keeper, tokens_of("ok"))
    reference = {"type": "tool_reference", "tool_name": "f"}
    result = RESULT | {"content": [{"type": "text", "text": "see"}, IMAGE, DOCUMENT, reference]}
    deferred = {"name": "f" * 128, "input_schema": {}, "defer_loading": True}
    body = {"model": MODEL, "max_tokens": 9, **user(result), "tools": [WEB_SEARCH, deferred]}
    answer = http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    ignored = "tools.defer_loading, tools.web_search_20250305, tool_result.image, tool_result.document"
    assert answer.headers["x-onward-ignored-fields"] == ignored
    prompt = bytes(one for one in keeper.engine.submits[-1].prompt_token_ids if one < 256).decode()
    assert prompt.startswith(f"tools: {'f' * 128}\n"), "a tool that the client cannot run is not offered"
    shown = ("see", "[image: not shown", "[document: not shown", "[tool: f]")
    assert [prompt.count(text) for text in shown] == [1] * 4


def test_a_limit_is_required_but_for_counting(http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    assert check_error(http.post(PATH, json=body))["param"] == "max_tokens"
    assert http.post(COUNT_PATH, json=body).status_code == 200


def test_every_refusal_has_anthropic_s_form(http: httpx.Client) -> None:
    refusals = {
        "not_found_error": http.post(PATH, json={"model": "other", "max_tokens": 9, "messages": []}),
        "invalid_request_error": http.post(PATH, content=b"{", headers={"content-type": "application/json"}),
    }
    for kind, refused in refusals.items():
        assert check_error(refused)["type"] == kind
        assert refused.json()["request_id"] == refused.headers["request-id"] == refused.headers["x-request-id"]
        assert int(refused.headers["content-length"]) == len(refused.content)
    assert check_error(http.get(PATH))["code"] == "method_not_allowed"
    assert check_error(http.delete(PATH))["code"] == "method_not_allowed"
    assert check_error(http.post(PATH + "/batches", json={}))["type"] == "not_found_error"


@pytest.mark.parametrize("version", ["2023-01-01", "", "latest", "2023-06-01x"])
def test_a_version_of_the_api_with_other_events_is_refused(http: httpx.Client, version: str) -> None:
    for path in (PATH, COUNT_PATH):
        refused = http.post(path, json={}, headers={"anthropic-version": version})
        assert (refused.status_code, check_error(refused)["param"]) == (400, "anthropic-version")


@pytest.mark.parametrize("version", ["2023-06-01", "2026-10-21"])
def test_a_later_version_of_the_api_is_served(http: httpx.Client, version: str) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    assert http.post(COUNT_PATH, json=body, headers={"anthropic-version": version}).status_code == 200
