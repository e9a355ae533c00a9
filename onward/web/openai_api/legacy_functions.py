"""OpenAI's older fields for tools, `functions` and `function_call`, as the tools that they mean.

Used by api processes, and by routers that tokenize prompts.
"""

import re
from dataclasses import replace
from typing import Protocol

from onward.errors import InvalidRequest
from onward.web.json_body import field_error, short_repr
from onward.web.openai_api.tools import (
    FunctionDefinition,
    NamedToolChoice,
    NamedToolFunction,
    ResolvedTools,
    Tool,
    ToolChoice,
    resolve_tools,
)

FunctionChoice = str | NamedToolFunction
_RENAMINGS = (
    (re.compile(r"^tools\[(\d+)\]\.function"), r"functions[\1]"),
    (re.compile(r"^tools"), "functions"),
    (re.compile(r"^tool_choice(\.function)?"), "function_call"),
)


class ToolFields(Protocol):
    @property
    def tools(self) -> list[Tool] | None: ...
    @property
    def tool_choice(self) -> ToolChoice | None: ...
    @property
    def parallel_tool_calls(self) -> bool | None: ...
    @property
    def functions(self) -> list[FunctionDefinition] | None: ...
    @property
    def function_call(self) -> FunctionChoice | None: ...


def resolve_tool_fields(fields: ToolFields) -> ResolvedTools:
    """Checks and resolves the fields about tools, in their present or their older form."""
    if not fields.functions and fields.function_call in (None, "none", "auto"):
        return resolve_tools(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
    for name in ("tools", "tool_choice"):
        if getattr(fields, name):
            raise field_error(name, "not allowed with functions or function_call, which are older names for the same")
    tools = [Tool("function", function) for function in fields.functions or ()]
    try:
        resolved = resolve_tools(tools, _tool_choice(fields.function_call), False)
    except InvalidRequest as error:
        raise _with_older_field(error) from error
    return replace(resolved, is_legacy=True) if resolved.tools else resolved


def _tool_choice(choice: FunctionChoice | None) -> ToolChoice:
    if isinstance(choice, NamedToolFunction):
        return NamedToolChoice("function", choice)
    if choice not in (None, "none", "auto"):
        raise field_error("tool_choice", f"must be none, auto or an object with a name, got {short_repr(choice)}")
    return choice or "auto"


def _with_older_field(error: InvalidRequest) -> InvalidRequest:
    """Returns the error with the older name of its field."""
    param = error.param or ""
    renamed = param
    for pattern, replacement in _RENAMINGS:
        renamed = pattern.sub(replacement, renamed)
    return InvalidRequest(renamed + error.message.removeprefix(param), code=error.code, param=renamed)
