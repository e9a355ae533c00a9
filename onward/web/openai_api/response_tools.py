"""Converts the tools of a response to those of a chat, and the names of called tools back.

Tools that OpenAI's servers run are dropped: `ignored_tool_fields` names them. A chat has no namespaces, so the name of a
tool in a namespace is joined with it. An error names the path of the field. Used by api processes, and by routers that
tokenize prompts.
"""

from collections.abc import Iterator
from typing import Any

from onward.web.json_body import field_error, short_repr
from onward.web.openai_api.tools import (
    CUSTOM,
    MAX_TOOL_NAME_LENGTH,
    MAX_TOOLS,
    TOOL_TYPES,
    AllowedTool,
    AllowedTools,
    CustomDefinition,
    CustomFormat,
    CustomGrammar,
    FunctionDefinition,
    NamedToolChoice,
    NamedToolFunction,
    Tool,
    ToolChoice,
    check_custom,
    check_function,
)

NAMESPACE = "namespace"
HOSTED_TYPES = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
"""Tools that OpenAI's servers run, or that only its models are trained to call. They are not in the prompt."""
_JOINER = "__"
_FUNCTION_FIELDS = frozenset({"type", "name", "description", "parameters", "strict"})
_CUSTOM_FIELDS = frozenset({"type", "name", "description", "format"})
_REPORTED_FIELDS = frozenset({"allowed_callers", "defer_loading", "output_schema"})
"""Fields without effect here: every tool is in the prompt, and only the model calls it."""
_NAMESPACE_FIELDS = frozenset({"type", "name", "description", "tools"})


def flat_name(namespace: str | None, name: str) -> str:
    """Returns a tool's name in the prompt."""
    if namespace is None:
        return name
    return namespace + ("" if namespace.endswith(_JOINER) else _JOINER) + name


def namespaced_names(tools: list[Any] | None) -> dict[str, tuple[str, str]]:
    """Returns the namespace and the name of each tool that is in a namespace, by its name in the prompt. The tools are
    checked."""
    return {
        flat_name(tool["name"], inner["name"]): (tool["name"], inner["name"])
        for tool in tools or []
        if tool["type"] == NAMESPACE
        for inner in tool["tools"]
    }


def supported_tools(tools: list[Any] | None) -> list[Any]:
    """Returns the tools without the dropped ones. The others may be invalid."""
    return [tool for tool in tools or [] if not _is_hosted(tool)]


def ignored_tool_fields(tools: list[Any] | None) -> tuple[str, ...]:
    """Returns the types of dropped tools, and the names of fields without effect, each with `tools.` before it."""
    names = {tool["type"] for tool in tools or [] if _is_hosted(tool)}
    for _, tool in _flat_tools(supported_tools(tools)):
        names |= {name for name in tool.keys() & _REPORTED_FIELDS if tool[name] not in (None, False)}
    return tuple(f"tools.{name}" for name in sorted(names))


def to_chat_tools(tools: list[Any] | None) -> list[Tool] | None:
    if tools is None:
        return None
    chat_tools: list[Tool] = []
    names = set[str]()
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise field_error(path, f"must be a tool, got {short_repr(tool)}")
        if _is_hosted(tool):
            continue
        for inner_path, chat_tool in _chat_tools(tool, path):
            name = chat_tool.definition.name
            if name in names:
                raise field_error(f"{inner_path}.name", f"{short_repr(name)} is given twice")
            names.add(name)
            chat_tools.append(chat_tool)
    return chat_tools


def to_chat_tool_choice(tool_choice: str | dict[str, Any] | None) -> ToolChoice | None:
    if not isinstance(tool_choice, dict):
        return tool_choice
    if tool_choice.get("type") == "allowed_tools":
        return NamedToolChoice("allowed_tools", allowed_tools=_allowed_tools(tool_choice))
    kind = tool_choice.get("type")
    if kind not in TOOL_TYPES:
        problem = f"only 'function', 'custom' and 'allowed_tools' are supported, got {short_repr(kind)}"
        raise field_error("tool_choice.type", problem)
    named = NamedToolFunction(_chosen_name(tool_choice, "tool_choice"))
    return NamedToolChoice(kind, custom=named) if kind == CUSTOM else NamedToolChoice(kind, named)


