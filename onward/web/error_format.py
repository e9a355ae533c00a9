"""Errors as clients see them, in OpenAI's form, whichever layer they come from."""

import math
from typing import Any

import msgspec

from onward.proto.engine import ErrorInfo


class RequestFailed(Exception):
    """An error that exists as data, for example one that came from another process. `partial` is the output so far, as
    JSON."""

    def __init__(self, info: ErrorInfo, partial: bytes | None = None) -> None:
        super().__init__(info.message)
        self.info = info
        self.partial = partial


def error_body(info: ErrorInfo, partial: bytes | None = None) -> bytes:
    """Returns `{"error": {...}}`, as the openai package reads it, with `partial` beside it if there is partial
    output."""
    fields: dict[str, Any] = {"error": error_fields(info)}
    if partial is not None:
        fields["partial"] = msgspec.Raw(partial)
    return msgspec.json.encode(fields)


class ErrorFields(msgspec.Struct, frozen=True):
    """OpenAI's four fields, and further ones that a program needs to handle the error. Also the schema that
    `/openapi.json` shows."""

    message: str
    """What is wrong, for people."""
    type: str
    """`invalid_request_error`, `rate_limit_error` or `server_error`."""
    param: str | None
    """The field or header that is wrong."""
    code: str | None
    """What is wrong, for programs."""
    retryable: bool
    """Whether the same request may succeed later."""
    stage: str | msgspec.UnsetType = msgspec.UNSET
    """How far the request had come, if prefill and decode are on different instances."""
    retry_after_s: float | msgspec.UnsetType = msgspec.UNSET
    """How long to wait before a retry."""


def error_fields(info: ErrorInfo) -> dict[str, Any]:
    return msgspec.to_builtins(
        ErrorFields(
            info.message,
            error_type(info),
            info.param,
            info.code,
            info.retryable,
            stage=msgspec.UNSET if info.stage is None else info.stage,
            retry_after_s=msgspec.UNSET if info.retry_after_s is None else info.retry_after_s,
        )
    )


def error_type(info: ErrorInfo) -> str:
    if info.status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if info.status < 500 else "server_error"


def error_headers(info: ErrorInfo) -> dict[str, str]:
    headers = {"www-authenticate": "Bearer"} if info.status == 401 else {}
    if info.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(info.retry_after_s)))
    return headers


def response_error_fields(info: ErrorInfo) -> dict[str, Any]:
    """Returns the `error` of a response object. OpenAI defines only a few codes, so Onward's code is in `type`."""
    if info.status == 429:
        code = "rate_limit_exceeded"
    else:
        code = "invalid_prompt" if info.status == 400 else "server_error"
    return {"code": code, "message": info.message, "type": info.code, "param": info.param}
