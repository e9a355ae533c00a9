"""Checks and resolves the tool fields of a chat request.

No later code checks a value again; an error names the path of the field. Used by api processes, and by routers that
tokenize prompts. This module does not know how a model writes calls.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from onward.text.prompt_tokenizer import ChatMessage
from onward.text.tool_calls.custom_input import INPUT
from onward.text.tool_messages import parse_arguments
from onward.web.json_body import field_error, short_repr, validation_error

MAX_TOOLS = 128
MAX_SCHEMA_BYTES = 64 << 10
MAX_TOOLS_BYTES = 1 << 20
MAX_DESCRIPTION_LENGTH = 64 << 10
"""Coding agents explain a tool in more than 20,000 characters."""
MAX_SCHEMA_DEPTH = 64
MAX_CALLS_PER_MESSAGE = 128
MAX_CALL_ID_LENGTH = 256
FORCED_CALL_FORMAT = "json"
"""Forced calls have the format of the grammar, whatever the model's own format is."""

MAX_TOOL_NAME_LENGTH = 128
"""The limit of Anthropic's API; OpenAI's is 64."""
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")

CUSTOM = "custom"
TOOL_TYPES = ("function", CUSTOM)
_SUPPORTED_TYPES = "only 'function' and 'custom' are supported"
INPUT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
"""The arguments of a custom tool, as the model writes them."""

Mode = Literal["none", "auto", "required", "named"]


class FunctionDefinition(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomGrammar(msgspec.Struct, frozen=True):
    definition: str
    syntax: str
    """`lark` or `regex`."""


class CustomFormat(msgspec.Struct, frozen=True):
    type: str
    """`text` or `grammar`."""
    grammar: CustomGrammar | None = None


class CustomDefinition(msgspec.Struct, frozen=True):
    """A tool whose input is a text."""

    name: str
    description: str | None = None
    format: CustomFormat | None = None

    @property
    def grammar(self) -> CustomGrammar | None:
        return None if self.format is None else self.format.grammar


class Tool(msgspec.Struct, frozen=True):
    type: str
    """`function` or `custom`."""
    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None

    @property
    def definition(self) -> FunctionDefinition:
        """The function that the model sees. That of a custom tool has one argument, its input."""
        if self.custom is not None:
            return _custom_function(self.custom)
        assert self.function is not None, "a checked tool has a function"
        return self.function


class NamedToolFunction(msgspec.Struct, frozen=True):
    name: str


class AllowedTool(msgspec.Struct, frozen=True):
    type: str
    """`function` or `custom`."""
    function: NamedToolFunction | None = None
    custom: NamedToolFunction | None = None


class AllowedTools(msgspec.Struct, frozen=True):
    mode: str
    """`auto` or `required`."""
    tools: list[AllowedTool]


class NamedToolChoice(msgspec.Struct, frozen=True):
    type: str
    """`function`, `custom`, or `allowed_tools`: only some of the tools may be called."""
    function: NamedToolFunction | None = None
    custom: NamedToolFunction | None = None
    allowed_tools: AllowedTools | None = None


class MessageToolFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str | None = None


class MessageCustomTool(msgspec.Struct, frozen=True):
    name: str
    input: str


class MessageToolCall(msgspec.Struct, frozen=True):
    """A call of an earlier answer, which the client sends back."""

    id: str
    function: MessageToolFunction | None = None
    custom: MessageCustomTool | None = None
    type: str = "function"


ToolChoice = str | NamedToolChoice


@dataclass(frozen=True, slots=True)
class ResolvedTools:
    """The resolved `tools`, `tool_choice` and `parallel_tool_calls` of a request."""

    tool_choice: Mode = "none"
    tools: tuple[Tool, ...] = ()
    """Tools that are in the prompt."""
    callable_tools: tuple[Tool, ...] = ()
    """Tools that the model may call."""
    allows_parallel: bool = True
    is_legacy: bool = False
    """Whether the client has sent `functions`: its answers have a `function_call` instead of `tool_calls`."""

    @property
    def field(self) -> str:
        """The field with the tools, for errors."""
        return "functions" if self.is_legacy else "tools"

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.definition.name for tool in self.callable_tools)

    @property
    def custom_names(self) -> frozenset[str]:
        """Names of the custom tools. The calls of a model may name any tool of the prompt."""
        return frozenset(tool.custom.name for tool in self.tools if tool.custom is not None)

    @property
    def raw_tool(self) -> Tool | None:
        """The custom tool whose input is the whole output: the only one that a forced call may name, with a grammar."""
        if not self.is_forced or len(self.callable_tools) != 1:
            return None
        [tool] = self.callable_tools
        return tool if tool.custom is not None and tool.custom.grammar is not None else None

    @property
    def max_calls(self) -> int | None:
        return None if self.allows_parallel and self.tool_choice != "named" else 1

    @property
    def is_forced(self) -> bool:
        return self.tool_choice in ("required", "named")

    def client_finish_reason(self, reason: str | None, has_calls: bool) -> str | None:
        """Returns the finish reason that the client gets for an internal one. `stop` with calls becomes `tool_calls`,
        or `function_call` if the client sent `functions`. It stays `stop` if `tool_choice` names a tool, since
        calling it was not the model's decision."""
        if reason != "stop" or not has_calls or self.tool_choice == "named":
            return reason
        return "function_call" if self.is_legacy else "tool_calls"

    def for_template(self) -> list[dict[str, Any]] | None:
        """Returns the tools in the form that templates expect. Without tools it is None and not an empty list, because
        templates may test for None."""
        return [_for_template(tool) for tool in self.tools] or None


