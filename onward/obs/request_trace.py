"""The spans of one sampled request, as one process sees it. Pure: takes times of the process's clock, and passes finished
spans on as data.

    RequestTrace        the server span: one HTTP request of a client, or of a router
      OpenSpan          below it: an attempt at an instance (router), a phase in the engine (api process)

A span is passed on when it ends, not when the request ends, so that a killed process loses only the spans that are
open. No span holds a prompt, an output or a key.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from onward.proto.trace import EnginePhase, PhaseCause, RequestPhases, TraceContext

MAX_EVENTS = 128
"""Events of one span, as in OpenTelemetry's own limit. Further ones are counted."""
MAX_SPANS = 512
"""Spans below one server span. A request that is preempted again and again must not flood the collector."""

SpanKind = Literal["internal", "server", "client"]
Attribute = str | bool | int | float | tuple[str, ...]
Attributes = Mapping[str, Attribute]

NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class SpanEvent:
    name: str
    at_ns: int
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class SpanLink:
    trace_id: str
    span_id: str
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class FinishedSpan:
    name: str
    kind: SpanKind
    trace_id: str
    span_id: str
    parent_span_id: str
    """Empty: the span is the first of its trace."""
    start_ns: int
    """Nanoseconds since 1970."""
    end_ns: int
    attributes: Attributes
    events: list[SpanEvent]
    links: list[SpanLink]
    error: str | None
    """The failure; None if there was none."""
    trace_state: str = ""
    num_dropped_events: int = 0


@dataclass(slots=True)
class OpenSpan:
    name: str
    kind: SpanKind
    span_id: str
    parent_span_id: str
    started_at_s: float
    attributes: dict[str, Attribute] = field(default_factory=dict)
    links: list[SpanLink] = field(default_factory=list)
    _events: list[tuple[str, float, Attributes]] = field(default_factory=list)
    _num_dropped_events: int = 0

    def add_event(self, name: str, at_s: float, **attributes: Attribute) -> None:
        if len(self._events) < MAX_EVENTS:
            self._events.append((name, at_s, attributes))
        else:
            self._num_dropped_events += 1

    def finish(
        self, trace_id: str, trace_state: str, wall_offset_s: float, ended_at_s: float, error: str | None
    ) -> FinishedSpan:
        return FinishedSpan(
            self.name,
            self.kind,
            trace_id,
            self.span_id,
            self.parent_span_id,
            start_ns=_wall_ns(self.started_at_s, wall_offset_s),
            end_ns=_wall_ns(max(self.started_at_s, ended_at_s), wall_offset_s),
            attributes=self.attributes,
            events=[SpanEvent(name, _wall_ns(at_s, wall_offset_s), given) for name, at_s, given in self._events],
            links=self.links,
            error=error,
            trace_state=trace_state,
            num_dropped_events=self._num_dropped_events,
        )


class RequestTrace:
    """`emit` takes each span when it has ended. `new_span_id` returns 16 hexadecimal digits that are unique."""

    def __init__(
        self,
        context: TraceContext,
        emit: Callable[[FinishedSpan], None],
        new_span_id: Callable[[], str],
        started_at_s: float,
        wall_offset_s: float,
        *,
        parent_span_id: str,
    ) -> None:
        assert context.is_sampled, "only sampled requests have a trace"
        self.trace_id = context.trace_id
        self._context = context
        self._emit, self._new_span_id, self._wall_offset_s = emit, new_span_id, wall_offset_s
        self._num_spans = 0
        self.server_span = OpenSpan("request", "server", new_span_id(), parent_span_id, started_at_s)

    @property
    def server_context(self) -> TraceContext:
        """The context of an attempt that this process makes itself. Its only span is the server span."""
        return self._with_attempt(self.server_span.span_id)

    def attempt_context(self, attempt: OpenSpan) -> TraceContext:
        """Returns the trace context that is sent with an attempt: the instance's spans become children of its span."""
        return self._with_attempt(attempt.span_id)

    def link_to(self, span: OpenSpan, trace_id: str, span_id: str, relation: str) -> None:
        span.links.append(SpanLink(trace_id, span_id, {"onward.link": relation}))

    def open_span(
        self, name: str, at_s: float, kind: SpanKind = "internal", *, parent: OpenSpan | None = None
    ) -> OpenSpan | None:
        """Opens a span below `parent`, or below the server span. Returns None if this request has too many spans
        already."""
        if self._num_spans >= MAX_SPANS:
            return None
        self._num_spans += 1
        return OpenSpan(name, kind, self._new_span_id(), (parent or self.server_span).span_id, at_s)

    def end_span(self, span: OpenSpan, at_s: float, error: str | None = None) -> None:
        if error is not None:
            span.attributes.setdefault("error.type", error)
        self._emit(span.finish(self.trace_id, self._context.trace_state, self._wall_offset_s, at_s, error))

    def _with_attempt(self, span_id: str) -> TraceContext:
        context = self._context
        return TraceContext(context.trace_id, True, span_id, context.client_span_id, context.trace_state)