def _is_hosted(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind in HOSTED_TYPES


def _flat_tools(tools: list[Any]) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yields each tool with its namespace. Expects checked tools."""
    for tool in tools:
        if tool["type"] == NAMESPACE:
            yield from ((tool["name"], inner) for inner in tool["tools"])
        else:
            yield None, tool


def _chat_tools(tool: dict[str, Any], path: str) -> Iterator[tuple[str, Tool]]:
    """Yields the chat tools of one tool: one, or those of a namespace. Each has its path in the request."""
    if tool.get("type") != NAMESPACE:
        yield path, _chat_tool(tool, path)
        return
    _check_field_names(tool, path, _NAMESPACE_FIELDS)
    namespace, description = _name(tool.get("name"), f"{path}.name"), _optional_text(tool, "description", path)
    inner_tools = tool.get("tools")
    if not isinstance(inner_tools, list) or not 1 <= len(inner_tools) <= MAX_TOOLS:
        raise field_error(f"{path}.tools", f"is required: a list of 1 to {MAX_TOOLS} tools")
    for index, inner in enumerate(inner_tools):
        inner_path = f"{path}.tools[{index}]"
        if not isinstance(inner, dict):
            raise field_error(inner_path, f"must be a tool, got {short_repr(inner)}")
        # A prompt has no place for a namespace, so the first of its tools has its description.
        yield inner_path, _chat_tool(inner, inner_path, namespace, description if index == 0 else None)


def _chat_tool(
    tool: dict[str, Any], path: str, namespace: str | None = None, namespace_description: str | None = None
) -> Tool:
    kind = tool.get("type")
    if kind not in TOOL_TYPES:
        raise field_error(f"{path}.type", f"only 'function' and 'custom' are supported, got {short_repr(kind)}")
    _check_field_names(tool, path, (_CUSTOM_FIELDS if kind == CUSTOM else _FUNCTION_FIELDS) | _REPORTED_FIELDS)
    name = flat_name(namespace, _name(tool.get("name"), f"{path}.name"))
    description = _optional_text(tool, "description", path)
    if namespace_description:
        description = "\n\n".join(filter(None, (f"{namespace}: {namespace_description}", description)))
    if kind == CUSTOM:
        custom = CustomDefinition(name, description, _custom_format(tool.get("format"), f"{path}.format"))
        check_custom(path, custom, "format")
        return Tool(CUSTOM, custom=custom)
    parameters, strict = tool.get("parameters"), tool.get("strict")
    if not isinstance(parameters, dict | None):
        raise field_error(f"{path}.parameters", "must be a JSON schema")
    if not isinstance(strict, bool | None):
        raise field_error(f"{path}.strict", "must be true or false")
    function = FunctionDefinition(name, description, parameters, strict)
    check_function(path, function)
    return Tool("function", function)


def _custom_format(value: Any, path: str) -> CustomFormat | None:
    """Converts a format, which has the fields of `grammar` at the top level here."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise field_error(path, f"must be a format, got {short_repr(value)}")
    texts = {name: value.get(name, "") for name in ("type", "syntax", "definition")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise field_error(f"{path}.{name}", f"must be a string, got {short_repr(text)}")
    has_grammar = texts["type"] == "grammar"
    return CustomFormat(texts["type"], CustomGrammar(texts["definition"], texts["syntax"]) if has_grammar else None)


def _check_field_names(tool: dict[str, Any], path: str, known: frozenset[str]) -> None:
    for name in tool.keys() - known:
        if tool[name] not in (None, False):
            raise field_error(f"{path}.{name}", "not supported by this server")


def _optional_text(tool: dict[str, Any], name: str, path: str) -> str | None:
    if not isinstance(tool.get(name), str | None):
        raise field_error(f"{path}.{name}", "must be a string")
    return tool.get(name)


def _name(value: Any, path: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_TOOL_NAME_LENGTH:
        raise field_error(path, f"is required: a string of 1 to {MAX_TOOL_NAME_LENGTH} characters")
    return value


def _chosen_name(choice: dict[str, Any], path: str) -> str:
    """Returns the name in the prompt of the tool that a choice names, with or without its namespace."""
    namespace = None if choice.get(NAMESPACE) is None else _name(choice[NAMESPACE], f"{path}.{NAMESPACE}")
    return flat_name(namespace, _name(choice.get("name"), f"{path}.name"))


def _allowed_tools(tool_choice: dict[str, Any]) -> AllowedTools:
    """Converts allowed tools, which have the fields of `allowed_tools` at the top level here."""
    tools = tool_choice.get("tools")
    if not isinstance(tools, list):
        raise field_error("tool_choice.tools", "is required: a list of tools")
    allowed = [_allowed_tool(tool, f"tool_choice.tools[{index}]") for index, tool in enumerate(tools)]
    return AllowedTools(_name(tool_choice.get("mode"), "tool_choice.mode"), allowed)


def _allowed_tool(tool: Any, path: str) -> AllowedTool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in TOOL_TYPES:
        raise field_error(f"{path}.type", f"only 'function' and 'custom' are supported, got {short_repr(kind)}")
    named = NamedToolFunction(_chosen_name(tool, path))
    return AllowedTool(kind, custom=named) if kind == CUSTOM else AllowedTool(kind, named)
