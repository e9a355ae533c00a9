"""The items of a response in OpenAI's format: their JSON, and the typed events about one item."""

from typing import Any

from onward.api.responses.output_item_builder import (
    CustomToolCallItem,
    EventFields,
    FunctionCallItem,
    MessageItem,
    OutputItem,
    ReasoningItem,
    TextItem,
)


def item_json(item: OutputItem) -> dict[str, Any]:
    """Returns the item's JSON. Its `content` is empty while the item has no text."""
    match item:
        case MessageItem():
            has_part = bool(item.texts) or item.status != "in_progress"
            content = [_part(item)] if has_part else []
            return {"type": "message", "id": item.id, "status": item.status, "role": "assistant", "content": content}
        case ReasoningItem():
            content = [_part(item)] if item.texts else []
            return {"type": "reasoning", "id": item.id, "status": item.status, "summary": [], "content": content}
        case CustomToolCallItem():
            fields = {"type": "custom_tool_call", "id": item.id, "call_id": item.call_id}
            return fields | _namespace(item) | {"name": item.name, "input": item.text}
        case FunctionCallItem():
            return {
                "type": "function_call",
                "id": item.id,
                "status": item.status,
                "call_id": item.call_id,
                **_namespace(item),
                **_call_fields(item),
            }
        case _:
            raise AssertionError(f"an item of the kind {type(item).__name__}")


class ResponseItemEvents:
    """An `ItemEventWriter` that writes OpenAI's events about an item."""

    def opened(self, item: OutputItem) -> list[EventFields]:
        events: list[EventFields] = [
            ("response.output_item.added", {"output_index": item.index, "item": item_json(item)})
        ]
        if isinstance(item, TextItem):
            events.append(("response.content_part.added", _content_position(item) | {"part": _part(item)}))
        return events

    def grown(self, item: OutputItem, text: str, logprobs: list[dict[str, Any]]) -> list[EventFields]:
        if isinstance(item, CustomToolCallItem):
            return [("response.custom_tool_call_input.delta", _of_item(item) | {"delta": text})]
        if not isinstance(item, TextItem):
            return [("response.function_call_arguments.delta", _of_item(item) | {"delta": text})]
        fields = _content_position(item) | {"delta": text}
        if isinstance(item, MessageItem):
            fields["logprobs"] = _brief(logprobs)
        return [(f"{_text_event(item)}.delta", fields)]

    def closed(self, item: OutputItem) -> list[EventFields]:
        events: list[EventFields]
        if isinstance(item, CustomToolCallItem):
            events = [("response.custom_tool_call_input.done", _of_item(item) | {"input": item.text})]
        elif isinstance(item, FunctionCallItem):
            events = [("response.function_call_arguments.done", _of_item(item) | _call_fields(item))]
        else:
            assert isinstance(item, TextItem), "an item is a call or has text"
            done = _content_position(item) | {"text": item.text}
            if isinstance(item, MessageItem):
                done["logprobs"] = _brief(item.logprobs)
            events = [
                (f"{_text_event(item)}.done", done),
                ("response.content_part.done", _content_position(item) | {"part": _part(item)}),
            ]
        return [*events, ("response.output_item.done", {"output_index": item.index, "item": item_json(item)})]


def _text_event(item: TextItem) -> str:
    """Returns the prefix of the names of the events about the item's text."""
    return "response.output_text" if isinstance(item, MessageItem) else "response.reasoning_text"


def _part(item: TextItem) -> dict[str, Any]:
    if not isinstance(item, MessageItem):
        return {"type": "reasoning_text", "text": item.text}
    return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": list(item.logprobs)}


def _namespace(item: FunctionCallItem) -> dict[str, Any]:
    return {} if item.namespace is None else {"namespace": item.namespace}


def _call_fields(item: FunctionCallItem) -> dict[str, Any]:
    return {"name": item.name, "arguments": item.text}


def _of_item(item: OutputItem) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": item.index}


def _content_position(item: TextItem) -> dict[str, Any]:
    return _of_item(item) | {"content_index": 0}


def _brief(logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the logprobs without `bytes`, as events have them."""
    return [
        {
            "token": entry["token"],
            "logprob": entry["logprob"],
            "top_logprobs": [{"token": top["token"], "logprob": top["logprob"]} for top in entry["top_logprobs"]],
        }
        for entry in logprobs
    ]
