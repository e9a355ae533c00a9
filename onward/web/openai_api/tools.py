"""The fields of a chat request that are about tools: what they may say, and what they come to.

Nothing behind this module checks a value again; an error names the path of the field. For the api, and for routers that
make prompts themselves. Does not know how a model writes calls.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from onward.text.prompt_tokenizer import ChatMessage
from onward.text.tool_messages import parse_arguments
from onward.web.json_body import field_error, validation_error

MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 64 << 10
MAX_TOOLS_BYTES = 1 << 20
MAX_DESCRIPTION_LENGTH = 16 << 10
MAX_SCHEMA_DEPTH = 64
MAX_CALLS_PER_MESSAGE = 128
MAX_CALL_ID_LENGTH = 256
FORCED_CALL_FORMAT = "json"
"""Calls that must be made are written as the grammar has them, whatever the model's own way is."""

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

Mode = Literal["none", "auto", "required", "named"]


class FunctionDefinition(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    type: str
    function: FunctionDefinition


class NamedToolFunction(msgspec.Struct, frozen=True):
    name: str


class NamedToolChoice(msgspec.Struct, frozen=True):
    type: str
    function: NamedToolFunction | None = None


class MessageToolFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str | None = None


class MessageToolCall(msgspec.Struct, frozen=True):
    """A call that an earlier answer has made, sent back."""

    id: str
    function: MessageToolFunction
    type: str = "function"


ToolChoice = str | NamedToolChoice


@dataclass(frozen=True, slots=True)
class ResolvedTools:
    """What a request's tools come to."""

    tool_choice: Mode = "none"
    tools: tuple[Tool, ...] = ()
    """Those that the model is told of."""
    callable_tools: tuple[Tool, ...] = ()
    """Those that it may call."""
    allows_parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.callable_tools)

    @property
    def max_calls(self) -> int | None:
        return None if self.allows_parallel and self.tool_choice != "named" else 1

    @property
    def is_forced(self) -> bool:
        return self.tool_choice in ("required", "named")

    def client_finish_reason(self, reason: str | None, has_calls: bool) -> str | None:
        """A finish reason as clients know it. Internally an answer that ends with a call has stopped. Who has named the
        function is told `stop`, since there was no choice to report."""
        return "tool_calls" if reason == "stop" and has_calls and self.tool_choice != "named" else reason

    def for_template(self) -> list[dict[str, Any]] | None:
        """As templates expect tools; those that test for tools expect None rather than an empty list."""
        return [_for_template(tool) for tool in self.tools] or None


NO_TOOLS = ResolvedTools()


def resolve_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> ResolvedTools:
    """Checks the fields `tools`, `tool_choice` and `parallel_tool_calls`."""
    all_tools = tuple(tools or ())
    check_tools(all_tools)
    mode = _mode(choice, bool(all_tools))
    if mode == "none":
        # A model that must not call is not told what it could call.
        return NO_TOOLS
    callable_tools = all_tools
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name if choice.function is not None else None
        callable_tools = tuple(tool for tool in all_tools if tool.function.name == name)
        if not callable_tools:
            raise field_error("tool_choice.function.name", f"must be one of the tools, got {_short(name)}")
    return ResolvedTools(mode, all_tools, callable_tools, parallel is not False)


def _mode(choice: ToolChoice | None, has_tools: bool) -> Mode:
    if isinstance(choice, NamedToolChoice):
        if choice.type != "function":
            raise field_error("tool_choice.type", f"only 'function' is supported, got {_short(choice.type)}")
        if choice.function is None:
            raise field_error("tool_choice.function", "is required")
        mode: Mode = "named"
    elif choice is None:
        mode = "auto"
    elif choice in ("none", "auto", "required"):
        mode = choice
    else:
        raise field_error("tool_choice", f"must be none, auto, required or a function, got {_short(choice)}")
    if mode in ("required", "named") and not has_tools:
        raise field_error("tool_choice", "only allowed with tools")
    return mode if has_tools else "none"


