"""What the tests of `/v1/messages` share: kinds of answers, strict readers of them, and the message that events build."""

import json
from typing import Any, get_args

import httpx
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import BaseModel

from tests.api.small_model import END_OF_THOUGHT
from tests.api.strict_types import extras
from tests.api.thinking_model import CALL, FORCED_CALL, SECOND_CALL, TOOL, tokens_of

PATH = "/v1/messages"
COUNT_PATH = PATH + "/count_tokens"
MODEL = "small-model"
TOOLS: dict[str, Any] = {"tools": [{"name": "f", "input_schema": TOOL["function"]["parameters"]}]}
TWO_TOOLS: dict[str, Any] = {"tools": [*TOOLS["tools"], {"name": "g", "input_schema": {"type": "object"}}]}
THINKING: dict[str, Any] = {"thinking": {"type": "adaptive"}}
FORMAT = {"type": "json_schema", "schema": TOOL["function"]["parameters"]}
OURS = frozenset({"completion_token_ids", "num_text_tokens", "error", "seed", "resume", "partial_json"})
"""Fields beside Anthropic's, of a message that is not complete."""
ERROR_FIELDS = frozenset({"param", "code", "retryable", "stage", "retry_after_s"})

KINDS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "words": ({}, tokens_of("né, wörds")),
    "nothing": ({}, []),
    "space": ({}, tokens_of(" \n ")),
    "words that are cut off": ({"max_tokens": 5}, tokens_of("on and on")),
    "a stop sequence": ({"stop_sequences": ["ö", "x"], "min_tokens": 1}, tokens_of("abcö and")),
    "a call behind words": (TOOLS, tokens_of("né ", CALL)),
    "two calls and words": (TWO_TOOLS, tokens_of(CALL, "\n", SECOND_CALL, "!")),
    "one call of two": (
        TWO_TOOLS | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        tokens_of(CALL, SECOND_CALL),
    ),
    "calls that must be": (
        TOOLS | {"tool_choice": {"type": "any"}},
        tokens_of(f"[{FORCED_CALL}, {FORCED_CALL}]"),
    ),
    "the call that must be": (
        TOOLS | {"tool_choice": {"type": "tool", "name": "f"}},
        tokens_of(f"[{FORCED_CALL}]"),
    ),
    "no call": (TOOLS | {"tool_choice": {"type": "none"}}, tokens_of("words")),
    "a call that is cut off": (TOOLS | {"max_tokens": 40}, tokens_of(CALL)),
    "thinking": (THINKING, tokens_of("hm é", END_OF_THOUGHT, "\n\nyés")),
    "thinking without its text": (
        {"thinking": {"type": "enabled", "display": "omitted"}, **TOOLS},
        tokens_of("hm é", END_OF_THOUGHT, "\n\nyés ", CALL),
    ),
    "thinking that does not end": (THINKING | {"max_tokens": 5}, tokens_of("on and on")),
    "a budget of thinking": (
        {"thinking": {"type": "enabled", "budget_tokens": 3}, "max_tokens": 20},
        tokens_of("never ends"),
    ),
    "a call behind thinking": (THINKING | TOOLS, tokens_of("hm", END_OF_THOUGHT, "\n", CALL)),
    "structure": ({"output_config": {"format": FORMAT}}, tokens_of('{"a": 1}')),
}
"""What a request asks for, and what the model says to it."""

_EVENTS: dict[str, type[BaseModel]] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(RawMessageStreamEvent)[0])
}


def body_of(kind: str, **more: Any) -> dict[str, Any]:
    fields = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "seed": 7}
    return fields | KINDS[kind][0] | more


def data_of(event: str) -> dict[str, Any]:
    name, data = (line for line in event.split("\n") if not line.startswith(("id: ", ":")))
    fields = json.loads(data.removeprefix("data: "))
    assert name == f"event: {fields['type']}"
    return fields


def is_event(event: str) -> bool:
    """An event that a client reads."""
    return "\ndata: {" in event


def told(events: list[str]) -> list[dict[str, Any]]:
    """The events without the usage of the cache, which differs between two answers to one question."""
    return [without_cache_usage(data_of(event)) for event in events if is_event(event)]


def without_cache_usage(fields: dict[str, Any]) -> dict[str, Any]:
    for usage in (fields.get("usage"), fields.get("message", {}).get("usage")):
        if usage is not None:
            usage["input_tokens"] += usage["cache_read_input_tokens"]
            usage["cache_read_input_tokens"] = 0
    return fields


def check_event(fields: dict[str, Any], ours: frozenset[str] = frozenset()) -> None:
    if fields["type"] == "ping":
        assert fields == {"type": "ping"}
        return
    read = _EVENTS[fields["type"]].model_validate_json(json.dumps(fields), strict=True)
    assert extras(read) <= ours, fields
    check_complete(read)


OPTIONAL = frozenset({"toolset_name"})
"""The fields of the package's types that the JavaScript types do not require."""


def check_complete(read: BaseModel) -> None:
    """Every field of the package's types is sent, with null where there is nothing to report, as the JavaScript types
    require."""
    assert read.model_fields_set >= set(type(read).model_fields) - OPTIONAL, read
    for name in type(read).model_fields:
        value = getattr(read, name)
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, BaseModel):
                check_complete(one)


def check_message(fields: dict[str, Any], ours: frozenset[str] = frozenset()) -> Message:
    read = Message.model_validate_json(json.dumps(fields), strict=True)
    assert extras(read) <= ours, fields
    check_complete(read)
    return read


def check_error(response: httpx.Response) -> dict[str, Any]:
    """The `error` of a refusal, which must have Anthropic's form."""
    return check_error_body(response.json())


def check_error_body(body: dict[str, Any]) -> dict[str, Any]:
    read = ErrorResponse.model_validate_json(json.dumps(body), strict=True)
    assert extras(read) <= ERROR_FIELDS | {"partial"}, body
    return body["error"]


def built(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client builds from the events. Checks their order."""
    start, ping, *rest = events
    assert (start["type"], ping["type"]) == ("message_start", "ping")
    message: dict[str, Any] = json.loads(json.dumps(start["message"]))
    content, is_open, texts = message["content"], False, ""
    for at, event in enumerate(rest):
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(content)
                content.append(dict(event["content_block"]))
                is_open, texts = True, ""
            case "content_block_delta":
                assert is_open and event["index"] == len(content) - 1
                texts += _add(content[-1], event["delta"])
            case "content_block_stop":
                assert is_open and event["index"] == len(content) - 1
                is_open = False
                if content[-1]["type"] == "tool_use" and texts:
                    _set_input(content[-1], texts)
            case "message_delta":
                assert not is_open
                message |= event["delta"]
                message["usage"] |= event["usage"]
                message |= {name: event[name] for name in event.keys() & OURS}
            case other:
                assert (other, at) == ("message_stop", len(rest) - 1)
    assert events[-1]["type"] == "message_stop"
    return message


def _add(block: dict[str, Any], delta: dict[str, Any]) -> str:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            block["signature"] = delta["signature"]
        case _:
            assert delta["type"] == "input_json_delta"
            return delta["partial_json"]
    return ""


def _set_input(block: dict[str, Any], text: str) -> None:
    try:
        block["input"] = json.loads(text)
    except ValueError:
        block["partial_json"] = text
