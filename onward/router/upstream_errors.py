"""Reads the errors of instances: the counterpart of `web.error_format`."""

import msgspec

from onward.proto.engine import ErrorInfo
from onward.proto.field_types import Duration, HttpError

_STATUS_OF_CODE = {
    "aborted": 409,
    "deadline_exceeded": 504,
    "overloaded": 429,
    "unavailable": 503,
    "crashed_worker": 500,
    "crashed_engine": 500,
}


class _UpstreamErrorFields(msgspec.Struct, frozen=True):
    message: str = "the instance failed without saying why"
    type: str | None = None
    param: str | None = None
    code: str | None = None
    retryable: bool | None = None
    stage: str | None = None
    retry_after_s: Duration | None = None
    status: HttpError | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _UpstreamErrorFields


_decoder = msgspec.json.Decoder(_ErrorBody)


def parse_error_info(body: bytes, status: int | None) -> ErrorInfo:
    """Reads an error of an instance or of a proxy before it. `status` is that of its response; None for an event in a
    stream."""
    try:
        fields = _decoder.decode(body).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        fields = _UpstreamErrorFields(retryable=status is None or status >= 500, status=status)
    http_status = status or fields.status or _status(fields)
    return ErrorInfo(
        code=fields.code or "upstream_error",
        message=fields.message,
        status=http_status,
        retryable=http_status >= 500 if fields.retryable is None else fields.retryable,
        param=fields.param,
        retry_after_s=fields.retry_after_s,
        stage=fields.stage,
    )


def _status(fields: _UpstreamErrorFields) -> int:
    if fields.code in _STATUS_OF_CODE:
        return _STATUS_OF_CODE[fields.code]
    if fields.type == "invalid_request_error":
        return 400
    return 503 if fields.retryable else 500
