"""Converts the tools of a Messages API request to those of a chat.

Tools that Anthropic defines have no schema in the request, and are dropped: `ignored_tool_fields` names them. An error
names the path of the field in the client's request. Used by api processes, and by routers that tokenize prompts.
"""

import re
from typing import Any

import msgspec

from onward.web.json_body import field_error, short_repr
from onward.web.openai_api.tools import (
    FunctionDefinition,
    NamedToolChoice,
    NamedToolFunction,
    Tool,
    ToolChoice,
    check_function,
)

CUSTOM = "custom"
_DEFERRED = "defer_loading"
_ANTHROPIC_TOOL = re.compile(
    r"(advisor|bash|code_execution|memory|text_editor|web_fetch|web_search)_\d{8}"
    r"|(browser_toolset|computer|computer_toolset)_\d{8}"
    r"|tool_search_tool_(bm25|regex)(_\d{8})?"
    r"|mcp_toolset"
)


class MessageToolChoice(msgspec.Struct, frozen=True):
    type: str
    """`auto`, `any`, `tool` or `none`."""
    name: str | None = None
    """With `tool`: the name of the tool."""
    disable_parallel_tool_use: bool | None = None


def to_chat_tools(tools: list[Any] | None) -> list[Tool] | None:
    if tools is None:
        return None
    return [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools) if not _is_dropped(tool)]


def ignored_tool_fields(tools: list[Any] | None) -> tuple[str, ...]:
    """Returns the types of dropped tools, and `defer_loading` if a tool has it, each with `tools.` before it."""
    dropped = {tool["type"] for tool in tools or [] if _is_dropped(tool)}
    is_deferred = any(tool.get(_DEFERRED) for tool in tools or [] if not _is_dropped(tool))
    # A deferred tool is in the prompt like every other one.
    return tuple(f"tools.{name}" for name in sorted(dropped | ({_DEFERRED} if is_deferred else set())))


def _is_dropped(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and _ANTHROPIC_TOOL.fullmatch(kind) is not None


def _chat_tool(tool: Any, path: str) -> Tool:
    """Converts one tool. Fields about caching, streaming and examples are ignored: they do not change what the model
    may call."""
    if not isinstance(tool, dict):
        raise field_error(path, f"must be a tool, got {short_repr(tool)}")
    if tool.get("type") not in (None, CUSTOM):
        problem = "only tools that the client runs (type custom) are supported"
        raise field_error(f"{path}.type", f"{problem}, got {short_repr(tool['type'])}")
    name, description, schema = tool.get("name"), tool.get("description"), tool.get("input_schema")
    if not isinstance(name, str):
        raise field_error(f"{path}.name", "is required: a string")
    if not isinstance(description, str | None):
        raise field_error(f"{path}.description", "must be a string")
    if not isinstance(schema, dict):
        raise field_error(f"{path}.input_schema", "is required: a JSON schema")
    if not isinstance(tool.get("strict"), bool | None):
        raise field_error(f"{path}.strict", "must be true or false")
    if not isinstance(tool.get(_DEFERRED), bool | None):
        raise field_error(f"{path}.{_DEFERRED}", "must be true or false")
    function = FunctionDefinition(name, description, schema, tool.get("strict"))
    check_function(path, function, "input_schema")
    return Tool("function", function)


def to_chat_tool_choice(choice: MessageToolChoice | None) -> ToolChoice | None:
    if choice is None:
        return None
    match choice.type:
        case "auto" | "none":
            return choice.type
        case "any":
            return "required"
        case "tool":
            if choice.name is None:
                raise field_error("tool_choice.name", "is required with the type tool")
            return NamedToolChoice("function", NamedToolFunction(choice.name))
        case other:
            raise field_error("tool_choice.type", f"must be auto, any, tool or none, got {short_repr(other)}")
