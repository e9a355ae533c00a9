"""What a message's events are as the fields of OpenAI's chat answers: of a chunk's `delta`, and of a whole `message`."""

from collections.abc import Callable, Iterable
from typing import Any

from onward.text.message_events import ContentText, MessageEvent, ReasoningText, ToolCallArguments, ToolCallStarted

CallId = Callable[[int], str]
"""The id of the call with this index."""


def delta_fields(events: Iterable[MessageEvent], call_id: CallId) -> dict[str, Any]:
    """Of one chunk. Empty if these events say nothing that a client is told."""
    fields: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case ReasoningText(text):
                fields["reasoning_content"] = fields.get("reasoning_content", "") + text
            case ContentText(text):
                fields["content"] = fields.get("content", "") + text
            case ToolCallStarted(index, name):
                calls[index] = {
                    "index": index,
                    "id": call_id(index),
                    "type": "function",
                    "function": {"name": name, "arguments": ""},
                }
            case ToolCallArguments(index, delta):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += delta
            case _:
                pass
    if calls:
        fields["tool_calls"] = list(calls.values())
    return fields


def message_fields(events: Iterable[MessageEvent], call_id: CallId) -> dict[str, Any]:
    """Of a whole answer's message. Content is null where there are calls and no words."""
    delta = delta_fields(events, call_id)
    calls = delta.pop("tool_calls", [])
    fields = {"role": "assistant", "content": delta.pop("content", None if calls else ""), "refusal": None} | delta
    if calls:
        fields["tool_calls"] = [{name: value for name, value in call.items() if name != "index"} for call in calls]
    return fields
