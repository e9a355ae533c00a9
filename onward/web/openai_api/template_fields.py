"""The fields of a chat request that affect its template, and the template options that they result in."""

from typing import Any, Literal, Protocol

import msgspec

from onward.text.prompt_tokenizer import TemplateOptions
from onward.web.json_body import field_error
from onward.web.openai_api.legacy_functions import FunctionChoice, ToolFields, resolve_tool_fields
from onward.web.openai_api.tools import FunctionDefinition, Tool, ToolChoice

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
NO_THINKING = "none"
EFFORTS = (NO_THINKING, "minimal", "low", "medium", "high", "xhigh")


class TemplateFields(ToolFields, Protocol):
    """The template fields of any request with messages."""

    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...
    @property
    def reasoning_effort(self) -> str | None: ...


class ChatTemplateFields(msgspec.Struct, frozen=True, kw_only=True):
    """The template fields as a struct, for requests with few other fields."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionDefinition] | None = None
    function_call: FunctionChoice | None = None


def template_options(fields: TemplateFields) -> TemplateOptions:
    resolved = resolve_tool_fields(fields)
    return TemplateOptions(
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        variables=template_variables(fields.chat_template_kwargs, fields.reasoning_effort),
        tools=resolved.for_template(),
    )


def template_variables(kwargs: dict[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Returns the template variables for `reasoning_effort` and `chat_template_kwargs`. The latter take precedence."""
    if effort is not None and effort not in EFFORTS:
        raise field_error("reasoning_effort", f"must be one of {', '.join(EFFORTS)}, got {effort!r:.80}")
    variables: dict[str, Any] = {} if effort in (None, NO_THINKING) else {"reasoning_effort": effort}
    if effort == NO_THINKING:
        # Two names are in use for the same switch.
        variables |= {"enable_thinking": False, "thinking": False}
    return variables | (kwargs or {})
