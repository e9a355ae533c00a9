"""Which streams were carried on, why, and how long their clients had to wait. Counts, logs, and remembers the last ones."""

import logging
from collections import deque
from typing import Any

from onward import log
from onward.router.client_stream import FailureCause
from onward.router.routed_stream import PendingResume, RoutedStream
from onward.router.router_metrics import RouterMetrics

_logger = logging.getLogger(__name__)

MAX_ENTRIES = 64


class ResumeLog:
    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._last: deque[dict[str, Any]] = deque(maxlen=MAX_ENTRIES)

    def begin(self, route: RoutedStream, cause: FailureCause, instance: str, now_s: float) -> None:
        """The pause began with the last delivered event; several failures in a row are one pause."""
        if route.pending_resume is None and route.stream.was_accepted:
            since_s = route.stream.last_delivery_at_s
            route.pending_resume = PendingResume(cause, instance, now_s if since_s is None else since_s)

    def end(self, route: RoutedStream, outcome: str, now_s: float) -> None:
        """`exact`, `inexact` (by other numerics) or `failed`."""
        resuming, stream = route.pending_resume, route.stream
        assert resuming is not None, "only what was begun can end"
        route.pending_resume = None
        stream.num_resumes += 1
        pause_s = now_s - resuming.paused_since_s
        self._metrics.resumes.inc(resuming.cause.value, outcome)
        if outcome != "failed":
            self._metrics.pause.observe(pause_s)
        told = {
            "request_id": stream.request_id,
            "cause": resuming.cause.value,
            "outcome": outcome,
            "from": resuming.from_instance,
            "to": stream.instance_id if outcome != "failed" else None,
            "positions": [len(choice.token_ids) for choice in stream.choices],
            "pause_s": round(pause_s, 4),
        }
        level = logging.INFO if outcome == "exact" else logging.WARNING
        _logger.log(level, log.event("stream resumed", **told))
        self._last.append(told | {"at_s": now_s})

    def recent(self, now_s: float) -> list[dict[str, Any]]:
        """Oldest first."""
        return [
            {key: value for key, value in one.items() if key != "at_s"} | {"ago_s": round(now_s - one["at_s"], 3)}
            for one in self._last
        ]
