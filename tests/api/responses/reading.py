"""What the tests of responses share: a server that says what it is told to, and strict readers of what it answers."""

import json
from collections.abc import Sequence
from typing import Any, get_args

import httpx
import msgspec
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent

from onward.proto.router import ATTEMPT_PATH, Attempt
from onward.proto.sampling_params import SamplingParams
from tests.api.instance import Instance
from tests.api.routed import MSGPACK_BODY
from tests.api.small_model import END_OF_THOUGHT
from tests.api.strict_types import extras
from tests.api.thinking_model import CALL, FORCED_CALL, SECOND_CALL, TOOL, speak, tokens_of

PATH = "/v1/responses"
TOOLS: dict[str, Any] = {"tools": [{"type": "function", **TOOL["function"]}]}
SCORED: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
NAMESPACE: dict[str, Any] = {
    "tools": [
        {"type": "web_search"},
        {"type": "namespace", "name": "n", "description": "d", "tools": TOOLS["tools"]},
        *TOOLS["tools"],
    ]
}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "go " /n[eé]/'}
CUSTOM: dict[str, Any] = {"tools": [{"type": "custom", "name": "p", "format": LARK}, *TOOLS["tools"]]}
CUSTOM_CALL = '<tool_call>{"name":"p","arguments":{"input":"a\\n\\"é\\ud83d\\ude00\\u00e9"}}</tool_call>'
"""A call whose input has line breaks, quotes and characters outside of the first plane."""
THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
SCHEMA = {"type": "json_schema", "name": "x", "schema": TOOL["function"]["parameters"]}

KINDS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "words": ({}, tokens_of("né, wörds")),
    "words, scored": (SCORED, tokens_of("né\n\nwö")),
    "nothing": ({}, []),
    "space": ({}, tokens_of(" \n ")),
    "words that are cut off": ({"max_output_tokens": 5}, tokens_of("on and on")),
    "a stop string": ({"stop": "ö", "min_tokens": 1}, tokens_of("abcö and")),
    "a call behind words": (TOOLS | SCORED, tokens_of("né ", CALL)),
    "two calls and words": (TOOLS, tokens_of(CALL, "\n", SECOND_CALL, "!")),
    "one call of two": (TOOLS | {"parallel_tool_calls": False}, tokens_of(CALL, SECOND_CALL)),
    "calls that must be": (TOOLS | {"tool_choice": "required"}, tokens_of(f"[{FORCED_CALL}, {FORCED_CALL}]")),
    "the call that must be": (
        TOOLS | {"tool_choice": {"type": "function", "name": "f"}},
        tokens_of(f"[{FORCED_CALL}]"),
    ),
    "a call in a namespace": (NAMESPACE, tokens_of("né ", CALL, CALL.replace('"f"', '"n__f"'))),
    "a custom call": (CUSTOM | SCORED, tokens_of("né ", CUSTOM_CALL, CALL)),
    "a custom call without an input": (CUSTOM, tokens_of(CUSTOM_CALL.replace("input", "patch"))),
    "a custom call in a namespace": (
        {"tools": [{"type": "namespace", "name": "n", "description": "d", "tools": [{"type": "custom", "name": "p"}]}]},
        tokens_of(CUSTOM_CALL.replace('"p"', '"n__p"')),
    ),
    "a custom call that is cut off": (CUSTOM | {"max_output_tokens": 50}, tokens_of(CUSTOM_CALL)),
    "an input that must be": (CUSTOM | {"tool_choice": {"type": "custom", "name": "p"}}, tokens_of("go né")),
    "an input that must be behind thoughts": (
        CUSTOM | THINKING | {"tool_choice": {"type": "custom", "name": "p"}},
        tokens_of("go", END_OF_THOUGHT, "go né"),
    ),
    "a call that is cut off": (TOOLS | {"max_output_tokens": 40}, tokens_of(CALL)),
    "thoughts": (THINKING | SCORED, tokens_of("hm é", END_OF_THOUGHT, "\n\nyés")),
    "thoughts that do not end": (THINKING | {"max_output_tokens": 5}, tokens_of("on and on")),
    "a budget of thoughts": (THINKING | {"thinking_budget": 3, "max_output_tokens": 20}, tokens_of("never ends")),
    "a call behind thoughts": (THINKING | TOOLS, tokens_of("hm", END_OF_THOUGHT, "\n", CALL)),
    "structure": ({"text": {"format": SCHEMA}}, tokens_of('{"a": 1}')),
    "structure behind thoughts": (
        THINKING | {"text": {"format": SCHEMA}},
        tokens_of("{hm", END_OF_THOUGHT, '{"a": 1}'),
    ),
}
"""What a request asks for, and what the model says to it."""

