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


def to_items(input_items: str | list[Any]) -> list[Item]:
    """A string is one message of the user."""
    return (
        [{"type": "message", "role": "user", "content": input_items}] if isinstance(input_items, str) else input_items
    )


def items_to_messages(context: list[Item], input_items: str | list[Any], instructions: str | None) -> list[ChatMessage]:
    """`context`: the items of earlier responses, which go before the request's own."""
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
                self._current_turn().calls.append(_call(item, path))
            case "function_call_output":
                self._flush()
                call_id = _text(item.get("call_id"), f"{path}.call_id", MAX_CALL_ID_LENGTH)
                self.messages.append(
                    ChatMessage("tool", _content_text(item.get("output"), f"{path}.output"), None, call_id)
                )
            case "reasoning":
                self._flush()
                self._current_turn().reasoning = _reasoning_text(item, path)
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
        "function": {"name": _text(item.get("name"), f"{path}.name", MAX_CALL_ID_LENGTH), "arguments": arguments},
    }


def _reasoning_text(item: Item, path: str) -> str | None:
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


def to_chat_tools(tools: list[Any] | None) -> list[Tool] | None:
    """Functions, which stand flat here. What others run for a model is not to be had."""
    return None if tools is None else [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _tool(tool: Any, path: str) -> Tool:
    if not isinstance(tool, dict):
        raise field_error(path, f"must be a tool, got {short_repr(tool)}")
    if tool.get("type") != "function":
        raise field_error(f"{path}.type", f"only 'function' is supported, got {short_repr(tool.get('type'))}")
    for name in tool.keys() - _TOOL_FIELDS:
        if tool[name] not in (None, False):
            raise field_error(f"{path}.{name}", "not supported by this server")
    parameters, strict, description = tool.get("parameters"), tool.get("strict"), tool.get("description")
    if not isinstance(parameters, dict | None):
        raise field_error(f"{path}.parameters", "must be a JSON schema")
    if not isinstance(strict, bool | None):
        raise field_error(f"{path}.strict", "must be true or false")
    if not isinstance(description, str | None):
        raise field_error(f"{path}.description", "must be a string")
    return Tool(
        "function", FunctionDefinition(_text(tool.get("name"), f"{path}.name", 64), description, parameters, strict)
    )


def to_chat_tool_choice(tool_choice: str | dict[str, Any] | None) -> ToolChoice | None:
    if not isinstance(tool_choice, dict):
        return tool_choice
    if tool_choice.get("type") != "function":
        raise field_error(
            "tool_choice.type", f"only 'function' is supported, got {short_repr(tool_choice.get('type'))}"
        )
    return NamedToolChoice("function", NamedToolFunction(_text(tool_choice.get("name"), "tool_choice.name", 64)))
