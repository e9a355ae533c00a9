"""Tools as coding agents send them: some that the server runs, which it drops, and some in namespaces."""

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseCustomToolCall

from onward.config import ApiConfig
from onward.proto.model import PreparedModel
from tests.api.instance import Instance, running
from tests.api.reader import NO_CERTIFICATES
from tests.api.responses.reading import (
    CUSTOM,
    CUSTOM_CALL,
    LARK,
    NAMESPACE,
    PATH,
    TOOLS,
    ask,
    body_of,
    check_response,
)
from tests.api.strict_types import check_answer
from tests.api.thinking_model import CALL, FORCED_CALL, speak, tokens_of

MODEL = "small-model"
IGNORED = "x-onward-ignored-fields"
OTHER_CALL = CALL.replace('"f"', '"n__f"')


def prompt_of(keeper: Instance) -> str:
    return bytes(one for one in keeper.engine.submits[-1].prompt_token_ids if one < 256).decode()


def test_tools_of_the_server_are_dropped_and_named(keeper: Instance, http: httpx.Client) -> None:
    speak(keeper, tokens_of("ok"))
    hosted = [{"type": "web_search", "external_web_access": True}, {"type": "local_shell"}]
    deferred = {**TOOLS["tools"][0], "defer_loading": True}
    for stream in (False, True):
        fields = {"tools": [*hosted, deferred], "text": {"verbosity": "low"}, "stream": stream}
        answer = ask(http, "POST", json=body_of("words") | fields)
        assert answer.status_code == 200, answer.text
        ignored = "text.verbosity, tools.defer_loading, tools.local_shell, tools.web_search"
        assert ", ".join(sorted(answer.headers[IGNORED].split(", "))) == ignored
        assert prompt_of(keeper).startswith("tools: f\n"), "only what a client can run is in the prompt"
    alone = ask(http, "POST", json=body_of("words") | {"tools": hosted})
    assert (alone.status_code, alone.json()["tools"]) == (200, [])
    assert "tools:" not in prompt_of(keeper)


def test_nothing_is_named_where_everything_has_an_effect(keeper: Instance, http: httpx.Client) -> None:
    speak(keeper, tokens_of("ok"))
    fields = {"text": {"verbosity": "medium"}, "max_tool_calls": 3, "truncation": "auto", **TOOLS}
    answer = ask(http, "POST", json=body_of("words") | fields)
    assert answer.status_code == 200 and IGNORED not in answer.headers


def test_a_strict_server_refuses_what_it_would_drop(thinker: PreparedModel) -> None:
    with running(thinker, ApiConfig(strict_fields=True)) as strict:
        body = body_of("words") | {"tools": [{"type": "web_search"}]}
        refused = httpx.post(strict.url + PATH, json=body, timeout=30, verify=NO_CERTIFICATES)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools.web_search")


def test_a_response_repeats_the_fields_of_agents(keeper: Instance, http: httpx.Client) -> None:
    speak(keeper, tokens_of("ok"))
    fields = {"text": {"verbosity": "low"}, "max_tool_calls": 3, "truncation": "auto", **NAMESPACE}
    response = ask(http, "POST", json=body_of("words") | fields).json()
    check_response(response)
    assert (response["text"]["verbosity"], response["max_tool_calls"], response["truncation"]) == ("low", 3, "auto")
    assert [tool["type"] for tool in response["tools"]] == ["namespace", "function"]


