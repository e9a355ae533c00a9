"""Converts a request to the Messages API to a chat request.

All later code handles a chat request: prompt, sampling, grammar, tools and thinking are the same. Errors name the fields
of the client's request.
"""

import re
from typing import Any, ClassVar

import msgspec

from onward.api.messages.create_request import (
    CountTokensRequest,
    CreateMessageRequest,
    check_refused_fields,
    output_schema,
    supported_fields,
)
from onward.api.requests.decoding import check_model
from onward.api.requests.field_renaming import Renaming, with_renamed_field
from onward.api.requests.schemas import ChatCompletionRequest, ValidationContext
from onward.api.requests.unsupported_fields import check_field_names
from onward.api.requests.validation import check_chat, check_messages
from onward.errors import ClientError
from onward.text.prompt_tokenizer import ChatMessage
from onward.web.anthropic_api.content_blocks import ignored_blocks
from onward.web.anthropic_api.message_prompt import (
    OMITTED,
    MessagePromptFields,
    chat_messages,
    chat_template_fields,
)
from onward.web.anthropic_api.message_tools import ignored_tool_fields
from onward.web.json_body import decode, decode_fields, field_error
from onward.web.openai_api.shared_fields import SharedFields
from onward.web.openai_api.template_fields import ChatTemplateFields

_messages = msgspec.json.Decoder(CreateMessageRequest)
_counts = msgspec.json.Decoder(CountTokensRequest)
_RENAMINGS: tuple[Renaming, ...] = (
    (re.compile(r"^tools\[(\d+)\]\.function\.parameters\b"), r"tools[\1].input_schema"),
    (re.compile(r"^tools\[(\d+)\]\.function\b"), r"tools[\1]"),
    (re.compile(r"^tool_choice\.function\b"), "tool_choice"),
    (re.compile(r"^response_format\.json_schema\b"), "output_config.format"),
    (re.compile(r"^response_format\b"), "output_config.format"),
    (re.compile(r"^thinking_budget$"), "thinking.budget_tokens"),
    (re.compile(r"^reasoning_effort$"), "output_config.effort"),
    (re.compile(r"^continue_final_message$"), "messages"),
)
_CHECK_RENAMINGS: tuple[Renaming, ...] = (*_RENAMINGS, (re.compile(r"^messages\b.*"), "messages"))
"""Renamings for errors of the chat checks. The chat's messages are not the client's, so only `messages` is named."""
_STOP_SEQUENCES: Renaming = (re.compile(r"^stop\b"), "stop_sequences")


class MessageChatRequest(ChatCompletionRequest, frozen=True, kw_only=True):
    needs_full_output: ClassVar[bool] = True
    shows_thinking: bool = True
    """Whether thinking blocks have their text."""


def decode_message(body: bytes, context: ValidationContext) -> tuple[MessageChatRequest, tuple[str, ...]]:
    """Returns the decoded and checked request, and the names of its unknown fields, and
    of tools and blocks that the model does not see."""
    fields = decode_fields(body)
    check_refused_fields(fields, body)
    unknown = check_field_names(fields, body, supported_fields(CreateMessageRequest))
    message = decode(body, _messages)
    check_model(message.model, context)
    if message.stop is not None and message.stop_sequences is not None:
        raise field_error("stop", "stands instead of stop_sequences, so only one of the two can be given")
    for index, reason in enumerate(message.generated_finish_reasons or []):
        if reason is not None:
            raise field_error(
                f"generated_finish_reasons[{index}]", "must be null: a message that has ended is complete"
            )
    request = _to_chat_request(message)
    try:
        check_chat(request, context)
    except ClientError as error:
        stop = (_STOP_SEQUENCES,) if message.stop_sequences is not None else ()
        raise with_renamed_field(error, (*_CHECK_RENAMINGS, *stop)) from error
    return request, (*unknown, *_ignored(message))


def _ignored(message: MessagePromptFields) -> tuple[str, ...]:
    return (*ignored_tool_fields(message.tools), *ignored_blocks(message.messages))


def decode_count(
    body: bytes, context: ValidationContext
) -> tuple[list[ChatMessage], ChatTemplateFields, tuple[str, ...]]:
    """Returns the messages and template fields of the prompt whose tokens are to be counted, and the unknown fields."""
    fields = decode_fields(body)
    check_refused_fields(fields, body)
    unknown = check_field_names(fields, body, supported_fields(CreateMessageRequest))
    request = decode(body, _counts)
    check_model(request.model, context)
    messages, template_fields = chat_messages(request), chat_template_fields(request)
    try:
        check_messages(messages)
    except ClientError as error:
        raise with_renamed_field(error, _CHECK_RENAMINGS) from error
    return messages, template_fields, (*unknown, *_ignored(request))


def with_message_field_names(error: ClientError) -> ClientError:
    """Returns the error with a chat's field renamed to the field of the Messages API. Other errors stay as they are."""
    return with_renamed_field(error, _RENAMINGS)


def _to_chat_request(message: CreateMessageRequest) -> MessageChatRequest:
    shared: dict[str, Any] = {name: getattr(message, name) for name in SharedFields.__struct_fields__}
    template_fields = chat_template_fields(message)
    if message.stop_sequences is not None:
        shared["stop"] = message.stop_sequences
    return MessageChatRequest(
        model=message.model,
        messages=chat_messages(message),
        stream=message.stream,
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        response_format=output_schema(message),
        shows_thinking=message.thinking is None or message.thinking.display != OMITTED,
        thinking_budget=None if message.thinking is None else message.thinking.budget_tokens,
        generated_token_ids=message.generated_token_ids,
        completion_token_ids=message.completion_token_ids,
        generated_finish_reasons=message.generated_finish_reasons,
        **shared,
        **{name: getattr(template_fields, name) for name in ChatTemplateFields.__struct_fields__},
    )
