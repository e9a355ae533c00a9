"""Converts a request to the Responses API to a chat request, with the fields that only responses have.

All later code handles a chat request: prompt, sampling, grammar, tools and thinking are the same.
`with_response_field_names` renames the fields in errors to those of the client's request.
"""

import re
from typing import Any, ClassVar, cast

import msgspec

from onward.api.requests.decoding import check_model
from onward.api.requests.field_renaming import with_renamed_field
from onward.api.requests.schemas import ChatCompletionRequest, ValidationContext
from onward.api.requests.validation import check_chat, check_range
from onward.api.responses.create_request import (
    EXTENSION_FIELDS,
    CreateResponseRequest,
    UnsupportedField,
    check_fields,
)
from onward.errors import ClientError
from onward.web.json_body import decode, decode_fields, field_error, short_repr
from onward.web.openai_api.response_items import items_to_messages
from onward.web.openai_api.response_object import DEFAULT_VERBOSITY
from onward.web.openai_api.response_tools import ignored_tool_fields, to_chat_tool_choice, to_chat_tools
from onward.web.openai_api.template_fields import EFFORTS, ReasoningEffort

LOGPROBS, ENCRYPTED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
INCLUDES = (LOGPROBS, ENCRYPTED_REASONING)
"""The second one has no effect: reasoning items have their text, which a client can send back, so none is encrypted."""
SUMMARIES = ("auto", "concise", "detailed")
"""Accepted without effect: reasoning items have the reasoning itself, and no summary."""
VERBOSITIES = ("low", DEFAULT_VERBOSITY, "high")
MAX_METADATA = 16
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512

