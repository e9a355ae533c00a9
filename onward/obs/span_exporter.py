"""Sends finished spans to an OTLP collector over HTTP, as protobuf, from a thread of its own.

The event loop only appends to a bounded queue. Spans that do not fit, or that the collector does not accept, are lost
and counted; no request waits for them. OpenTelemetry's packages are imported in the thread, so a server that does not
trace never loads them.
"""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from onward import log
from onward.obs.metrics import Registry
from onward.obs.request_trace import Attribute, FinishedSpan, SpanKind
from onward.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

MAX_QUEUED_SPANS = 4096
MAX_BATCH = 512
EXPORT_INTERVAL_S = 1.0
"""A process that is killed loses the spans of the last second."""
CLOSE_TIMEOUT_S = 2.0
FAILING_CLOSE_TIMEOUT_S = 0.2
"""Timeout for a collector that has not accepted the last spans either."""

_EXPORTED, _FAILED, _DROPPED = "exported", "failed", "dropped"
_LIBRARY_LOGGERS = ("opentelemetry", "urllib3.connectionpool")
_logger = logging.getLogger(__name__)


class SpanSink(Protocol):
    def put(self, span: FinishedSpan) -> None: ...


class BatchExporter(Protocol):
    """Sends batches. `export` returns whether the collector has accepted the batch, and raises nothing."""

    def export(self, spans: Sequence[FinishedSpan]) -> bool: ...
    def close(self) -> None: ...

    @property
    def last_error(self) -> str: ...


class SpanExportThread:
    """Exports spans from a thread of its own. Only one thread may call `put`, the event loop's."""

    def __init__(self, endpoint: str, attributes: Mapping[str, Attribute], registry: Registry) -> None:
        self._endpoint, self._attributes = endpoint, dict(attributes)
        self._queue: deque[FinishedSpan] = deque()
        self._wake, self._is_closing = threading.Event(), False
        self._has_failed = self._is_failing = False
        self._exporter: BatchExporter | None = None
        self._spans = registry.counter("onward_trace_spans_total", "Spans of traced requests, by outcome.", ["outcome"])
        # All labels exist before the second thread counts, so that a snapshot never reads a dictionary that grows.
        for outcome in (_EXPORTED, _FAILED, _DROPPED):
            self._spans.inc(outcome, by=0)
        self._thread = threading.Thread(target=self._run, name="span-exporter", daemon=True)
        self._thread.start()

    def put(self, span: FinishedSpan) -> None:
        if len(self._queue) >= MAX_QUEUED_SPANS:
            self._spans.inc(_DROPPED)
            return
        self._queue.append(span)
        if len(self._queue) >= MAX_BATCH:
            self._wake.set()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Sends the queued spans within the timeout. Blocks, so an event loop must not call it."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(min(timeout_s, FAILING_CLOSE_TIMEOUT_S) if self._is_failing else timeout_s)
        if self._thread.is_alive():
            self._has_failed = True  # there is no time left to log why
            self._queue.clear()
            if self._exporter is not None:
                self._exporter.close()  # ends its wait between two tries

    def _run(self) -> None:
        try:
            self._exporter = OtlpBatchExporter(self._endpoint, self._attributes)
        except Exception as fault:
            _logger.error(log.event("traces cannot be exported", endpoint=self._endpoint, cause=repr(fault)))
            self._exporter = None
        while not (self._is_closing and not self._queue):
            if not self._is_closing:
                self._wake.wait(EXPORT_INTERVAL_S)
                self._wake.clear()
            self._export_queued()

    def _export_queued(self) -> None:
        while self._queue:
            batch = self._take_batch()
            is_taken = self._exporter is not None and self._exporter.export(batch)
            self._spans.inc(_EXPORTED if is_taken else _FAILED, by=len(batch))
            self._is_failing = not is_taken
            if not is_taken and self._exporter is not None and not self._has_failed:
                self._has_failed = True  # logged once: onward_trace_spans_total counts the rest
                cause = self._exporter.last_error
                _logger.warning(log.event("traces could not be exported", endpoint=self._endpoint, cause=cause))

    def _take_batch(self) -> list[FinishedSpan]:
        batch = list[FinishedSpan]()
        with contextlib.suppress(IndexError):  # `close` may have emptied the queue
            while len(batch) < MAX_BATCH:
                batch.append(self._queue.popleft())
        return batch


def import_exporter() -> None:
    """Imports the modules of the export thread, which takes a second. For a process that freezes its heap: the garbage
    collector would traverse modules that are imported later again and again."""
    from opentelemetry.exporter.otlp.proto.http import trace_exporter  # noqa: F401


class OtlpBatchExporter:
    """OpenTelemetry's exporter, which reads the standard variables (`OTEL_EXPORTER_OTLP_HEADERS`, `…_TIMEOUT`,
    `…_COMPRESSION`, `…_CERTIFICATE`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_SERVICE_NAME`) by itself."""

    def __init__(self, endpoint: str, attributes: Mapping[str, Attribute]) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource

        self._messages = _LastMessage()
        for name in _LIBRARY_LOGGERS:
            # The library would log every failed try, several times for one batch.
            library = logging.getLogger(name)
            library.addHandler(self._messages)
            library.propagate = False
        defaults = Resource({"service.name": "onward", "service.version": __version__, **attributes})
        self._resource = defaults.merge(_given_resource())
        self._exporter = OTLPSpanExporter(endpoint=endpoint)

    @property
    def last_error(self) -> str:
        return self._messages.text

    def export(self, spans: Sequence[FinishedSpan]) -> bool:
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            readable = [_readable_span(span, self._resource) for span in spans]
            return self._exporter.export(readable) is SpanExportResult.SUCCESS
        except Exception as fault:  # a collector's answer must not end the thread
            self._messages.text = repr(fault)
            return False

    def close(self) -> None:
        self._exporter.shutdown()


def _given_resource() -> "Resource":
    """Returns the resource attributes of the environment, without OpenTelemetry's defaults, which would replace
    ours."""
    from opentelemetry.sdk.resources import OTELResourceDetector

    return OTELResourceDetector().detect()


def _readable_span(span: FinishedSpan, resource: "Resource") -> "ReadableSpan":
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanContext, TraceFlags
    from opentelemetry.trace import SpanKind as OtelSpanKind
    from opentelemetry.trace.span import TraceState
    from opentelemetry.trace.status import Status, StatusCode

    kinds: dict[SpanKind, Any] = {
        "internal": OtelSpanKind.INTERNAL,
        "server": OtelSpanKind.SERVER,
        "client": OtelSpanKind.CLIENT,
    }

    def context(trace_id: str, span_id: str) -> SpanContext:
        state = TraceState.from_header([span.trace_state] if span.trace_state else [])
        flags = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=flags, trace_state=state)

    # The spans of a request are created when it has ended, with ids that other processes already use. A tracer of the
    # SDK would choose ids and times itself.
    return ReadableSpan(
        span.name,
        context=context(span.trace_id, span.span_id),
        parent=context(span.trace_id, span.parent_span_id) if span.parent_span_id else None,
        resource=resource,
        attributes=dict(span.attributes),
        events=[Event(event.name, dict(event.attributes), event.at_ns) for event in span.events],
        links=[Link(context(link.trace_id, link.span_id), dict(link.attributes)) for link in span.links],
        kind=kinds[span.kind],
        status=Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, span.error),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=InstrumentationScope("onward", __version__),
    )


class _LastMessage(logging.Handler):
    """Keeps the last message that a library has logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
