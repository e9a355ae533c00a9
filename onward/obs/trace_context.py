"""Trace ids, parsing and writing of the W3C Trace Context headers (`traceparent`, `tracestate`), and the sampling
decision. Takes and returns data."""

import hashlib
import re
from dataclasses import dataclass

from onward.proto.trace import MAX_TRACE_STATE, TraceContext

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
SAMPLED = 0x01
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_SAMPLER_BITS = 64


def parse_traceparent(traceparent: str | None, tracestate: str | None = None) -> TraceContext | None:
    """Returns the context of a client's headers, or None if the header is missing or invalid. The request then begins a
    trace of its own."""
    match = _TRACEPARENT.fullmatch(traceparent.strip()) if traceparent else None
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    state = (tracestate or "").strip()
    is_usable = len(state) <= MAX_TRACE_STATE and state.isascii() and state.isprintable()
    return TraceContext(trace_id, bool(int(flags, 16) & SAMPLED), span_id, span_id, state if is_usable else "")


def trace_headers(context: TraceContext) -> dict[str, str]:
    """Returns the headers of an HTTP request that belongs to the span of `context`, so that proxies on the way can join
    its trace."""
    if not context.span_id:
        return {}
    headers = {TRACEPARENT: f"00-{context.trace_id}-{context.span_id}-{SAMPLED if context.is_sampled else 0:02x}"}
    return headers | ({TRACESTATE: context.trace_state} if context.trace_state else {})


def trace_id_of_request(request_id: str) -> str:
    """Returns the trace id of a request whose client sent none. It is the request id itself if that is a valid trace
    id (32 lower-case hexadecimal digits, not all 0), else a hash of it. Every process that continues the stream
    therefore derives the same id."""
    if _TRACE_ID.fullmatch(request_id) and request_id != _NO_TRACE:
        return request_id
    return hashlib.blake2b(request_id.encode(), digest_size=16).hexdigest()


def trace_id_in_cursor(request_id: str, context: TraceContext | None) -> str:
    """Returns the trace id for a stream's cursors. It is empty unless the trace is sampled and has another id than the
    request."""
    if context is None or not context.is_sampled or context.trace_id == trace_id_of_request(request_id):
        return ""
    return context.trace_id


@dataclass(frozen=True, slots=True)
class TraceSampler:
    """Samples as OpenTelemetry's `parentbased_traceidratio` and `traceidratio` do: by a function of the trace id, so
    that every process decides alike."""

    ratio: float = 1.0
    """Share of the traces that begin here and are sampled."""
    is_parent_based: bool = True
    """Whether a client's own decision is followed."""

    def is_sampled(self, trace_id: str, parent: TraceContext | None) -> bool:
        if parent is not None and self.is_parent_based:
            return parent.is_sampled
        return int(trace_id[-_SAMPLER_BITS // 4 :], 16) < round(self.ratio * (1 << _SAMPLER_BITS))
