"""How a simulated worker makes masks: at once, or a step too late, as chance has it. Threads would not be repeatable."""

from collections.abc import Callable
from concurrent.futures import Future

from onward.grammar.matcher import TokenBitmask
from onward.sim.seeded_random import SeededRandom
from onward.worker.logits_processors.mask_executor import NextMask, compute_inline

LATE_RATE = 0.15


class DelayedMaskMaker:
    def __init__(self, random: SeededRandom | None = None) -> None:
        self._random = random
        """None: nothing is late."""
        self._late: list[tuple[Future[TokenBitmask], Callable[[], TokenBitmask]]] = []

    def submit(self, compute: Callable[[], TokenBitmask], expected_s: float) -> NextMask:
        if self._random is None or not self._random.happens(LATE_RATE):
            return compute_inline(compute)
        future: Future[TokenBitmask] = Future()
        self._late.append((future, compute))
        return future

    def catch_up(self) -> None:
        late, self._late = self._late, []
        for future, compute in late:
            result = compute_inline(compute)
            if result.mask is None:
                future.set_exception(result.fault)
            else:
                future.set_result(result.mask)
