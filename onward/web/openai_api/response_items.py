"""Converts the input items of a response to chat messages, the only form that chat templates read.

An assistant's text, reasoning and calls are separate items here, and one message in a chat. An error names the path of
the field. Used by api processes, and by routers that tokenize prompts.
"""

from dataclasses import dataclass, field
from typing import Any

from onward.text.prompt_tokenizer import ChatMessage
from onward.text.tool_messages import parse_arguments
from onward.web.json_body import field_error, short_repr
from onward.web.openai_api.compaction import compaction_message
from onward.web.openai_api.response_tools import NAMESPACE, flat_name
from onward.web.openai_api.tools import MAX_CALL_ID_LENGTH

INPUT, CONTEXT = "input", "previous_response_id"
MAX_ITEMS = 4096
ITEM_TYPES = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
    "compaction",
)
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}

Item = dict[str, Any]


def to_items(input_items: str | list[Any]) -> list[Item]:
    """Returns the input as items. A string becomes one user message."""
    return (
        [{"type": "message", "role": "user", "content": input_items}] if isinstance(input_items, str) else input_items
    )


def items_to_messages(context: list[Item], input_items: str | list[Any], instructions: str | None) -> list[ChatMessage]:
    """Returns the chat messages of all items. `context` has the items of earlier responses, which precede the request's
    own."""
    if not input_items:
        raise field_error(INPUT, "must not be empty")
    if isinstance(input_items, list) and len(input_items) + len(context) > MAX_ITEMS:
        raise field_error(
            INPUT, f"at most {MAX_ITEMS} items, with those of earlier responses, got {len(input_items) + len(context)}"
        )
    builder = _ChatBuilder()
    if instructions is not None:
        builder.messages.append(ChatMessage("system", instructions))
    for item in context:
        builder.add(item, CONTEXT)
    for index, item in enumerate(to_items(input_items)):
        builder.add(item, INPUT if isinstance(input_items, str) else f"{INPUT}[{index}]")
    return builder.finish()


@dataclass(slots=True)
class _AssistantTurn:
    """The parts of one message of the assistant."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)

    def message(self) -> ChatMessage:
        content = self.content if self.content is not None or self.calls else ""
        return ChatMessage("assistant", content, tool_calls=self.calls or None, reasoning_content=self.reasoning)


@dataclass(slots=True)
class _ChatBuilder:
    messages: list[ChatMessage] = field(default_factory=list)
    _assistant: _AssistantTurn | None = None

    def add(self, item: Any, path: str) -> None:
        if not isinstance(item, dict):
            raise field_error(path, f"must be an item, got {short_repr(item)}")
        match item.get("type", "message"):
            case "message":
                self._add_message(item, path)
            case "function_call":
                self._current_turn().calls.append(_call(item, path))
            case "custom_tool_call":
                self._current_turn().calls.append(_custom_call(item, path))
            case "function_call_output" | "custom_tool_call_output":
                self._flush()
                call_id = _text(item.get("call_id"), f"{path}.call_id", MAX_CALL_ID_LENGTH)
                self.messages.append(
                    ChatMessage("tool", _content_text(item.get("output"), f"{path}.output"), None, call_id)
                )
            case "reasoning":
                self._flush()
                self._current_turn().reasoning = _reasoning_text(item, path)
            case "compaction":
                self._add_message(compaction_message(item, path), path)
            case other:
                raise field_error(f"{path}.type", f"must be one of {', '.join(ITEM_TYPES)}, got {short_repr(other)}")

    def finish(self) -> list[ChatMessage]:
        self._flush()
        return self.messages

    def _add_message(self, item: Item, path: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise field_error(f"{path}.role", f"must be one of {', '.join(_ROLES)}, got {short_repr(role)}")
        content = _content_text(item.get("content"), f"{path}.content")
        if role != "assistant":
            self._flush()
            self.messages.append(ChatMessage(role, content))
            return
        if self._assistant is not None and (self._assistant.content is not None or self._assistant.calls):
            self._flush()
        self._current_turn().content = content

    def _current_turn(self) -> _AssistantTurn:
        self._assistant = self._assistant or _AssistantTurn()
        return self._assistant

    def _flush(self) -> None:
        if self._assistant is not None:
            self.messages.append(self._assistant.message())
            self._assistant = None


def _call(item: Item, path: str) -> dict[str, Any]:
    arguments = item.get("arguments")
    parse_arguments(arguments, f"{path}.arguments")
    return {
        "id": _text(item.get("call_id"), f"{path}.call_id", MAX_CALL_ID_LENGTH),
        "type": "function",
        "function": {"name": _called_name(item, path), "arguments": arguments},
    }


def _custom_call(item: Item, path: str) -> dict[str, Any]:
    if not isinstance(item.get("input"), str):
        raise field_error(f"{path}.input", "is required: a string")
    return {
        "id": _text(item.get("call_id"), f"{path}.call_id", MAX_CALL_ID_LENGTH),
        "type": "custom",
        "custom": {"name": _called_name(item, path), "input": item["input"]},
    }


def _called_name(item: Item, path: str) -> str:
    """Returns the name of the called tool as the prompt has it."""
    namespace = item.get(NAMESPACE)
    if namespace is not None:
        namespace = _text(namespace, f"{path}.{NAMESPACE}", MAX_CALL_ID_LENGTH)
    return flat_name(namespace, _text(item.get("name"), f"{path}.name", MAX_CALL_ID_LENGTH))


def _reasoning_text(item: Item, path: str) -> str | None:
    """Returns the reasoning text, or else its summary, or None if it is only present in encrypted form."""
    for name in ("content", "summary"):
        parts = item.get(name)
        if not parts:
            continue
        if not isinstance(parts, list):
            raise field_error(f"{path}.{name}", "must be a list of parts")
        texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise field_error(f"{path}.{name}[{index}].text", "is required")
        return "".join(map(str, texts))
    return None


def _content_text(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise field_error(path, "is required: a string or a list of text parts")
    return "".join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    name = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise field_error(
            f"{path}.type", f"only text (input_text, output_text, refusal) is supported, got {short_repr(kind)}"
        )
    text = part.get(name)
    if not isinstance(text, str):
        raise field_error(f"{path}.{name}", "is required")
    return text


def _text(value: Any, path: str, max_length: int) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= max_length:
        raise field_error(path, f"is required: a string of 1 to {max_length} characters")
    return value
