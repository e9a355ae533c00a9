"""The spans of a router's attempts at one traced request: which instance, how it ended, and a link to the attempt before.

The link is the request's own trace context, which travels with the stream: so the first attempt of another router, after
this one has died, links to the last one made here.
"""

from dataclasses import replace

from msgspec.structs import replace as replace_fields

from onward.obs.request_trace import OpenSpan, RequestTrace
from onward.router.client_stream import ClientStream
from onward.router.core import Dispatch

NAME = "onward.attempt"


def begin_attempt(
    trace: RequestTrace, stream: ClientStream, dispatch: Dispatch, now_s: float
) -> tuple[OpenSpan | None, Dispatch]:
    """Opens the attempt's span and returns it with the dispatch, whose attempt now carries the span's trace context.
    Stores this context in the stream's request too, so that the next attempt links to this one. If the request has too
    many spans, returns None and the dispatch unchanged."""
    attempt, previous = dispatch.attempt, stream.request.trace
    span = trace.open_span(NAME, now_s, "client")
    if span is None:
        return None, dispatch
    span.attributes |= {
        "onward.attempt": attempt.attempt_epoch,
        "onward.instance": dispatch.instance_id,
        "url.full": dispatch.url,
        "onward.tokens_before": stream.num_tokens,
    }
    if previous is not None and previous.span_id:
        trace.link_to(span, previous.trace_id, previous.span_id, "previous attempt")
    context = trace.attempt_context(span)
    stream.request = replace(stream.request, trace=context)
    return span, replace(dispatch, attempt=replace_fields(attempt, trace=context))


def end_attempt(trace: RequestTrace, span: OpenSpan, stream: ClientStream, now_s: float) -> None:
    tokens_before = span.attributes["onward.tokens_before"]
    assert isinstance(tokens_before, int), "set when the attempt began"
    span.attributes["onward.tokens"] = stream.num_tokens - tokens_before
    failure = stream.failure
    if failure is not None:
        span.attributes["onward.failure"] = failure.cause.value
        span.attributes["error.type"] = failure.error.code
    trace.end_span(span, now_s, None if failure is None else failure.cause.value)