_decoder = msgspec.json.Decoder(CreateResponseRequest)
_FORMATS = ("text", "json_object", "json_schema")
_FORMAT_FIELDS = frozenset({"type", "name", "schema", "strict", "description"})
# Renamings of a chat's fields, in the order in which they are tried.
_ITS_WORDS = (
    (re.compile(r"^tools\[(\d+)\]\.function\b"), r"tools[\1]"),
    (re.compile(r"^tool_choice\.allowed_tools\.tools\[(\d+)\]\.(?:function|custom)\b"), r"tool_choice.tools[\1]"),
    (re.compile(r"^tool_choice\.(function|custom|allowed_tools)\b"), "tool_choice"),
    (re.compile(r"^response_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"^max_(completion_)?tokens$"), "max_output_tokens"),
    (re.compile(r"^reasoning_effort$"), "reasoning.effort"),
    (re.compile(r"^messages\b.*"), "input"),
)


class ResponseChatRequest(ChatCompletionRequest, frozen=True, kw_only=True):
    needs_full_output: ClassVar[bool] = True
    body: CreateResponseRequest
    """The request as the client has sent it."""

    @property
    def is_stored(self) -> bool:
        return self.body.is_stored

    @property
    def is_background(self) -> bool:
        return bool(self.body.background)


def decode_response(body: bytes, context: ValidationContext) -> tuple[ResponseChatRequest, tuple[str, ...]]:
    """Returns the decoded and checked request, and the names of fields and tools without effect."""
    check_fields(decode_fields(body), body)
    create_request = decode(body, _decoder)
    check_model(create_request.model, context)
    _check(create_request)
    request = _to_chat_request(create_request)
    try:
        check_chat(request, context)
    except ClientError as error:
        raise with_response_field_names(error) from error
    return request, _ignored_fields(create_request)


def _ignored_fields(create_request: CreateResponseRequest) -> tuple[str, ...]:
    verbosity = None if create_request.text is None else create_request.text.verbosity
    names = () if verbosity in (None, DEFAULT_VERBOSITY) else ("text.verbosity",)
    return (*names, *ignored_tool_fields(create_request.tools))


def with_response_field_names(error: ClientError) -> ClientError:
    """Returns the error with a chat's field renamed to the field of the Responses API that it was made from."""
    return error if isinstance(error, UnsupportedField) else with_renamed_field(error, _ITS_WORDS)


def _to_chat_request(create_request: CreateResponseRequest) -> ResponseChatRequest:
    extension_fields = {name: getattr(create_request, name) for name in EXTENSION_FIELDS}
    return ResponseChatRequest(
        body=create_request,
        model=create_request.model,
        messages=items_to_messages(create_request.context, create_request.input, create_request.instructions),
        stream=create_request.stream,
        max_completion_tokens=create_request.max_output_tokens,
        temperature=create_request.temperature,
        top_p=create_request.top_p,
        logprobs=LOGPROBS in (create_request.include or []),
        top_logprobs=create_request.top_logprobs,
        tools=to_chat_tools(create_request.tools),
        tool_choice=to_chat_tool_choice(create_request.tool_choice),
        parallel_tool_calls=create_request.parallel_tool_calls,
        response_format=_response_format(create_request),
        reasoning_effort=cast(ReasoningEffort | None, create_request.reasoning and create_request.reasoning.effort),
        **extension_fields,
    )


def _check(create_request: CreateResponseRequest) -> None:
    for index, item in enumerate(create_request.include or []):
        if item not in INCLUDES:
            raise field_error(f"include[{index}]", f"must be one of {', '.join(INCLUDES)}, got {short_repr(item)}")
    check_range("top_logprobs", create_request.top_logprobs)
    if create_request.top_logprobs and LOGPROBS not in (create_request.include or []):
        raise field_error("top_logprobs", f"only allowed with include: [{LOGPROBS!r}]")
    if create_request.max_tool_calls is not None and create_request.max_tool_calls < 1:
        raise field_error("max_tool_calls", f"must be at least 1, got {create_request.max_tool_calls}")
    if create_request.background and not create_request.is_stored:
        raise field_error("background", "only allowed with store: true; without it the response could not be read")
    if create_request.stream_options is not None and not create_request.stream:
        raise field_error("stream_options", "only allowed with stream: true")
    _check_reasoning(create_request)
    _check_metadata(create_request.metadata or {})


def _check_reasoning(create_request: CreateResponseRequest) -> None:
    reasoning = create_request.reasoning
    if reasoning is None:
        return
    if reasoning.effort is not None and reasoning.effort not in EFFORTS:
        raise field_error(
            "reasoning.effort", f"must be one of {', '.join(EFFORTS)}, got {short_repr(reasoning.effort)}"
        )
    if reasoning.summary not in (None, *SUMMARIES):
        raise field_error(
            "reasoning.summary", f"must be one of {', '.join(SUMMARIES)}, got {short_repr(reasoning.summary)}"
        )
    for name in ("generate_summary", "context", "mode"):
        if getattr(reasoning, name) is not None:
            raise field_error(
                f"reasoning.{name}", "not supported by this server; the output has the thoughts themselves"
            )


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise field_error("metadata", f"at most {MAX_METADATA} keys, got {len(metadata)}")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY:
            raise field_error("metadata", f"keys of at most {MAX_METADATA_KEY} characters, got {short_repr(key)}")
        if len(value) > MAX_METADATA_VALUE:
            raise field_error(f"metadata.{key}", f"at most {MAX_METADATA_VALUE} characters, got {len(value)}")


def _response_format(create_request: CreateResponseRequest) -> dict[str, Any] | None:
    if create_request.text is None:
        return None
    if create_request.text.verbosity not in (None, *VERBOSITIES):
        problem = f"must be one of {', '.join(VERBOSITIES)}, got {short_repr(create_request.text.verbosity)}"
        raise field_error("text.verbosity", problem)
    text_format = create_request.text.format
    if text_format is None:
        return None
    kind = text_format.get("type")
    if kind not in _FORMATS:
        raise field_error("text.format.type", f"must be one of {', '.join(_FORMATS)}, got {short_repr(kind)}")
    for name in text_format.keys() - _FORMAT_FIELDS:
        raise field_error(f"text.format.{name}", "is not known")
    if kind != "json_schema":
        return {"type": kind}
    return {"type": kind, "json_schema": {name: value for name, value in text_format.items() if name != "type"}}
