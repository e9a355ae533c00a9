"""The items of a response's input as the messages of a chat, whose templates know nothing else.

An assistant's words, thoughts and calls are items of their own here and one message there. An error names the path of the
field. For the api, and for routers that make prompts themselves.
"""

from dataclasses import dataclass, field
from typing import Any

from onward.text.prompt_tokenizer import ChatMessage
from onward.text.tool_messages import parse_arguments
from onward.web.json_body import field_error, short_repr
from onward.web.openai_api.tools import (
    MAX_CALL_ID_LENGTH,
    FunctionDefinition,
    NamedToolChoice,
    NamedToolFunction,
    Tool,
    ToolChoice,
)

INPUT, CONTEXT = "input", "previous_response_id"
MAX_ITEMS = 4096
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_TOOL_FIELDS = frozenset({"type", "name", "description", "parameters", "strict"})

Item = dict[str, Any]


def to_items(given: str | list[Any]) -> list[Item]:
    """A string is one message of the user."""
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given


def items_to_messages(context: list[Item], given: str | list[Any], instructions: str | None) -> list[ChatMessage]:
    """`context`: the items of earlier responses, which go before the request's own."""
    if not given:
        raise field_error(INPUT, "must not be empty")
    if isinstance(given, list) and len(given) + len(context) > MAX_ITEMS:
        raise field_error(
            INPUT, f"at most {MAX_ITEMS} items, with those of earlier responses, got {len(given) + len(context)}"
        )
    told = _ChatBuilder()
    if instructions is not None:
        told.messages.append(ChatMessage("system", instructions))
    for item in context:
        told.add(item, CONTEXT)
    for index, item in enumerate(to_items(given)):
        told.add(item, INPUT if isinstance(given, str) else f"{INPUT}[{index}]")
    return told.whole()


@dataclass(slots=True)
class _AssistantTurn:
    """What the assistant did in one go."""

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
                self._going_on().calls.append(_call(item, path))
            case "function_call_output":
                self._flush()
                call_id = _text(item.get("call_id"), f"{path}.call_id", MAX_CALL_ID_LENGTH)
                self.messages.append(ChatMessage("tool", _words(item.get("output"), f"{path}.output"), None, call_id))
            case "reasoning":
                self._flush()
                self._going_on().reasoning = _thoughts(item, path)
            case other:
                raise field_error(f"{path}.type", f"must be one of {', '.join(ITEM_TYPES)}, got {short_repr(other)}")

    def whole(self) -> list[ChatMessage]:
        self._flush()
        return self.messages

    def _add_message(self, item: Item, path: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise field_error(f"{path}.role", f"must be one of {', '.join(_ROLES)}, got {short_repr(role)}")
        content = _words(item.get("content"), f"{path}.content")
        if role != "assistant":
            self._flush()
            self.messages.append(ChatMessage(role, content))
            return
        if self._assistant is not None and (self._assistant.content is not None or self._assistant.calls):
            self._flush()
        self._going_on().content = content

    def _going_on(self) -> _AssistantTurn:
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
        "function": {"name": _text(item.get("name"), f"{path}.name", MAX_CALL_ID_LENGTH), "arguments": arguments},
    }


def _thoughts(item: Item, path: str) -> str | None:
    """What the model thought, or else a summary of it; nothing, where it is sealed by whoever made it."""
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


def _words(content: Any, path: str) -> str:
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


def to_chat_tools(given: list[Any] | None) -> list[Tool] | None:
    """Functions, which stand flat here. What others run for a model is not to be had."""
    return None if given is None else [_tool(one, f"tools[{index}]") for index, one in enumerate(given)]


def _tool(given: Any, path: str) -> Tool:
    if not isinstance(given, dict):
        raise field_error(path, f"must be a tool, got {short_repr(given)}")
    if given.get("type") != "function":
        raise field_error(f"{path}.type", f"only 'function' is supported, got {short_repr(given.get('type'))}")
    for name in given.keys() - _TOOL_FIELDS:
        if given[name] not in (None, False):
            raise field_error(f"{path}.{name}", "not supported by this server")
    parameters, strict, told = given.get("parameters"), given.get("strict"), given.get("description")
    if not isinstance(parameters, dict | None):
        raise field_error(f"{path}.parameters", "must be a JSON schema")
    if not isinstance(strict, bool | None):
        raise field_error(f"{path}.strict", "must be true or false")
    if not isinstance(told, str | None):
        raise field_error(f"{path}.description", "must be a string")
    return Tool("function", FunctionDefinition(_text(given.get("name"), f"{path}.name", 64), told, parameters, strict))


def to_chat_tool_choice(given: str | dict[str, Any] | None) -> ToolChoice | None:
    if not isinstance(given, dict):
        return given
    if given.get("type") != "function":
        raise field_error("tool_choice.type", f"only 'function' is supported, got {short_repr(given.get('type'))}")
    return NamedToolChoice("function", NamedToolFunction(_text(given.get("name"), "tool_choice.name", 64)))
