"""One log line for every HTTP request of an api process or a router, written when its response has ended.

A line has the method, path, status, name of the key, ids, tokens and times, and never a key, a prompt or an output.
Probes and messages between routers and instances, which come every second, are logged at DEBUG.
"""

import logging
from dataclasses import dataclass

from starlette.types import Scope

from onward import log
from onward.clock import Clock
from onward.obs.request_trace import Attribute, RequestTrace
from onward.obs.trace_context import TRACEPARENT, TRACESTATE, parse_traceparent
from onward.obs.tracer import Tracer
from onward.proto.cursor import Cursor
from onward.proto.router import ATTEMPT_PATH, INTERNAL_PREFIX
from onward.proto.trace import TraceContext
from onward.web import asgi
from onward.web.gen_ai_spans import MAX_TEXT, OPERATIONS, describe_body

MAX_PATH_LENGTH = 200
MAX_METHOD_LENGTH = 16
PROBE_PATHS = frozenset({"/health", "/live", "/metrics"})
CLIENT_GONE = 499
"""The status of a request that its client abandoned before a response began, as nginx logs it."""

_ACCESS = "onward.access"
_REFUSED = "onward.connection_refusal"
_TRACEPARENT, _TRACESTATE = TRACEPARENT.encode(), TRACESTATE.encode()
_logger = logging.getLogger("onward.access")


@dataclass(slots=True)
class AccessRecord:
    """Facts about one request for its log line and its span. Endpoints fill in what the middleware cannot see."""

    method: str = ""
    path: str = ""
    started_at_s: float = 0.0
    status: int | None = None
    error_code: str | None = None
    key_name: str = ""
    request_id: str = ""
    """The server's id. A client that sends no `X-Request-Id` gets it as the response's."""
    label: str = ""
    """The client's `X-Request-Id`."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    first_token_at_s: float | None = None
    finish_reason: str | None = None
    num_resumes: int | None = None
    """On a router: how often the stream was resumed."""
    trace: RequestTrace | None = None
    """Set for a sampled request."""
    trace_context: TraceContext | None = None
    """The context that attempts at this request carry. None: no process has decided anything about a trace."""
    tracer: Tracer | None = None
    client_trace: TraceContext | None = None
    """The trace context of the client's headers."""

    def begin_trace(
        self, request_id: str, known: TraceContext | None = None, cursor: Cursor | None = None, *, is_attempt: bool
    ) -> TraceContext | None:
        """Begins the trace of a client's request if it is sampled, and returns the context that attempts carry.

        `known` is the trace of an earlier attempt at the request; `cursor` is used if no process has that.
        `is_attempt`: this process makes the attempt itself, so that the next attempt links to its span. Without a
        tracer the client's own context is passed on.
        """
        tracer = self.tracer
        if tracer is None:
            self.trace_context = known or self.client_trace
            return self.trace_context
        if known is None and cursor is not None:
            known = tracer.context_of_cursor(cursor)
        context = tracer.decide(request_id, known, self.client_trace)
        trace = self.trace = tracer.begin(context, self.client_trace, self.started_at_s)
        if trace is not None and is_attempt:
            if context.span_id:
                trace.link_to(trace.server_span, context.trace_id, context.span_id, "previous attempt")
            context = trace.server_context
        self.trace_context = context
        return context

    def begin_routed_trace(self, request_id: str, context: TraceContext | None) -> TraceContext | None:
        """Begins the trace of a router's attempt at a request. If the router has decided nothing, this process
        decides."""
        if context is None:
            return self.begin_trace(request_id, is_attempt=True)
        self.trace_context = context
        if self.tracer is not None:
            self.trace = self.tracer.begin_routed(context, self.started_at_s)
        return context

    def describe_request(self, path: str, body: bytes) -> None:
        """Sets name and attributes of the span from the request's body. Does nothing for a request that is not
        traced."""
        if self.trace is not None:
            self.trace.server_span.name, attributes = describe_body(path, body)
            self.trace.server_span.attributes.update(attributes)

    def end_trace(self, now_s: float) -> None:
        if self.trace is None and self.trace_context is None and self.tracer is not None and self.path in OPERATIONS:
            # The request was refused before its endpoint could begin the trace.
            self.begin_trace(self.request_id, is_attempt=True)
            self.describe_request(self.path, b"")
        trace = self.trace
        if trace is None:
            return
        trace.server_span.attributes.update(self._span_attributes())
        has_failed = self.error_code is not None and (self.status or 0) not in range(400, 500)
        is_server_error = self.status is not None and self.status >= 500
        error = (self.error_code or str(self.status)) if has_failed or is_server_error else None
        if error is None and self.error_code is not None:
            trace.server_span.attributes["error.type"] = self.error_code  # a client error is no failure of the server
        trace.end_span(trace.server_span, now_s, error)

    def _span_attributes(self) -> dict[str, Attribute]:
        first_s = self.first_token_at_s
        known: dict[str, Attribute | None] = {
            "http.request.method": self.method[:MAX_METHOD_LENGTH],
            "url.path": self.path[:MAX_PATH_LENGTH],
            "http.response.status_code": CLIENT_GONE if self.status is None else self.status,
            "gen_ai.response.id": self.request_id or None,
            "gen_ai.usage.input_tokens": self.prompt_tokens,
            "gen_ai.usage.output_tokens": self.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": self.cached_tokens,
            "gen_ai.response.finish_reasons": None if self.finish_reason is None else (self.finish_reason,),
            "gen_ai.response.time_to_first_chunk": None if first_s is None else max(0.0, first_s - self.started_at_s),
            "onward.label": self.label[:MAX_TEXT] or None,
            "onward.caller": self.key_name or None,
            "onward.resumes": self.num_resumes or None,
        }
        return {name: value for name, value in known.items() if value is not None}

    def describe(self, request_id: str, label: str, key_name: str) -> None:
        """Sets the fields that a router sends for its client's request, which is not the HTTP request here."""
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
            "trace": None if self.trace is None else self.trace.trace_id,
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
        """Whether this is a probe, or a message of another process of the cluster, with an expected status. Such
        requests come every second."""
        if self.path in PROBE_PATHS:
            return self.status in (200, 503)  # a server that starts is not healthy yet
        is_internal = self.path.startswith(INTERNAL_PREFIX) and self.path != ATTEMPT_PATH
        return is_internal and self.status == 200


