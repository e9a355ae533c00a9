"""A response's request as the chat that it is, with what only responses have beside it.

Everything behind this sees a chat: prompt, sampling, grammar, tools and thinking are made as for one. Complaints are turned
back into the words of the client's fields by `in_its_words`.
"""

import re
from typing import Any, cast

import msgspec

from onward.api.openai import check_model
from onward.api.request_checks import MAX_LOGPROBS, check_chat, check_number
from onward.api.requests import Bounds, ChatRequest
from onward.api.responses.body import NotSupported, OwnFields, ResponseBody, check_fields
from onward.errors import ClientError
from onward.web.body import decode, decode_fields, short, wrong
from onward.web.response_items import messages_of, tool_choice_of, tools_of
from onward.web.template_fields import EFFORTS, ReasoningEffort

LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512

_decoder = msgspec.json.Decoder(ResponseBody)
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


class ResponseRequest(ChatRequest, frozen=True, kw_only=True):
    said: ResponseBody
    """In the client's own form."""

    @property
    def tells_all(self) -> bool:
        return True

    @property
    def is_stored(self) -> bool:
        return self.said.is_stored

    @property
    def is_background(self) -> bool:
        return bool(self.said.background)


def decode_response(body: bytes, bounds: Bounds) -> ResponseRequest:
    check_fields(decode_fields(body), body)
    said = decode(body, _decoder)
    check_model(said.model, bounds)
    _check(said)
    request = _chat_of(said)
    try:
        check_chat(request, bounds)
    except ClientError as error:
        raise in_its_words(error) from error
    return request


def in_its_words(error: ClientError) -> ClientError:
    """The same complaint about the field of a response that a chat's field was made from."""
    param = error.param
    if param is None or isinstance(error, NotSupported):
        return error
    for pattern, own in _ITS_WORDS:
        if pattern.search(param):
            told = pattern.sub(own, param)
            message = told + error.message.removeprefix(param) if error.message.startswith(param) else error.message
            return type(error)(message, code=error.code, param=told)
    return error


def _chat_of(said: ResponseBody) -> ResponseRequest:
    own = {name: getattr(said, name) for name in OwnFields.__struct_fields__}
    return ResponseRequest(
        said=said,
        model=said.model,
        messages=messages_of(said.context, said.input, said.instructions),
        stream=said.stream,
        max_completion_tokens=said.max_output_tokens,
        temperature=said.temperature,
        top_p=said.top_p,
        logprobs=LOGPROBS in (said.include or []),
        top_logprobs=said.top_logprobs,
        tools=tools_of(said.tools),
        tool_choice=tool_choice_of(said.tool_choice),
        parallel_tool_calls=said.parallel_tool_calls,
        response_format=_response_format(said),
        reasoning_effort=cast(ReasoningEffort | None, said.reasoning and said.reasoning.effort),
        **own,
    )


def _check(said: ResponseBody) -> None:
    for index, one in enumerate(said.include or []):
        if one != LOGPROBS:
            raise wrong(f"include[{index}]", f"only {LOGPROBS!r} is supported, got {short(one)}")
    check_number("top_logprobs", said.top_logprobs, 0, MAX_LOGPROBS)
    if said.top_logprobs and LOGPROBS not in (said.include or []):
        raise wrong("top_logprobs", f"only allowed with include: [{LOGPROBS!r}]")
    if said.truncation == "auto":
        raise wrong("truncation", "only 'disabled' is supported: nothing of the input is left out")
    if said.background and not said.is_stored:
        raise wrong("background", "only allowed with store: true, or nobody could ask for the answer")
    if said.stream_options is not None and not said.stream:
        raise wrong("stream_options", "only allowed with stream: true")
    _check_reasoning(said)
    _check_metadata(said.metadata or {})


def _check_reasoning(said: ResponseBody) -> None:
    reasoning = said.reasoning
    if reasoning is None:
        return
    if reasoning.effort is not None and reasoning.effort not in EFFORTS:
        raise wrong("reasoning.effort", f"must be one of {', '.join(EFFORTS)}, got {short(reasoning.effort)}")
    for name in ("summary", "generate_summary", "context", "mode"):
        if getattr(reasoning, name) is not None:
            raise wrong(f"reasoning.{name}", "not supported by this server; the output has the thoughts themselves")


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise wrong("metadata", f"at most {MAX_METADATA} keys, got {len(metadata)}")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY:
            raise wrong("metadata", f"keys of at most {MAX_METADATA_KEY} characters, got {short(key)}")
        if len(value) > MAX_METADATA_VALUE:
            raise wrong(f"metadata.{key}", f"at most {MAX_METADATA_VALUE} characters, got {len(value)}")


def _response_format(said: ResponseBody) -> dict[str, Any] | None:
    if said.text is None:
        return None
    if said.text.verbosity not in (None, "medium"):
        raise wrong("text.verbosity", "only 'medium' is supported")
    given = said.text.format
    if given is None:
        return None
    kind = given.get("type")
    if kind not in _FORMATS:
        raise wrong("text.format.type", f"must be one of {', '.join(_FORMATS)}, got {short(kind)}")
    for name in given.keys() - _FORMAT_FIELDS:
        raise wrong(f"text.format.{name}", "is not known")
    if kind != "json_schema":
        return {"type": kind}
    return {"type": kind, "json_schema": {name: value for name, value in given.items() if name != "type"}}