class EnginePhaseSpans:
    """Spans for the phases of each choice in the engine: queue, prefill, decode, handoff. A handoff's span has those of the
    prefill instance below it. An event of the server span says why a phase ended early."""

    def __init__(self, trace: RequestTrace, request_ids: list[str]) -> None:
        self._trace = trace
        self._choices = {request_id: index for index, request_id in enumerate(request_ids)}
        self._open: dict[str, tuple[OpenSpan, int]] = {}
        """The span of the current phase and the number of output tokens when it began, by request id."""

    def receive(self, message: RequestPhases, now_s: float) -> None:
        if message.prefill_peer:
            self._emit_of_peer(message, now_s)
            return
        for change in message.changes:
            at_s = max(self._trace.server_span.started_at_s, now_s - change.ago_s)
            self._end(message.request_id, at_s, change.num_tokens, change.cause)
            self._begin(message.request_id, change.phase, at_s, change.num_tokens, change.num_cached_tokens)

    def engine_lost(self, now_s: float, cause: str) -> None:
        """Ends the open spans after the engine has died. The request waits for the next engine, with its tokens so
        far."""
        for request_id in list(self._open):
            self._end(request_id, now_s, None, "engine_crash")
        self._trace.server_span.add_event("onward.engine_crash", now_s, **{"onward.cause": cause})

    def close(self, now_s: float) -> None:
        """Ends all open spans, without an error, when the stream has ended in this process. The engine may not have
        reported the end of their phases. Further calls of `receive` would open new spans, so none may follow."""
        for request_id in list(self._open):
            self._end(request_id, now_s, None, "")

    def _emit_of_peer(self, message: RequestPhases, now_s: float) -> None:
        """Emits the spans of a prefill instance's share, below the span of the handoff. The last change ends them."""
        handoff, _ = self._open.get(message.request_id, (self._trace.server_span, 0))
        for change, following in pairwise(message.changes):
            start_s, end_s = (max(handoff.started_at_s, now_s - some.ago_s) for some in (change, following))
            span = self._trace.open_span(f"onward.peer.{change.phase}", start_s, parent=handoff)
            if span is None:
                return
            span.attributes |= {
                "onward.choice": self._choices.get(message.request_id, 0),
                "onward.prefill_instance": message.prefill_peer,
            }
            if change.phase == "prefill":
                span.attributes["gen_ai.usage.cache_read.input_tokens"] = change.num_cached_tokens
            self._trace.end_span(span, end_s, _failure(following.cause))

    def _begin(self, request_id: str, phase: EnginePhase, at_s: float, num_tokens: int, num_cached: int) -> None:
        if phase == "ended":
            return
        span = self._trace.open_span(f"onward.{phase}", at_s)
        if span is None:
            return
        span.attributes["onward.choice"] = self._choices.get(request_id, 0)
        if phase == "prefill":
            span.attributes["gen_ai.usage.cache_read.input_tokens"] = num_cached
        self._open[request_id] = span, num_tokens

    def _end(
        self, request_id: str, at_s: float, num_tokens: int | None, cause: PhaseCause | Literal["engine_crash"]
    ) -> None:
        if cause and cause != "engine_crash":
            choice = self._choices.get(request_id, 0)
            self._trace.server_span.add_event(f"onward.{cause}", at_s, **{"onward.choice": choice})
        opened = self._open.pop(request_id, None)
        if opened is None:
            return
        span, num_before = opened
        if num_tokens is not None and num_tokens > num_before:
            span.attributes["onward.tokens"] = num_tokens - num_before
        self._trace.end_span(span, at_s, _failure(cause))


def _failure(cause: str) -> str | None:
    """Returns the failure that ended a phase. A preemption is a decision, not a failure."""
    return None if cause in ("", "preemption") else cause


def _wall_ns(at_s: float, wall_offset_s: float) -> int:
    return round((at_s + wall_offset_s) * NANOSECONDS)
