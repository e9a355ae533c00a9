"""One log line for every HTTP request of an api process or a router, written when its response has ended.

A line has what an operator looks for: method, path, status, the name of the key, ids, tokens and times. Never a key, a
prompt or an output. Probes and messages between routers and instances, which come every second, are logged at DEBUG.
"""

import logging
from dataclasses import dataclass

from starlette.types import Scope

from onward import log
from onward.clock import Clock
from onward.proto.router import ATTEMPT_PATH, INTERNAL_PREFIX

MAX_PATH_LENGTH = 200
MAX_METHOD_LENGTH = 16
PROBE_PATHS = frozenset({"/health", "/live", "/metrics"})
CLIENT_GONE = 499
"""The status of a request whose client has gone before a response began, as nginx logs it."""

_ACCESS = "onward.access"
_logger = logging.getLogger("onward.access")


@dataclass(slots=True)
class AccessRecord:
    """What is known of one request. Endpoints fill in what the middleware cannot see."""

    method: str = ""
    path: str = ""
    started_at_s: float = 0.0
    status: int | None = None
    error_code: str | None = None
    key_name: str = ""
    request_id: str = ""
    """Ours. A client that sends no `X-Request-Id` is told this one."""
    label: str = ""
    """The client's `X-Request-Id`."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    first_token_at_s: float | None = None
    finish_reason: str | None = None
    num_resumes: int | None = None
    """Of a router: how often the stream was carried on."""

    def describe(self, request_id: str, label: str, key_name: str) -> None:
        """What the router says of its client, whose request is not the HTTP request here."""
        self.request_id, self.label, self.key_name = request_id, label, key_name

    def event(self, now_s: float) -> log.LogEvent:
        first_s = self.first_token_at_s
        optional: dict[str, object] = {
            "key": self.key_name or None,
            "prompt": self.prompt_tokens,
            "cached": self.cached_tokens,
            "output": self.output_tokens,
            "reason": self.finish_reason,
            "resumes": self.num_resumes or None,
            "error": self.error_code,
            "ttft": None if first_s is None else max(0.0, first_s - self.started_at_s),
        }
        return log.event(
            "request",
            method=self.method[:MAX_METHOD_LENGTH],
            path=self.path[:MAX_PATH_LENGTH],
            status=CLIENT_GONE if self.status is None else self.status,
            **log.request_fields(self.request_id, self.label),
            **{key: value for key, value in optional.items() if value is not None},
            seconds=max(0.0, now_s - self.started_at_s),
        )

    @property
    def level(self) -> int:
        return logging.DEBUG if self._is_routine else logging.INFO

    @property
    def _is_routine(self) -> bool:
        """Comes every second from a probe or another process of the cluster, and was answered as it should be."""
        if self.path in PROBE_PATHS:
            return self.status in (200, 503)  # a server that starts is not healthy yet
        is_internal = self.path.startswith(INTERNAL_PREFIX) and self.path != ATTEMPT_PATH
        return is_internal and self.status == 200


def log_refused_connection(method: bytes, url: bytes, status: int, error_code: str) -> None:
    """A request that was refused before it was read to its end: what of it is known."""
    fields = {
        "method": method.decode("latin-1")[:MAX_METHOD_LENGTH] or "-",
        "path": url.partition(b"?")[0].decode("latin-1")[:MAX_PATH_LENGTH] or "-",
    }
    _logger.info(log.event("request", **fields, status=status, error=error_code))


class AccessLog:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def begin(self, scope: Scope, label: str) -> AccessRecord:
        record = scope[_ACCESS] = AccessRecord(scope["method"], scope["path"], self._clock.now_s(), label=label)
        return record

    def write(self, record: AccessRecord) -> None:
        if _logger.isEnabledFor(record.level):
            _logger.log(record.level, record.event(self._clock.now_s()))


def access_record(scope: Scope) -> AccessRecord:
    """The record of this request; where no access log is written, one that is thrown away."""
    return scope.get(_ACCESS) or AccessRecord()