NO_TOOLS = ResolvedTools()


def resolve_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> ResolvedTools:
    """Checks the fields `tools`, `tool_choice` and `parallel_tool_calls`."""
    all_tools = tuple(tools or ())
    check_tools(all_tools)
    mode = _mode(choice, bool(all_tools))
    if mode == "none":
        # The prompt of a model that must not call a tool contains no tools.
        return NO_TOOLS
    return ResolvedTools(mode, all_tools, _callable_tools(all_tools, choice), parallel is not False)


def _callable_tools(tools: tuple[Tool, ...], choice: ToolChoice | None) -> tuple[Tool, ...]:
    if not isinstance(choice, NamedToolChoice):
        return tools
    chosen: dict[str, NamedToolChoice | AllowedTool] = {"tool_choice": choice}
    if choice.allowed_tools is not None:
        path = "tool_choice.allowed_tools.tools"
        chosen = {f"{path}[{at}]": allowed for at, allowed in enumerate(choice.allowed_tools.tools)}
    known, names = {(tool.type, tool.definition.name) for tool in tools}, set[str]()
    for path, one in chosen.items():
        named = one.custom if one.type == CUSTOM else one.function
        if named is None or (one.type, named.name) not in known:
            name = None if named is None else named.name
            raise field_error(f"{path}.{one.type}.name", f"must be one of the tools, got {short_repr(name)}")
        names.add(named.name)
    return tuple(tool for tool in tools if tool.definition.name in names)


def _allowed_mode(allowed: AllowedTools | None) -> Mode:
    if allowed is None:
        raise field_error("tool_choice.allowed_tools", "is required with the type allowed_tools")
    path = "tool_choice.allowed_tools"
    if not 1 <= len(allowed.tools) <= MAX_TOOLS:
        raise field_error(f"{path}.tools", f"must be a list of 1 to {MAX_TOOLS} tools, got {len(allowed.tools)}")
    for index, tool in enumerate(allowed.tools):
        if tool.type not in TOOL_TYPES:
            raise field_error(f"{path}.tools[{index}].type", f"{_SUPPORTED_TYPES}, got {short_repr(tool.type)}")
    match allowed.mode:
        case "auto" | "required":
            return allowed.mode
        case other:
            raise field_error(f"{path}.mode", f"must be auto or required, got {short_repr(other)}")


def _object_mode(choice: NamedToolChoice) -> Mode:
    if choice.type == "allowed_tools":
        return _allowed_mode(choice.allowed_tools)
    if choice.type not in TOOL_TYPES:
        problem = f"only 'function', 'custom' and 'allowed_tools' are supported, got {short_repr(choice.type)}"
        raise field_error("tool_choice.type", problem)
    if (choice.custom if choice.type == CUSTOM else choice.function) is None:
        raise field_error(f"tool_choice.{choice.type}", "is required")
    if choice.allowed_tools is not None:
        raise field_error("tool_choice.allowed_tools", "only allowed with the type allowed_tools")
    return "named"


