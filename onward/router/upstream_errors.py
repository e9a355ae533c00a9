"""What went wrong at an instance, as it told a router or failed to: the reading side of `web.error_format`."""

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
    """What an instance, or something between, said. `status`: of its response; None for an event in a stream."""
    try:
        told = _decoder.decode(body).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        told = _UpstreamErrorFields(retryable=status is None or status >= 500, status=status)
    settled = status or told.status or _status(told)
    return ErrorInfo(
        code=told.code or "upstream_error",
        message=told.message,
        status=settled,
        retryable=settled >= 500 if told.retryable is None else told.retryable,
        param=told.param,
        retry_after_s=told.retry_after_s,
        stage=told.stage,
    )


def _status(told: _UpstreamErrorFields) -> int:
    if told.code in _STATUS_OF_CODE:
        return _STATUS_OF_CODE[told.code]
    if told.type == "invalid_request_error":
        return 400
    return 503 if told.retryable else 500
