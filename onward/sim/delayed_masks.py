"""How a simulated worker makes masks: at once, or a step too late, as chance has it. Threads would not be repeatable."""

from collections.abc import Callable
from concurrent.futures import Future

from onward.grammar.matcher import TokenBitmask
from onward.sim.seeded_random import SeededRandom
from onward.worker.logits_processors.mask_executor import NextMask, compute_inline

LATE_RATE = 0.15


class DelayedMaskMaker:
    def __init__(self, chance: SeededRandom | None = None) -> None:
        self._chance = chance
        """None: nothing is late."""
        self._late: list[tuple[Future[TokenBitmask], Callable[[], TokenBitmask]]] = []

    def submit(self, work: Callable[[], TokenBitmask], likely_s: float) -> NextMask:
        if self._chance is None or not self._chance.happens(LATE_RATE):
            return compute_inline(work)
        future: Future[TokenBitmask] = Future()
        self._late.append((future, work))
        return future

    def catch_up(self) -> None:
        late, self._late = self._late, []
        for future, work in late:
            made = compute_inline(work)
            if made.mask is None:
                future.set_exception(made.fault)
            else:
                future.set_result(made.mask)