# fmt: off
REQUIRED_FIELDS = frozenset({
    "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id",
    "instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p",
    "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage", "max_output_tokens",
    "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier", "prompt_cache_key",
    "access_programs",
})
# fmt: on
"""The fields that every response has by OpenAI's specification, null where there is nothing to say."""
BEYOND_PACKAGE = frozenset({"store", "presence_penalty", "frequency_penalty", "name"})
"""Fields of the specification that the package's types lack."""

_EVENTS = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])
}
"""The package's types, by the names of the events."""


def body_of(kind: str, **more: Any) -> dict[str, Any]:
    fields = {"model": "small-model", "input": "hi", "max_output_tokens": 200, "seed": 7}
    return fields | KINDS[kind][0] | more


def speak_until(instance: Instance, at: int, *outputs: Sequence[int]) -> None:
    """As `speak`, but the engine pauses after `at` tokens, until the test lets it continue."""
    speak(instance, *outputs)
    choose, has_paused = instance.engine.choose, [False]

    def pause_once(prompt: Sequence[int], sampling: SamplingParams, tokens: Sequence[int]) -> int:
        if len(tokens) == at - 1 and not has_paused[0]:
            has_paused[0] = instance.engine.paused = True
        return choose(prompt, sampling, tokens)

    instance.engine.choose = pause_once


def ask(http: httpx.Client, method: str, path: str = "", **more: Any) -> httpx.Response:
    return http.request(method, PATH + path, **more)


def attempted(http: httpx.Client, attempt: Attempt) -> httpx.Response:
    """As a router asks."""
    return http.post(ATTEMPT_PATH, content=msgspec.msgpack.encode(attempt), headers=MSGPACK_BODY)


def data_of(event: str) -> dict[str, Any]:
    name, data = (line for line in event.split("\n") if not line.startswith(("id: ", ":")))
    fields = json.loads(data.removeprefix("data: "))
    assert name == f"event: {fields['type']}"
    return fields


def told(events: list[str]) -> list[dict[str, Any]]:
    """The events without what differs between two answers to one question."""
    return [_comparable(data_of(event)) for event in events if "\ndata: {" in event]


def _comparable(fields: dict[str, Any]) -> dict[str, Any]:
    if (usage := fields.get("response", {}).get("usage")) is not None:
        del usage["input_tokens_details"]
    fields.get("response", {}).pop("completed_at", None)
    return fields


def check_event(fields: dict[str, Any]) -> None:
    read = _EVENTS[fields["type"]].model_validate_json(json.dumps(fields), strict=True)
    assert extras(read) <= BEYOND_PACKAGE, fields
    if "response" in fields:
        check_response(fields["response"])
    if fields["type"] == "response.function_call_arguments.done":
        assert isinstance(fields["name"], str)


def check_response(fields: dict[str, Any]) -> Response:
    read = Response.model_validate_json(json.dumps(fields), strict=True)
    assert extras(read) <= BEYOND_PACKAGE, fields
    assert fields.keys() >= REQUIRED_FIELDS
    completed_at = fields["completed_at"]
    is_completed = fields["status"] == "completed"
    assert (completed_at is not None and completed_at >= fields["created_at"]) if is_completed else completed_at is None
    for tool in (tool for tool in fields["tools"] if tool["type"] == "function"):
        assert tool.keys() == {"type", "name", "description", "parameters", "strict"}
    for part in (part for item in fields["output"] if item["type"] == "message" for part in item["content"]):
        assert isinstance(part["logprobs"], list)
    return read


def check_items(fields: dict[str, Any]) -> ResponseItemList:
    read = ResponseItemList.model_validate_json(json.dumps(fields), strict=True)
    assert extras(read) == set(), fields
    return read
