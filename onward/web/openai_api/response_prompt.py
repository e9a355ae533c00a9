"""Converts the fields of a request for a response that affect its prompt to the fields of a chat request.

Used by api processes to count tokens, and by routers that tokenize prompts.
"""

from typing import Any

import msgspec

from onward.text.prompt_tokenizer import ChatMessage
from onward.web.openai_api.response_items import items_to_messages
from onward.web.openai_api.response_tools import to_chat_tool_choice, to_chat_tools
from onward.web.openai_api.template_fields import ChatTemplateFields, ReasoningEffort


class PromptReasoning(msgspec.Struct, frozen=True):
    effort: ReasoningEffort | None = None


class ResponsePromptFields(msgspec.Struct, frozen=True, kw_only=True):
    input: str | list[Any]
    """A text, or a list of items: messages, reasoning, calls and their results."""
    instructions: str | None = None
    reasoning: PromptReasoning | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    onward_context: list[Any] | None = None


def prompt_messages(fields: ResponsePromptFields) -> list[ChatMessage]:
    return items_to_messages(fields.onward_context or [], fields.input, fields.instructions)


def prompt_template_fields(fields: ResponsePromptFields) -> ChatTemplateFields:
    return ChatTemplateFields(
        chat_template_kwargs=fields.chat_template_kwargs,
        reasoning_effort=fields.reasoning and fields.reasoning.effort,
        tools=to_chat_tools(fields.tools),
        tool_choice=to_chat_tool_choice(fields.tool_choice),
        parallel_tool_calls=fields.parallel_tool_calls,
    )
