"""Converts the fields of a Messages API request that affect its prompt to the fields of a chat request.

Used by api processes, and by routers that tokenize prompts.
"""

from typing import Any, cast

import msgspec

from onward.text.prompt_tokenizer import ChatMessage
from onward.web.anthropic_api.content_blocks import check_last_message, continues_last_message, to_chat_messages
from onward.web.anthropic_api.message_tools import MessageToolChoice, to_chat_tool_choice, to_chat_tools
from onward.web.json_body import field_error, short_repr
from onward.web.openai_api.shared_fields import SharedFields
from onward.web.openai_api.template_fields import ChatTemplateFields, ReasoningEffort

OMITTED = "omitted"
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
"""Maps efforts of the Messages API to the names that templates know."""


class ThinkingConfig(msgspec.Struct, frozen=True):
    type: str
    """`enabled`, `disabled` or `adaptive`."""
    budget_tokens: int | None = None
    """With `enabled`: maximum number of thinking tokens."""
    display: str | None = None
    """`summarized` or not given: thinking is returned as the model wrote it. `omitted`: its blocks have no text."""


class OutputConfig(msgspec.Struct, frozen=True):
    effort: str | None = None
    format: dict[str, Any] | None = None
    """`{"type": "json_schema", "schema": …}`: the answer follows this schema."""


class MessagePromptFields(SharedFields, frozen=True, kw_only=True):
    model: str | None = None
    """Default: the model that is served, if it is the only one."""
    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def chat_messages(fields: MessagePromptFields) -> list[ChatMessage]:
    chat = to_chat_messages(fields.system, fields.messages)
    check_last_message(fields.messages)
    return chat


def chat_template_fields(fields: MessagePromptFields) -> ChatTemplateFields:
    choice = fields.tool_choice
    kwargs = _thinking_variables(fields.thinking) | (fields.chat_template_kwargs or {})
    return ChatTemplateFields(
        continue_final_message=continues_last_message(fields.messages) or None,
        chat_template_kwargs=kwargs or None,
        reasoning_effort=_reasoning_effort(fields.output_config),
        tools=to_chat_tools(fields.tools),
        tool_choice=to_chat_tool_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
    )


def _thinking_variables(thinking: ThinkingConfig | None) -> dict[str, Any]:
    """Returns the template variables for `thinking`. Without it there are none, so the template's default applies."""
    if thinking is None:
        return {}
    if thinking.type not in ("enabled", "disabled", "adaptive"):
        raise field_error("thinking.type", f"must be enabled, disabled or adaptive, got {short_repr(thinking.type)}")
    if thinking.type != "enabled" and thinking.budget_tokens is not None:
        raise field_error("thinking.budget_tokens", "only allowed with the type enabled")
    if thinking.display not in (None, "summarized", OMITTED):
        problem = f"must be summarized or {OMITTED}, got {short_repr(thinking.display)}"
        raise field_error("thinking.display", problem)
    # Two names are in use for the same switch.
    return dict.fromkeys(("enable_thinking", "thinking"), thinking.type != "disabled")


def _reasoning_effort(config: OutputConfig | None) -> ReasoningEffort | None:
    if config is None or config.effort is None:
        return None
    if config.effort not in _EFFORTS:
        raise field_error(
            "output_config.effort", f"must be one of {', '.join(_EFFORTS)}, got {short_repr(config.effort)}"
        )
    return cast(ReasoningEffort, _EFFORTS[config.effort])
