"""Resumed streams: the cause of each resume, and the pause for the client. Counts, logs and keeps the last ones."""

import logging
from collections import deque
from typing import Any

from onward import log
from onward.obs.request_trace import RequestTrace
from onward.router.client_stream import FailureCause
from onward.router.router_metrics import RouterMetrics
from onward.router.stream_routing_state import PendingResume, StreamRoutingState

_logger = logging.getLogger(__name__)

MAX_ENTRIES = 64


class ResumeLog:
    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._last: deque[dict[str, Any]] = deque(maxlen=MAX_ENTRIES)

    def begin(self, routing: StreamRoutingState, cause: FailureCause, instance: str, now_s: float) -> None:
        """Begins a resume of a stream that an instance had accepted, unless one is pending. The pause counts from the
        last delivered event, so several failures in a row are one pause."""
        if routing.pending_resume is None and routing.stream.was_accepted:
            since_s = routing.stream.last_delivery_at_s
            routing.pending_resume = PendingResume(cause, instance, now_s if since_s is None else since_s)

    def end(self, routing: StreamRoutingState, outcome: str, now_s: float) -> None:
        """Ends the pending resume of a stream: counts, logs and keeps it. One must have begun. `outcome`: `exact`,
        `inexact` (by other numerics) or `failed`."""
        pending, stream = routing.pending_resume, routing.stream
        assert pending is not None, "only a resume that has begun ends"
        assert outcome in ("exact", "inexact", "failed"), "a resume has one of three outcomes"
        routing.pending_resume = None
        stream.num_resumes += 1
        pause_s = now_s - pending.paused_since_s
        self._metrics.resumes.inc(pending.cause.value, outcome)
        if outcome != "failed":
            self._metrics.pause.observe(pause_s)
        entry = {
            "cause": pending.cause.value,
            "outcome": outcome,
            "from": pending.from_instance,
            "to": stream.instance_id if outcome != "failed" else None,
            "positions": [len(choice.token_ids) for choice in stream.choices],
            "pause_s": round(pause_s, 4),
        }
        if routing.trace is not None:
            _add_event(routing.trace, entry, now_s)
        level = logging.INFO if outcome == "exact" else logging.WARNING
        request_fields = log.request_fields(stream.request_id, stream.request.client_request_id)
        _logger.log(level, log.event("stream resumed", **request_fields, **entry))
        self._last.append({"request_id": stream.request_id} | entry | {"at_s": now_s})

    def recent(self, now_s: float) -> list[dict[str, Any]]:
        """Returns the last resumes, oldest first, with the age of each in seconds."""
        return [
            {key: value for key, value in entry.items() if key != "at_s"} | {"ago_s": round(now_s - entry["at_s"], 3)}
            for entry in self._last
        ]


def _add_event(trace: RequestTrace, entry: dict[str, Any], now_s: float) -> None:
    fields = {name: value for name, value in entry.items() if isinstance(value, str | float)}
    attributes = {f"onward.resume.{name}": value for name, value in fields.items()}
    positions = ("onward.resume.positions", tuple(str(position) for position in entry["positions"]))
    trace.server_span.add_event("onward.resume", now_s, **attributes, **dict([positions]))
