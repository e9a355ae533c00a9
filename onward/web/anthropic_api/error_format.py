"""Errors in Anthropic's form, made from the bodies that the rest of the server writes in OpenAI's form.

`{"type": "error", "error": {"type": …, "message": …}}`; the other fields of an error (`param`, `code`, `retryable`, …) and
`partial` stay as they are. A server of both APIs writes an error once and converts it at the edge. So every error has
this form, also an error of authentication, of the HTTP layer or of an instance behind a router.
"""

from typing import Any

import msgspec
from starlette.types import Scope, Send

from onward.proto.engine import ErrorInfo
from onward.web import sse
from onward.web.anthropic_api.message_paths import is_messages_path
from onward.web.converted_errors import ConvertedErrorSend
from onward.web.error_format import error_body

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    502: "overloaded_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Error types by status. Every other 4xx is an `invalid_request_error`, every other 5xx an `api_error`."""


class _OpenAiErrorBody(msgspec.Struct, frozen=True):
    error: dict[str, Any]
    partial: msgspec.Raw = msgspec.Raw(b"")


_decoder = msgspec.json.Decoder(_OpenAiErrorBody)


def error_type(status: int) -> str:
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def message_error_body(body: bytes, status: int, request_id: str | None = None) -> bytes:
    """Returns an error body of this server in Anthropic's form. A body of another form is returned unchanged."""
    try:
        decoded = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return body
    fields: dict[str, Any] = {"type": "error", "error": {**decoded.error, "type": error_type(status)}}
    if request_id is not None:
        fields["request_id"] = request_id
    if decoded.partial:
        fields["partial"] = decoded.partial
    return msgspec.json.encode(fields)


def message_error_event(info: ErrorInfo, partial: bytes | None = None) -> bytes:
    """Returns the event that ends a failed stream. It is the last event: no `message_stop` follows."""
    return sse.named_event("error", message_error_body(error_body(info, partial), info.status))


def with_message_errors(scope: Scope, send: Send) -> Send:
    """Returns a `send` that converts the error responses of the Messages API, and repeats the request's id in the
    `request-id` header, where Anthropic's clients look for it. Other responses pass unchanged."""
    if not is_messages_path(scope["path"]):
        return send
    return ConvertedErrorSend(send, message_error_body, b"request-id")
