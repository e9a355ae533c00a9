"""Errors in Ollama's form, `{"error": "text"}`, made from bodies in OpenAI's form.

An error about a converted request names the field of the converted request; here it gets the name of the client's field.
"""

import re
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.types import Scope, Send

from onward.web.converted_errors import ConvertedErrorSend, Header
from onward.web.ollama_api.answer_kind import AnswerKind
from onward.web.ollama_api.ollama_paths import is_ollama_path

UNKNOWN_PREFIX = "$."
"""Begins the names of unknown fields in a converted request. No field of its endpoint begins so."""
_QUOTED_PREFIX = quote(UNKNOWN_PREFIX, safe="").encode()
_RENAMINGS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"^\$\."), ""),
    (re.compile(r"^response_format\b.*"), "format"),
    (re.compile(r"^max_tokens$"), "options.num_predict"),
    (re.compile(r"^repetition_penalty$"), "options.repeat_penalty"),
    (
        re.compile(r"^(temperature|top_k|top_p|min_p|seed|stop|presence_penalty|frequency_penalty)\b"),
        r"options.\1",
    ),
    (re.compile(r"^(chat_template_kwargs|reasoning_effort)\b.*"), "think"),
    (re.compile(r"^continue_final_message$"), "messages"),
    (re.compile(r"^messages\[(\d+)\]\.reasoning_content$"), r"messages[\1].thinking"),
)
_GENERATE_RENAMINGS = (*_RENAMINGS, (re.compile(r"^messages\b.*"), "prompt"))


class _ConvertibleErrorBody(msgspec.Struct, frozen=True):
    error: dict[str, Any] | str


_decoder = msgspec.json.Decoder(_ConvertibleErrorBody)


def ollama_error_body(body: bytes, kind: AnswerKind | None = None) -> bytes:
    """Returns an error body of this server in Ollama's form. A body that has it already is returned unchanged. `kind`: the
    kind of the converted request that the error is about."""
    try:
        error = _decoder.decode(body).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.json.encode({"error": body.decode("utf-8", "replace")})
    if isinstance(error, str):
        return body
    message, param = str(error.get("message")), error.get("param")
    if kind is not None and isinstance(param, str) and message.startswith(param):
        message = _client_field(param, kind) + message.removeprefix(param)
    return msgspec.json.encode({"error": message})


def with_ollama_errors(scope: Scope, send: Send) -> Send:
    """Returns a `send` that converts the error responses of Ollama's API. Other responses pass unchanged."""
    if not is_ollama_path(scope["path"]):
        return send
    return ConvertedErrorSend(send, lambda body, _status, _request_id: ollama_error_body(body))


def with_client_field_names(headers: list[Header], names_header: bytes) -> list[Header]:
    """Returns the headers with the client's own names of unknown fields in the header `names_header`."""
    return [(name, value.replace(_QUOTED_PREFIX, b"") if name == names_header else value) for name, value in headers]


def _client_field(param: str, kind: AnswerKind) -> str:
    for pattern, replacement in _GENERATE_RENAMINGS if kind is AnswerKind.GENERATE else _RENAMINGS:
        if pattern.search(param):
            return pattern.sub(replacement, param)
    return param