def _mode(choice: ToolChoice | None, has_tools: bool) -> Mode:
    if isinstance(choice, NamedToolChoice):
        mode = _object_mode(choice)
    elif choice is None:
        mode = "auto"
    elif choice in ("none", "auto", "required"):
        mode = choice
    else:
        raise field_error("tool_choice", f"must be none, auto, required or a function, got {short_repr(choice)}")
    if mode in ("required", "named") and not has_tools:
        raise field_error("tool_choice", "only allowed with tools")
    return mode if has_tools else "none"


def check_tools(tools: Sequence[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise field_error("tools", f"at most {MAX_TOOLS} tools, got {len(tools)}")
    num_bytes, names = 0, set[str]()
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        num_bytes += _check_tool(path, tool)
        name = tool.definition.name
        if name in names:
            raise field_error(f"{path}.{tool.type}.name", f"{short_repr(name)} is given twice")
        names.add(name)
    if num_bytes > MAX_TOOLS_BYTES:
        raise field_error("tools", f"at most {MAX_TOOLS_BYTES} bytes of schemas, got {num_bytes}")


def _check_tool(path: str, tool: Tool) -> int:
    if tool.type not in TOOL_TYPES:
        raise field_error(f"{path}.type", f"{_SUPPORTED_TYPES}, got {short_repr(tool.type)}")
    other = "function" if tool.type == CUSTOM else CUSTOM
    if getattr(tool, tool.type) is None:
        raise field_error(f"{path}.{tool.type}", "is required")
    if getattr(tool, other) is not None:
        raise field_error(f"{path}.{other}", f"only allowed with the type {other}")
    if tool.custom is not None:
        return check_custom(f"{path}.custom", tool.custom, "format.grammar")
    return check_function(f"{path}.function", tool.definition)


def check_custom(path: str, custom: CustomDefinition, grammar_field: str) -> int:
    """Checks a custom tool and returns the size of its grammar in bytes. `path`, `grammar_field`: its place in the request
    and the field of its grammar there, for errors."""
    check_function(path, FunctionDefinition(custom.name, custom.description))
    if custom.format is None:
        return 0
    if custom.format.type not in ("text", "grammar"):
        raise field_error(f"{path}.format.type", f"must be text or grammar, got {short_repr(custom.format.type)}")
    grammar = custom.grammar
    if (grammar is not None) != (custom.format.type == "grammar"):
        raise field_error(f"{path}.{grammar_field}", "is required with the type grammar, and only allowed with it")
    if grammar is None:
        return 0
    if grammar.syntax not in ("lark", "regex"):
        problem = f"must be lark or regex, got {short_repr(grammar.syntax)}"
        raise field_error(f"{path}.{grammar_field}.syntax", problem)
    num_bytes = len(grammar.definition.encode("utf-8", "replace"))
    if not 1 <= num_bytes <= MAX_SCHEMA_BYTES:
        problem = f"must have 1 to {MAX_SCHEMA_BYTES} bytes, got {num_bytes}"
        raise field_error(f"{path}.{grammar_field}.definition", problem)
    return num_bytes


def check_function(path: str, function: FunctionDefinition, schema_field: str = "parameters") -> int:
    """Checks a function and returns the size of its schema in bytes. `path`, `schema_field`: its place in the request and
    the name of its schema there, for errors."""
    if _TOOL_NAME.fullmatch(function.name) is None:
        problem = f"must be 1 to {MAX_TOOL_NAME_LENGTH} letters, digits, _, - or ., got {short_repr(function.name)}"
        raise field_error(f"{path}.name", problem)
    if len(function.description or "") > MAX_DESCRIPTION_LENGTH:
        raise field_error(f"{path}.description", f"at most {MAX_DESCRIPTION_LENGTH} characters")
    schema = function.parameters
    if schema is None:
        return 0
    if schema.get("type", "object") != "object":
        raise field_error(f"{path}.{schema_field}.type", f"must be 'object', got {short_repr(schema['type'])}")
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        raise field_error(f"{path}.{schema_field}", f"is nested more than {MAX_SCHEMA_DEPTH} deep")
    num_bytes = len(msgspec.json.encode(schema))
    if num_bytes > MAX_SCHEMA_BYTES:
        raise field_error(f"{path}.{schema_field}", f"at most {MAX_SCHEMA_BYTES} bytes, got {num_bytes}")
    return num_bytes


def _depth(value: Any) -> int:
    """Returns the levels of nesting. Counts level by level without recursion, so that no depth is too much for the
    check itself."""
    level, depth = [value], 0
    while level and depth <= MAX_SCHEMA_DEPTH:
        depth += 1
        level = [inner for container in level for inner in _children(container) if isinstance(inner, (dict, list))]
    return depth


def _children(value: Any) -> Sequence[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def check_tool_messages(messages: Sequence[ChatMessage]) -> None:
    """Checks the tool fields of messages. Only the assistant calls tools, and only a message with calls may have no
    content."""
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if message.tool_calls:
            if message.role != "assistant":
                raise field_error(f"{path}.tool_calls", f"only the role assistant calls tools, got {message.role}")
            _check_calls(f"{path}.tool_calls", message.tool_calls)
        if message.function_call is not None:
            _check_function_call(path, message)
        elif message.content is None and not message.tool_calls:
            raise field_error(f"{path}.content", "is required: a string or a list of text parts")
        if message.role == "tool" and not message.tool_call_id:
            raise field_error(f"{path}.tool_call_id", "is required with the role tool")
        if message.role == "function" and not message.name:
            raise field_error(f"{path}.name", "is required with the role function")


def _check_function_call(path: str, message: ChatMessage) -> None:
    """Checks the older form of a call, which a message has instead of `tool_calls`."""
    path += ".function_call"
    if message.role != "assistant" or message.tool_calls:
        raise field_error(path, "only for the role assistant, in a message without tool_calls")
    try:
        function = msgspec.convert(message.function_call, MessageToolFunction)
    except msgspec.ValidationError as fault:
        raise validation_error(fault, MessageToolFunction, path) from fault
    parse_arguments(function.arguments, f"{path}.arguments")


def _check_calls(path: str, calls: Sequence[Any]) -> None:
    if len(calls) > MAX_CALLS_PER_MESSAGE:
        raise field_error(path, f"at most {MAX_CALLS_PER_MESSAGE} calls, got {len(calls)}")
    for index, call in enumerate(calls):
        tool_call = _decode_tool_call(f"{path}[{index}]", call)
        if tool_call.type not in TOOL_TYPES:
            raise field_error(f"{path}[{index}].type", f"{_SUPPORTED_TYPES}, got {short_repr(tool_call.type)}")
        if not 1 <= len(tool_call.id) <= MAX_CALL_ID_LENGTH:
            raise field_error(f"{path}[{index}].id", f"must have 1 to {MAX_CALL_ID_LENGTH} characters")
        if getattr(tool_call, tool_call.type) is None:
            raise field_error(f"{path}[{index}].{tool_call.type}", "is required")
        if tool_call.type != CUSTOM and tool_call.function is not None:
            parse_arguments(tool_call.function.arguments, f"{path}[{index}].function.arguments")


def _decode_tool_call(path: str, call: Any) -> MessageToolCall:
    try:
        return msgspec.convert(call, MessageToolCall)
    except msgspec.ValidationError as fault:
        raise validation_error(fault, MessageToolCall, path) from fault


def _for_template(tool: Tool) -> dict[str, Any]:
    """Returns one tool in the form that templates expect. They test for a field by its presence, but some read
    `parameters` without a test."""
    fields = {name: value for name, value in msgspec.to_builtins(tool.definition).items() if value is not None}
    fields.setdefault("parameters", {"type": "object", "properties": {}})
    return {"type": "function", "function": fields}


def _custom_function(custom: CustomDefinition) -> FunctionDefinition:
    texts = [custom.description]
    if custom.grammar is not None:
        kind = "this Lark grammar" if custom.grammar.syntax == "lark" else "this regular expression"
        texts.append(f"The input must match {kind}:\n{custom.grammar.definition}")
    description = "\n\n".join(filter(None, texts))
    return FunctionDefinition(custom.name, description or None, INPUT_SCHEMA)
