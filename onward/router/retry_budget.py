"""Limits retries, so that an outage does not become a retry storm. Knows neither streams nor instances.

There are two cases:

* Owed attempts are never refused, only spread over time. A stream is owed its first attempt after progress, and its first
  attempt after it has lost its instance, also without any token. Many streams lose their instance at once, and a share of
  the traffic would refuse most of them.
* Every other attempt counts against a share of its caller's requests of the last minute, and may be refused: further
  attempts without a token in between, and attempts after an error of an instance that is alive. One caller's failing
  requests use up no other caller's retries.

In the worst outage, in which every attempt is lost, each request costs two attempts and its part of the share. Overloaded
instances, which answer with errors, get only the share.
"""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

WINDOW_S = 60.0
MIN_RETRIES_PER_WINDOW = 10
"""Attempts that each caller has in any case: a share of few requests would be none."""

PACED_PER_S = 50.0
PACE_BURST = 16
"""Resumes that start at once; those of one small instance do not wait at all."""
MAX_PACE_S = 2.0


@dataclass(slots=True)
class _SecondCount:
    number: int
    count: int


class _SlidingCounter:
    """Counts how often something has happened in the last `WINDOW_S`, second by second, so that its size does not
    depend on the traffic."""

    def __init__(self) -> None:
        self._seconds: deque[_SecondCount] = deque()
        self._total = 0

    def add(self, now_s: float) -> None:
        if not self._seconds or self._seconds[-1].number < int(now_s):
            self._seconds.append(_SecondCount(int(now_s), 0))
        self._seconds[-1].count += 1
        self._total += 1

    def count(self, now_s: float) -> int:
        while self._seconds and self._seconds[0].number <= now_s - WINDOW_S:
            self._total -= self._seconds.popleft().count
            assert self._total >= 0, "only what was counted is removed"
        return self._total


@dataclass(slots=True)
class _CallerCounters:
    requests: _SlidingCounter = field(default_factory=_SlidingCounter)
    attempts: _SlidingCounter = field(default_factory=_SlidingCounter)

    def is_idle(self, now_s: float) -> bool:
        return not (self.requests.count(now_s) or self.attempts.count(now_s))


class RetryBudget:
    """Bounds retries per caller and model, to a share of the caller's own requests for that model: a version that fails
    uses up no retries of another one. All together have one pace for attempts that are owed."""

    def __init__(self, share: float, *, floor: int = MIN_RETRIES_PER_WINDOW) -> None:
        self._share = share
        self._floor = floor
        self._by_caller: dict[Hashable, _CallerCounters] = {}
        self._next_cleanup_s = 0.0
        self._next_slot_s: float | None = None

    @property
    def num_callers(self) -> int:
        """Callers that are counted now: those of the last two minutes at most."""
        return len(self._by_caller)

    def record_request(self, key: Hashable, now_s: float) -> None:
        """Counts a client's request, which allows more retries. `key`: its caller and model."""
        counters = self._counters_of(key, now_s)
        counters.requests.count(now_s)
        counters.requests.add(now_s)

    def try_spend(self, key: Hashable, now_s: float) -> bool:
        """Returns whether the budget of this caller and model allows a retry, and counts the retry if so. Retries after
        progress or after the first lost instance need no budget; `pacing_delay_s` spaces them out."""
        counters = self._counters_of(key, now_s)
        allowed = max(self._floor, self._share * counters.requests.count(now_s))
        if counters.attempts.count(now_s) + 1 > allowed:
            return False
        counters.attempts.add(now_s)
        return True

    def pacing_delay_s(self, now_s: float) -> float:
        """Returns how long a retry without budget must wait, and takes its place in the queue. The more retries come at
        once, the longer the delay, up to `MAX_PACE_S`."""
        interval_s = 1 / PACED_PER_S
        slot_s = max(now_s, self._next_slot_s if self._next_slot_s is not None else now_s)
        wait_s = max(0.0, slot_s - now_s - (PACE_BURST - 1) * interval_s)
        if wait_s >= MAX_PACE_S:
            return MAX_PACE_S
        self._next_slot_s = slot_s + interval_s
        return wait_s

    def _counters_of(self, key: Hashable, now_s: float) -> _CallerCounters:
        if now_s >= self._next_cleanup_s:
            self._by_caller = {name: one for name, one in self._by_caller.items() if not one.is_idle(now_s)}
            self._next_cleanup_s = now_s + WINDOW_S
        return self._by_caller.setdefault(key, _CallerCounters())