def test_an_input_that_is_too_long_is_refused_and_not_cut(http: httpx.Client) -> None:
    refused = ask(http, "POST", json=body_of("words") | {"input": "x" * 5000, "truncation": "auto"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_call_names_its_namespace_and_can_be_sent_back(keeper: Instance, client: openai.OpenAI) -> None:
    speak(keeper, tokens_of(OTHER_CALL, CALL))
    asked: Any = {"model": MODEL, "max_output_tokens": 200, **NAMESPACE}
    first = client.responses.create(input=[{"role": "user", "content": "hi"}], **asked)
    assert prompt_of(keeper).startswith("tools: n__f f\n")
    calls: list[Any] = [item.to_dict() for item in first.output]
    assert [(call.get("namespace"), call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("n", "f", {"a": 1}),
        (None, "f", {"a": 1}),
    ]
    outputs: list[Any] = [{"type": "function_call_output", "call_id": call["call_id"], "output": "x"} for call in calls]
    speak(keeper, tokens_of("fine"))
    again = client.responses.create(input=[{"role": "user", "content": "hi"}, *calls, *outputs], **asked)
    by_id = client.responses.create(input=outputs, previous_response_id=first.id, **asked)
    assert again.output_text == by_id.output_text == "fine"
    assert keeper.engine.submits[-1].prompt_token_ids == keeper.engine.submits[-2].prompt_token_ids
    assert prompt_of(keeper).count('"name": "n__f"') == 1


@pytest.mark.parametrize("namespace", [{}, {"namespace": "n"}])
def test_a_named_tool_is_the_one_that_is_forced(
    keeper: Instance, http: httpx.Client, namespace: dict[str, str]
) -> None:
    name = "n__f" if namespace else "f"
    speak(keeper, tokens_of(f"[{FORCED_CALL}]".replace('"f"', f'"{name}"')))
    choice = {"type": "function", "name": "f", **namespace}
    response = ask(http, "POST", json=body_of("words") | NAMESPACE | {"tool_choice": choice}).json()
    [call] = response["output"]
    assert (call["name"], call.get("namespace")) == ("f", namespace.get("namespace"))
    grammar = keeper.engine.submits[-1].sampling_params.grammar
    assert grammar is not None and f'"const": "{name}"' in grammar.source


def test_a_custom_call_is_answered_and_the_talk_goes_on(keeper: Instance, client: openai.OpenAI) -> None:
    speak(keeper, tokens_of(CUSTOM_CALL))
    asked: Any = {"model": MODEL, "max_output_tokens": 200, **CUSTOM}
    first = client.responses.create(input=[{"role": "user", "content": "hi"}], **asked)
    check_response(first.to_dict())
    call: Any = first.output[0].to_dict()
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "p", 'a\n"é😀é')
    output: Any = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
    speak(keeper, tokens_of("fine"))
    again = client.responses.create(input=[{"role": "user", "content": "hi"}, call, output], **asked)
    by_id = client.responses.create(input=[output], previous_response_id=first.id, **asked)
    assert again.output_text == by_id.output_text == "fine"
    assert keeper.engine.submits[-1].prompt_token_ids == keeper.engine.submits[-2].prompt_token_ids
    prompt = prompt_of(keeper)
    assert '"arguments": {"input": "a\\n\\"' in prompt and "tool\ndone" in prompt


@pytest.mark.parametrize(
    ("format_", "kind", "source"),
    [
        (LARK, "grammar", LARK["definition"]),
        ({"type": "grammar", "syntax": "regex", "definition": "go né"}, "regex", "go né"),
    ],
)
def test_a_named_custom_tool_forces_its_grammar_on_the_output(
    keeper: Instance, client: openai.OpenAI, format_: dict[str, str], kind: str, source: str
) -> None:
    speak(keeper, tokens_of("go né"))
    tool: Any = {"type": "custom", "name": "p", "format": format_}
    response = client.responses.create(
        model=MODEL, input="hi", tools=[*TOOLS["tools"], tool], tool_choice={"type": "custom", "name": "p"}
    )
    [call] = response.output
    assert isinstance(call, ResponseCustomToolCall) and (call.name, call.input) == ("p", "go né")
    grammar = keeper.engine.submits[-1].sampling_params.grammar
    assert grammar is not None and (grammar.kind, grammar.source) == (kind, source)


def test_required_calls_of_several_tools_have_an_input_that_matches(keeper: Instance, client: openai.OpenAI) -> None:
    speak(keeper, tokens_of('[{"name": "p", "parameters": {"input": "go 1"}}]'))
    tools: Any = [
        *TOOLS["tools"],
        {"type": "custom", "name": "p", "format": {"type": "grammar", "syntax": "regex", "definition": "go [0-9]"}},
        {"type": "custom", "name": "q"},
    ]
    response = client.responses.create(model=MODEL, input="hi", tools=tools, tool_choice="required")
    [call] = response.output
    assert isinstance(call, ResponseCustomToolCall) and call.input == "go 1"
    grammar = keeper.engine.submits[-1].sampling_params.grammar
    assert grammar is not None
    definitions = json.loads(grammar.source)["$defs"]
    assert definitions["tool_1"]["properties"]["input"] == {"type": "string", "pattern": "^(?:go [0-9])$"}
    assert definitions["tool_2"]["properties"]["input"] == {"type": "string"}


def test_a_chat_has_custom_calls_and_takes_them_back(keeper: Instance, client: openai.OpenAI) -> None:
    speak(keeper, tokens_of(CUSTOM_CALL))
    asked: Any = {"model": MODEL, "tools": [{"type": "custom", "custom": {"name": "p", "description": "d"}}]}
    hello: Any = {"role": "user", "content": "hi"}
    first = client.chat.completions.create(messages=[hello], **asked)
    check_answer(first.to_dict(), frozenset({"reasoning_content"}))
    message: Any = first.choices[0].message.to_dict()
    [call] = message["tool_calls"]
    assert first.choices[0].finish_reason == "tool_calls"
    assert (call["type"], call["custom"]) == ("custom", {"name": "p", "input": 'a\n"é😀é'})
    speak(keeper, tokens_of("fine"))
    result: Any = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    again = client.chat.completions.create(messages=[hello, message, result], **asked)
    assert again.choices[0].message.content == "fine"
    assert '"arguments": {"input": "a\\n\\"' in prompt_of(keeper)