def log_refused_connection(method: bytes, url: bytes, status: int, error_code: str) -> None:
    """Logs a request that was refused before it was read completely, with the fields that are known."""
    fields = {
        "method": method.decode("latin-1")[:MAX_METHOD_LENGTH] or "-",
        "path": url.partition(b"?")[0].decode("latin-1")[:MAX_PATH_LENGTH] or "-",
    }
    _logger.info(log.event("request", **fields, status=status, error=error_code))


def note_connection_refusal(scope: Scope, status: int, error_code: str) -> None:
    """Records that the connection was answered while the request's body arrived. The application gets only a
    disconnect."""
    scope[_REFUSED] = status, error_code


class AccessLog:
    """Writes the access log. `tracer` is None in a process that does not trace. A request's span ends when its line is
    written."""

    def __init__(self, clock: Clock, tracer: Tracer | None = None) -> None:
        self._clock = clock
        self._tracer = tracer

    def begin(self, scope: Scope, label: str) -> AccessRecord:
        record = scope[_ACCESS] = AccessRecord(scope["method"], scope["path"], self._clock.now_s(), label=label)
        record.tracer = self._tracer
        if (traceparent := asgi.header(scope, _TRACEPARENT)) is not None:
            record.client_trace = parse_traceparent(traceparent, asgi.header(scope, _TRACESTATE))
        return record

    def end(self, scope: Scope, record: AccessRecord) -> None:
        """Ends the record and writes its line, after the application has returned."""
        if record.status is None:
            record.status, record.error_code = scope.get(_REFUSED, (None, record.error_code))
        self.write(record)

    def write(self, record: AccessRecord) -> None:
        now_s = self._clock.now_s()
        record.end_trace(now_s)
        if _logger.isEnabledFor(record.level):
            _logger.log(record.level, record.event(now_s))


def access_record(scope: Scope) -> AccessRecord:
    """Returns the record of this request, or one that is discarded if there is no access log."""
    return scope.get(_ACCESS) or AccessRecord()