def check_tools(tools: Sequence[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise field_error("tools", f"at most {MAX_TOOLS} tools, got {len(tools)}")
    num_bytes, names = 0, set[str]()
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if tool.type != "function":
            raise field_error(f"{path}.type", f"only 'function' is supported, got {_short(tool.type)}")
        num_bytes += _check_function(f"{path}.function", tool.function)
        if tool.function.name in names:
            raise field_error(f"{path}.function.name", f"{_short(tool.function.name)} is given twice")
        names.add(tool.function.name)
    if num_bytes > MAX_TOOLS_BYTES:
        raise field_error("tools", f"at most {MAX_TOOLS_BYTES} bytes of schemas, got {num_bytes}")


def _check_function(path: str, function: FunctionDefinition) -> int:
    """The size of its schema."""
    if _TOOL_NAME.fullmatch(function.name) is None:
        raise field_error(f"{path}.name", f"must be 1 to 64 letters, digits, _, - or ., got {_short(function.name)}")
    if len(function.description or "") > MAX_DESCRIPTION_LENGTH:
        raise field_error(f"{path}.description", f"at most {MAX_DESCRIPTION_LENGTH} characters")
    schema = function.parameters
    if schema is None:
        return 0
    if schema.get("type", "object") != "object":
        raise field_error(f"{path}.parameters.type", f"must be 'object', got {_short(schema['type'])}")
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        raise field_error(f"{path}.parameters", f"is nested more than {MAX_SCHEMA_DEPTH} deep")
    num_bytes = len(msgspec.json.encode(schema))
    if num_bytes > MAX_SCHEMA_BYTES:
        raise field_error(f"{path}.parameters", f"at most {MAX_SCHEMA_BYTES} bytes, got {num_bytes}")
    return num_bytes


def _depth(value: Any) -> int:
    """Levels of nesting. Level by level, so that no depth is too much for the check itself."""
    level, depth = [value], 0
    while level and depth <= MAX_SCHEMA_DEPTH:
        depth += 1
        level = [inner for container in level for inner in _children(container) if isinstance(inner, (dict, list))]
    return depth


def _children(value: Any) -> Sequence[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def check_tool_messages(messages: Sequence[ChatMessage]) -> None:
    """What messages say of tools. Only the assistant calls, and only whoever calls may have nothing to say."""
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if message.tool_calls:
            if message.role != "assistant":
                raise field_error(f"{path}.tool_calls", f"only the role assistant calls tools, got {message.role}")
            _check_calls(f"{path}.tool_calls", message.tool_calls)
        elif message.content is None:
            raise field_error(f"{path}.content", "is required: a string or a list of text parts")
        if message.role == "tool" and not message.tool_call_id:
            raise field_error(f"{path}.tool_call_id", "is required with the role tool")


def _check_calls(path: str, calls: Sequence[Any]) -> None:
    if len(calls) > MAX_CALLS_PER_MESSAGE:
        raise field_error(path, f"at most {MAX_CALLS_PER_MESSAGE} calls, got {len(calls)}")
    for index, call in enumerate(calls):
        tool_call = _decode_tool_call(f"{path}[{index}]", call)
        if tool_call.type != "function":
            raise field_error(f"{path}[{index}].type", f"only 'function' is supported, got {_short(tool_call.type)}")
        if not 1 <= len(tool_call.id) <= MAX_CALL_ID_LENGTH:
            raise field_error(f"{path}[{index}].id", f"must have 1 to {MAX_CALL_ID_LENGTH} characters")
        parse_arguments(tool_call.function.arguments, f"{path}[{index}].function.arguments")


def _decode_tool_call(path: str, call: Any) -> MessageToolCall:
    try:
        return msgspec.convert(call, MessageToolCall)
    except msgspec.ValidationError as fault:
        raise validation_error(fault, MessageToolCall, path) from fault


def _for_template(tool: Tool) -> dict[str, Any]:
    """Templates test for a field by its presence; some read `parameters` without a test."""
    fields = {name: value for name, value in msgspec.to_builtins(tool.function).items() if value is not None}
    fields.setdefault("parameters", {"type": "object", "properties": {}})
    return {"type": tool.type, "function": fields}


def _short(value: object) -> str:
    """A client's value, for an error message: never the whole of a long one."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
