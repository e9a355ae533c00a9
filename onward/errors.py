"""Every error that is reported to a user, each with its HTTP status and a machine-readable code.

    OnwardError
    ├── ClientError                 the request is wrong; sending it again will not help
    │   ├── InvalidRequest   400    a field is wrong (`param` names it)
    │   ├── NotFound         404    no such model, route or stream
    │   ├── Conflict         409    the label is in use
    │   └── TooLarge         413    the body is over the limit
    ├── ServerError                 the request may be fine
    │   ├── Overloaded       429    the queue is full (`retry_after_s` says when to retry)
    │   ├── RateLimited      429    the caller's own limit is reached (likewise)
    │   ├── Unavailable      503    the engine is not running, or not ready yet
    │   ├── DeadlineExceeded 504    the request's own deadline has passed
    │   ├── CrashedWorker    500    the request has crashed the worker three times
    │   ├── PdError          503    a handoff between instances failed (`stage` says where)
    │   └── InternalError    500    a fault of the server
    └── StartupError                the server cannot start; the message says why and what to do

Broken invariants are bugs of Onward. They are asserts, and have no class here.
"""

RETRY_SOON_S = 1.0
"""`retry_after_s` if the time of recovery cannot be estimated: a process restarts, or a short queue is full."""


class OnwardError(Exception):
    status = 500
    code = "internal_error"
    kind = "server_error"
    retryable = False

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        stage: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.stage = stage
        self.code = code or type(self).code
        self.param = param
        self.retry_after_s = retry_after_s


class ClientError(OnwardError):
    status = 400
    code = "invalid_request"
    kind = "invalid_request_error"


class InvalidRequest(ClientError):
    pass


class NotFound(ClientError):
    status = 404
    code = "not_found"


class Conflict(ClientError):
    status = 409
    code = "conflict"


class TooLarge(ClientError):
    status = 413
    code = "body_too_large"


class ServerError(OnwardError):
    pass


class Overloaded(ServerError):
    status = 429
    code = "overloaded"
    kind = "rate_limit_error"
    retryable = True


class RateLimited(ServerError):
    status = 429
    code = "rate_limited"
    kind = "rate_limit_error"
    retryable = True


class Unavailable(ServerError):
    status = 503
    code = "unavailable"
    retryable = True


class DeadlineExceeded(ServerError):
    status = 504
    code = "deadline_exceeded"


class CrashedWorker(ServerError):
    code = "crashed_worker"


class PdError(ServerError):
    """A failure between prefill and decode instances. `code` and `stage` are machine-readable."""

    status = 503
    code = "pd_prefill_failed"
    retryable = True

    def __init__(self, code: str, message: str, *, stage: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"PD Error: {message}", code=code, stage=stage, retry_after_s=retry_after_s)


class InternalError(ServerError):
    pass


class StartupError(OnwardError):
    code = "startup_failed"
