"""Begins the trace of each sampled request. A process that traces has one tracer; any other process has none."""

import logging
from collections.abc import Mapping

from onward.clock import Clock
from onward.config import OtelSettings, otel_settings
from onward.obs.metrics import Registry
from onward.obs.request_trace import Attribute, RequestTrace
from onward.obs.span_exporter import SpanExportThread, SpanSink
from onward.obs.trace_context import TraceSampler, trace_id_of_request
from onward.optional_packages import has_otel
from onward.proto.cursor import Cursor
from onward.proto.trace import TraceContext
from onward.random_source import RandomSource

_SPAN_ID_BITS = 64
_logger = logging.getLogger(__name__)


class Tracer:
    def __init__(self, sampler: TraceSampler, sink: SpanSink, clock: Clock, random: RandomSource) -> None:
        self._sampler, self._sink, self._clock, self._random = sampler, sink, clock, random

    def decide(self, request_id: str, known: TraceContext | None, client: TraceContext | None) -> TraceContext:
        """Returns the trace of a request that begins or continues here. `known` is the trace of an earlier attempt,
        which takes precedence. `client` is the context of the client's headers."""
        if known is not None:
            return known
        trace_id = trace_id_of_request(request_id) if client is None else client.trace_id
        is_sampled = self._sampler.is_sampled(trace_id, client)
        if client is None:
            return TraceContext(trace_id, is_sampled)
        # The client's span is not an attempt, so the first attempt links to no span.
        return TraceContext(trace_id, is_sampled, "", client.span_id, client.trace_state)

    def context_of_cursor(self, cursor: Cursor) -> TraceContext:
        """Returns the trace of a stream that no process remembers. The cursor names it, or else its id is derived from
        the request id."""
        if cursor.trace_id:
            return TraceContext(cursor.trace_id, True)
        trace_id = trace_id_of_request(cursor.request_id)
        return TraceContext(trace_id, self._sampler.is_sampled(trace_id, None))

    def begin(self, context: TraceContext, client: TraceContext | None, started_at_s: float) -> RequestTrace | None:
        """Begins the trace of a client's request, or returns None if it is not sampled. A client that continues its
        stream may have begun another trace for that; the server span links to it."""
        if not context.is_sampled:
            return None
        is_same = client is not None and client.trace_id == context.trace_id
        parent = client.span_id if client is not None and is_same else context.client_span_id
        trace = self._new_trace(context, started_at_s, parent)
        if client is not None and not is_same:
            trace.link_to(trace.server_span, client.trace_id, client.span_id, "client")
        return trace

    def begin_routed(self, context: TraceContext, started_at_s: float) -> RequestTrace | None:
        """Begins the trace of a router's attempt, below the router's own span of it. Returns None if it is not
        sampled."""
        return self._new_trace(context, started_at_s, context.span_id) if context.is_sampled else None

    def _new_trace(self, context: TraceContext, started_at_s: float, parent_span_id: str) -> RequestTrace:
        wall_offset_s = self._clock.wall_s() - self._clock.now_s()
        return RequestTrace(
            context, self._sink.put, self._new_span_id, started_at_s, wall_offset_s, parent_span_id=parent_span_id
        )

    def _new_span_id(self) -> str:
        return f"{self._random.bits(_SPAN_ID_BITS) or 1:016x}"


class ProcessTracing:
    """The tracer of a process and its export thread. Both are None if the process does not trace."""

    def __init__(
        self,
        settings: OtelSettings | None,
        clock: Clock,
        random: RandomSource,
        registry: Registry,
        attributes: Mapping[str, Attribute],
    ) -> None:
        self.tracer: Tracer | None = None
        self._thread: SpanExportThread | None = None
        if settings is not None:
            self._thread = SpanExportThread(settings.endpoint, attributes, registry)
            sampler = TraceSampler(settings.sample_ratio, settings.is_parent_based)
            self.tracer = Tracer(sampler, self._thread, clock, random)

    def close(self) -> None:
        """Sends the last spans. Blocks for as long as that takes, within a time limit."""
        if self._thread is not None:
            self._thread.close()


def resolve_settings(endpoint: str | None, sample_ratio: float | None) -> OtelSettings | None:
    """Returns the settings from the flags and the environment. The environment is often set for a whole cluster: if the
    packages are missing, nothing is traced, and the log says so. A flag was checked before."""
    settings = otel_settings(endpoint, sample_ratio)
    if settings is not None and not has_otel():
        _logger.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, and nothing is traced: the extra onward[otel] is missing")
        return None
    return settings
