"""What this process remembers of a full queue, so that a flood of requests costs little.

When the engine has turned a request away because too many wait, the next ones are told the same here, for a moment, before
their bodies are looked at. They would be tokenized only to hear it from the engine. Those who have a place already are not
concerned, and limits of single callers are not remembered.
"""

from onward.api.engine_link.engine_client import OutputCollector
from onward.clock import Clock
from onward.obs.metrics import Registry
from onward.proto.engine import ErrorInfo
from onward.web.error_format import RequestFailed

HOLD_S = 0.1
"""Less than it takes to empty any queue that was full: nobody who could be served is turned away for long."""
OVERLOADED_CODE = "overloaded"


class LoadShedder:
    def __init__(self, clock: Clock, registry: Registry, hold_s: float = HOLD_S) -> None:
        self._clock, self._hold_s = clock, hold_s
        self._refusal: ErrorInfo | None = None
        self._until_s = 0.0
        self._turned_away = registry.counter(
            "onward_early_refusals_total",
            "New requests turned away without asking the engine, whose queue was just full",
        )

    def record_refusal(self, refusal: ErrorInfo) -> None:
        """The engine has said this to a new request."""
        if refusal.code == OVERLOADED_CODE:
            self._refusal, self._until_s = refusal, self._clock.now_s() + self._hold_s

    async def wait_accepted(self, collector: OutputCollector) -> None:
        """Waits until the engine has taken a request. What it refuses is noted."""
        try:
            await collector.wait_accepted()
        except RequestFailed as failure:
            self.record_refusal(failure.info)
            raise

    def check(self) -> None:
        """Raises what the engine has just said."""
        if self._refusal is not None and self._clock.now_s() < self._until_s:
            self._turned_away.inc()
            raise RequestFailed(self._refusal)
