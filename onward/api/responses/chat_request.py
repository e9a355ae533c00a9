"""A response's request as the chat that it is, with what only responses have beside it.

Everything behind this sees a chat: prompt, sampling, grammar, tools and thinking are made as for one. Complaints are turned
back into the words of the client's fields by `with_response_field_names`.
"""

import re
from typing import Any, ClassVar, cast

import msgspec

from onward.api.requests.decoding import check_model
from onward.api.requests.schemas import ChatCompletionRequest, ValidationContext
from onward.api.requests.validation import check_chat, check_range
from onward.api.responses.create_request import CreateResponseRequest, ExtensionFields, UnsupportedField, check_fields
from onward.errors import ClientError
from onward.web.json_body import decode, decode_fields, field_error, short_repr
from onward.web.openai_api.response_items import items_to_messages, to_chat_tool_choice, to_chat_tools
from onward.web.openai_api.template_fields import EFFORTS, ReasoningEffort

LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512

_decoder = msgspec.json.Decoder(CreateResponseRequest)
_FORMATS = ("text", "json_object", "json_schema")
_FORMAT_FIELDS = frozenset({"type", "name", "schema", "strict", "description"})
# Of a chat's fields, in the order in which they are looked for.
_ITS_WORDS = (
    (re.compile(r"^tools\[(\d+)\]\.function\b"), r"tools[\1]"),
    (re.compile(r"^tool_choice\.function\b"), "tool_choice"),
    (re.compile(r"^response_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"^max_(completion_)?tokens$"), "max_output_tokens"),
    (re.compile(r"^reasoning_effort$"), "reasoning.effort"),
    (re.compile(r"^messages\b.*"), "input"),
)


class ResponseChatRequest(ChatCompletionRequest, frozen=True, kw_only=True):
    needs_full_output: ClassVar[bool] = True
    body: CreateResponseRequest
    """In the client's own form."""

    @property
    def is_stored(self) -> bool:
        return self.body.is_stored

    @property
    def is_background(self) -> bool:
        return bool(self.body.background)


def decode_response(body: bytes, context: ValidationContext) -> ResponseChatRequest:
    check_fields(decode_fields(body), body)
    create_request = decode(body, _decoder)
    check_model(create_request.model, context)
    _check(create_request)
    request = _to_chat_request(create_request)
    try:
        check_chat(request, context)
    except ClientError as error:
        raise with_response_field_names(error) from error
    return request


def with_response_field_names(error: ClientError) -> ClientError:
    """The same complaint about the field of a response that a chat's field was made from."""
    param = error.param
    if param is None or isinstance(error, UnsupportedField):
        return error
    for pattern, replacement in _ITS_WORDS:
        if pattern.search(param):
            new_param = pattern.sub(replacement, param)
            message = (
                new_param + error.message.removeprefix(param) if error.message.startswith(param) else error.message
            )
            return type(error)(message, code=error.code, param=new_param)
    return error


def _to_chat_request(create_request: CreateResponseRequest) -> ResponseChatRequest:
    extension_fields = {name: getattr(create_request, name) for name in ExtensionFields.__struct_fields__}
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
        if item != LOGPROBS:
            raise field_error(f"include[{index}]", f"only {LOGPROBS!r} is supported, got {short_repr(item)}")
    check_range("top_logprobs", create_request.top_logprobs)
    if create_request.top_logprobs and LOGPROBS not in (create_request.include or []):
        raise field_error("top_logprobs", f"only allowed with include: [{LOGPROBS!r}]")
    if create_request.truncation == "auto":
        raise field_error("truncation", "only 'disabled' is supported: nothing of the input is left out")
    if create_request.background and not create_request.is_stored:
        raise field_error("background", "only allowed with store: true, or nobody could ask for the answer")
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
    for name in ("summary", "generate_summary", "context", "mode"):
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
    if create_request.text.verbosity not in (None, "medium"):
        raise field_error("text.verbosity", "only 'medium' is supported")
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
