"""Which streams were carried on, why, and how long their clients had to wait. Counts, logs, and remembers the last ones."""

import logging
from collections import deque
from typing import Any

from onward import log
from onward.router.route import Resuming, Route
from onward.router.router_metrics import RouterMetrics
from onward.router.stream import Cause

_logger = logging.getLogger(__name__)

NUM_SHOWN = 64


class Resumes:
    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._last: deque[dict[str, Any]] = deque(maxlen=NUM_SHOWN)

    def begin(self, route: Route, cause: Cause, instance: str, now_s: float) -> None:
        """The pause began with the last delivered event; several failures in a row are one pause."""
        if route.resuming is None and route.stream.accepted_once:
            since_s = route.stream.delivered_s
            route.resuming = Resuming(cause, instance, now_s if since_s is None else since_s)

    def end(self, route: Route, outcome: str, now_s: float) -> None:
        """`exact`, `inexact` (by other numerics) or `failed`."""
        resuming, stream = route.resuming, route.stream
        assert resuming is not None, "only what was begun can end"
        route.resuming = None
        stream.num_resumes += 1
        pause_s = now_s - resuming.since_s
        self._metrics.resumes.inc(resuming.cause.value, outcome)
        if outcome != "failed":
            self._metrics.pause.observe(pause_s)
        told = {
            "request_id": stream.request_id,
            "cause": resuming.cause.value,
            "outcome": outcome,
            "from": resuming.left,
            "to": stream.instance if outcome != "failed" else None,
            "positions": [len(choice.token_ids) for choice in stream.choices],
            "pause_s": round(pause_s, 4),
        }
        level = logging.INFO if outcome == "exact" else logging.WARNING
        _logger.log(level, log.event("stream resumed", **told))
        self._last.append(told | {"at_s": now_s})

    def shown(self, now_s: float) -> list[dict[str, Any]]:
        """Oldest first."""
        return [
            {key: value for key, value in one.items() if key != "at_s"} | {"ago_s": round(now_s - one["at_s"], 3)}
            for one in self._last
        ]
