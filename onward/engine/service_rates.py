"""Measured service rates of the last seconds, from which Retry-After is computed.

Keeps one sum of amounts for each second of a short window. Knows nothing of requests, and reads no clock.
"""

from collections import deque
from dataclasses import dataclass, field
from math import floor

WINDOW_S = 10


class RecentRate:
    """Rate of one kind of work. Times never go backwards."""

    def __init__(self) -> None:
        self._sums: deque[tuple[int, float]] = deque()
        """The second, and what was done in it; seconds without any work are left out."""

    def add(self, amount: float, now_s: float) -> None:
        second = floor(now_s)
        if self._sums and self._sums[-1][0] == second:
            amount += self._sums.pop()[1]
        self._sums.append((second, amount))
        self._drop_old(now_s)

    def per_s(self, now_s: float) -> float | None:
        """Returns the mean rate over the window, or None if nothing was done within it: the rate is then unknown."""
        self._drop_old(now_s)
        if not self._sums:
            return None
        # A whole second at least: the first moments of a burst are no rate.
        seconds = max(1.0, now_s - self._sums[0][0])
        return sum(amount for _, amount in self._sums) / seconds

    def _drop_old(self, now_s: float) -> None:
        while self._sums and self._sums[0][0] < now_s - WINDOW_S:
            self._sums.popleft()


@dataclass(slots=True, frozen=True)
class ServiceRates:
    """The rates at which the queue is served."""

    prompt_tokens: RecentRate = field(default_factory=RecentRate)
    """Prompt tokens whose KV became available for the first time: computed, cached or brought by a peer."""
    freed_slots: RecentRate = field(default_factory=RecentRate)
    """Slots that a request left at its end."""
