"""Whether other instances could take over this one's streams, as its routers have said last."""

from onward.clock import Clock
from onward.obs.metrics import LabelValues

MAX_AGE_S = 10.0
"""A router that has said nothing for so long does not count."""
MAX_ROUTERS = 64


class OtherInstanceCounts:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._said: dict[str, tuple[int, float]] = {}

    def record(self, router: str, num_others: int) -> None:
        """`router`: its incarnation. A negative number says nothing: the router does not know the field."""
        self._said.pop(router, None)
        while len(self._said) >= MAX_ROUTERS:
            del self._said[next(iter(self._said))]
        if num_others >= 0:
            self._said[router] = num_others, self._clock.now_s()

    def by_router(self) -> dict[LabelValues, float]:
        oldest_s = self._clock.now_s() - MAX_AGE_S
        return {(router,): float(num) for router, (num, said_s) in self._said.items() if said_s >= oldest_s}

    @property
    def is_only_instance(self) -> bool:
        """Every router that was heard lately knows no instance but this one. False where none was heard."""
        said = self.by_router().values()
        return bool(said) and not any(said)
