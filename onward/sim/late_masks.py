"""How a simulated worker makes masks: at once, or a step too late, as chance has it. Threads would not be repeatable."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from onward.sim.chance import Chance

LATE_RATE = 0.15


class LateMasks(Executor):
    def __init__(self, chance: Chance | None = None) -> None:
        self._chance = chance
        """None: nothing is late."""
        self._late: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        work = (future, lambda: fn(*args, **kwargs))
        if self._chance is not None and self._chance.happens(LATE_RATE):
            self._late.append(work)
        else:
            _do(*work)
        return future

    def catch_up(self) -> None:
        late, self._late = self._late, []
        for work in late:
            _do(*work)


def _do(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except Exception as fault:
        future.set_exception(fault)
