"""An error in the form in which processes exchange it."""

from onward.errors import OnwardError
from onward.proto.engine import ErrorInfo


def to_error_info(error: OnwardError) -> ErrorInfo:
    return ErrorInfo(
        code=error.code,
        message=error.message,
        status=error.status,
        retryable=error.retryable,
        param=error.param,
        retry_after_s=error.retry_after_s,
        stage=error.stage,
    )
