"""Whether other instances could take over this one's streams, as its routers have said last."""

from onward.clock import Clock
from onward.obs.metrics import LabelValues

MAX_AGE_S = 10.0
"""A router that has said nothing for so long does not count."""
MAX_ROUTERS = 64


class OtherInstanceCounts:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._counts: dict[str, tuple[int, float]] = {}

    def record(self, router: str, num_others: int) -> None:
        """`router`: its incarnation. A negative number says nothing: the router does not know the field."""
        self._counts.pop(router, None)
        while len(self._counts) >= MAX_ROUTERS:
            del self._counts[next(iter(self._counts))]
        if num_others >= 0:
            self._counts[router] = num_others, self._clock.now_s()

    def by_router(self) -> dict[LabelValues, float]:
        oldest_s = self._clock.now_s() - MAX_AGE_S
        return {
            (router,): float(num_others)
            for router, (num_others, recorded_at_s) in self._counts.items()
            if recorded_at_s >= oldest_s
        }

    @property
    def is_only_instance(self) -> bool:
        """Every router that was heard lately knows no instance but this one. False where none was heard."""
        counts = self.by_router().values()
        return bool(counts) and not any(counts)
