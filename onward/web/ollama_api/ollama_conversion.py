"""Converts requests of Ollama's API to requests of `/v1/chat/completions`, `/v1/completions` and `/v1/embeddings`.

A field that those endpoints know too is passed on unchecked. An unknown field is passed on under a name that they do not
know, so that they report it or refuse it as any other; `ollama_errors` restores its own name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from onward.web.json_body import decode, decode_fields, field_error, nested_too_deeply, short_repr
from onward.web.ollama_api.answer_kind import AnswerKind
from onward.web.ollama_api.ollama_errors import UNKNOWN_PREFIX
from onward.web.ollama_api.ollama_messages import continues_last_message, to_chat
from onward.web.ollama_api.ollama_options import fields_of_options, unknown_options
from onward.web.ollama_api.ollama_requests import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaGenerationFields,
)

INNER_CHAT_PATH = "/v1/chat/completions"
INNER_COMPLETION_PATH = "/v1/completions"
INNER_EMBEDDING_PATH = "/v1/embeddings"
_EFFORTS = ("low", "medium", "high")
_PASSED_ON = ("priority", "deadline_ms", "cache_salt")
_REFUSED: Mapping[str, str] = {
    "suffix": "not supported: this server continues a text, and does not fill in its middle",
    "template": "not supported by this server; the operator sets the template by --chat-template",
    "context": "not supported by this server; use /api/chat, which takes earlier messages",
    "images": "this server reads text only: images are not supported",
}


@dataclass(frozen=True, slots=True)
class ConvertedRequest:
    model: str
    """As the client wrote it."""
    kind: AnswerKind
    path: str
    """The endpoint that gets the request. Empty: nothing is generated, and the answer says that the model is loaded."""
    fields: bytes
    """The body without `model`, as JSON."""
    is_streaming: bool

    def body(self, model: str) -> bytes:
        """Returns the body of the converted request, for this served model."""
        return b'{"model":' + msgspec.json.encode(model) + b"," + self.fields[1:]


_chats = msgspec.json.Decoder(OllamaChatRequest)
_generations = msgspec.json.Decoder(OllamaGenerateRequest)
_embeddings = msgspec.json.Decoder(OllamaEmbedRequest)


def convert_chat(body: bytes) -> ConvertedRequest:
    unknown = _unknown_fields(body, OllamaChatRequest)
    request = decode(body, _chats)
    if not request.messages:
        return _load_request(request, AnswerKind.CHAT)
    fields = _chat_fields(request) | {"messages": to_chat(request.messages)}
    if request.tools:
        fields["tools"] = [{"type": "function"} | _without_nulls(tool) for tool in request.tools]
    if continues_last_message(request.messages):
        fields["continue_final_message"] = True
    return _converted(request, AnswerKind.CHAT, INNER_CHAT_PATH, unknown | fields)


def convert_generate(body: bytes) -> ConvertedRequest:
    unknown = _unknown_fields(body, OllamaGenerateRequest)
    request = decode(body, _generations)
    for name, problem in _REFUSED.items():
        if getattr(request, name):
            raise field_error(name, problem)
    if not request.prompt:
        return _load_request(request, AnswerKind.GENERATE)
    if request.raw:
        for name in ("system", "think", "logprobs"):
            if getattr(request, name):
                raise field_error(name, "not allowed with raw: true")
        fields = _shared_fields(request) | {"prompt": request.prompt}
        return _converted(request, AnswerKind.GENERATE, INNER_COMPLETION_PATH, unknown | fields)
    messages = [{"role": "system", "content": request.system}] if request.system else []
    messages.append({"role": "user", "content": request.prompt})
    return _converted(
        request, AnswerKind.GENERATE, INNER_CHAT_PATH, unknown | _chat_fields(request) | {"messages": messages}
    )


def convert_embed(body: bytes) -> ConvertedRequest:
    unknown = _unknown_fields(body, OllamaEmbedRequest)
    request = decode(body, _embeddings)
    fields_of_options(request.options or {})  # refuses what no request may ask for
    fields = unknown | {"input": request.input, "encoding_format": "float"} | _passed_on(request)
    if request.dimensions is not None:
        fields["dimensions"] = request.dimensions
    path = INNER_EMBEDDING_PATH if request.input else ""
    return ConvertedRequest(request.model, AnswerKind.EMBED, path, _encoded(fields), is_streaming=False)


def _unknown_fields(body: bytes, struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Returns the unknown fields and options as fields of the converted request. Their values do not matter."""
    fields = decode_fields(body)
    names = [UNKNOWN_PREFIX + name for name in sorted(fields.keys() - set(struct.__struct_fields__))]
    options = _options_of(fields)
    return dict.fromkeys([*names, *(UNKNOWN_PREFIX + name for name in unknown_options(options))], True)


def _options_of(fields: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """Returns the names of the options. An object of another form is refused when the request is decoded."""
    try:
        return msgspec.json.decode(fields.get("options", b"{}"), type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}


def _load_request(request: OllamaGenerationFields, kind: AnswerKind) -> ConvertedRequest:
    if request.keep_alive == 0:
        raise field_error("keep_alive", "0 without a prompt would unload the model, which stays loaded on this server")
    return _converted(request, kind, "", {})


def _converted(
    request: OllamaGenerationFields, kind: AnswerKind, path: str, fields: dict[str, Any]
) -> ConvertedRequest:
    is_streaming = request.stream is not False
    if is_streaming:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return ConvertedRequest(request.model, kind, path, _encoded(fields), is_streaming)


def _encoded(fields: dict[str, Any]) -> bytes:
    """Returns the fields as JSON, which is nested more deeply than the client's, so it may be refused although that was
    decoded."""
    try:
        return msgspec.json.encode(fields)
    except RecursionError as fault:
        raise nested_too_deeply() from fault


def _shared_fields(request: OllamaGenerationFields) -> dict[str, Any]:
    if request.shift:
        raise field_error("shift", "only false is supported: an answer ends where the context does")
    fields = fields_of_options(request.options or {}) | _passed_on(request)
    if request.format:
        fields["response_format"] = _response_format(request.format)
    return fields


def _chat_fields(request: OllamaGenerationFields) -> dict[str, Any]:
    fields = _shared_fields(request) | _thinking_fields(request.think)
    if request.logprobs is not None:
        fields["logprobs"] = request.logprobs
    if request.top_logprobs is not None:
        fields["top_logprobs"] = request.top_logprobs
    return fields


def _passed_on(request: OllamaGenerationFields | OllamaEmbedRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in _PASSED_ON if getattr(request, name) is not None}


def _response_format(answer_format: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(answer_format, dict):
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": answer_format}}
    if answer_format != "json":
        raise field_error("format", f"must be 'json' or a JSON schema, got {short_repr(answer_format)}")
    return {"type": "json_object"}


def _thinking_fields(think: bool | str | None) -> dict[str, Any]:
    """Returns the template variables for `think`. Without it there are none, so the template's default applies."""
    if think is None:
        return {}
    if isinstance(think, str) and think not in _EFFORTS:
        raise field_error("think", f"must be true, false, {', '.join(_EFFORTS)}, got {short_repr(think)}")
    # Two names are in use for the same switch.
    variables = dict.fromkeys(("enable_thinking", "thinking"), bool(think))
    return {"chat_template_kwargs": variables} | ({"reasoning_effort": think} if isinstance(think, str) else {})


def _without_nulls(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tool.items() if value is not None}
