"""How a simulated worker makes masks: at once, or a step too late, as chance has it. Threads would not be repeatable."""

from collections.abc import Callable
from concurrent.futures import Future

from onward.grammar.matcher import Mask
from onward.sim.chance import Chance
from onward.worker.mask_making import NextMask, made_at_once

LATE_RATE = 0.15


class LateMasks:
    def __init__(self, chance: Chance | None = None) -> None:
        self._chance = chance
        """None: nothing is late."""
        self._late: list[tuple[Future[Mask], Callable[[], Mask]]] = []

    def make(self, work: Callable[[], Mask], likely_s: float) -> NextMask:
        if self._chance is None or not self._chance.happens(LATE_RATE):
            return made_at_once(work)
        future: Future[Mask] = Future()
        self._late.append((future, work))
        return future

    def catch_up(self) -> None:
        late, self._late = self._late, []
        for future, work in late:
            made = made_at_once(work)
            if made.mask is None:
                future.set_exception(made.fault)
            else:
                future.set_result(made.mask)
