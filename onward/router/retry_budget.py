"""How much the router may try again, so that an outage does not become a storm. Knows neither streams nor instances.

Two cases, since they deserve different answers:

* A stream is *owed* its first attempt after progress, and its first one after it has lost its instance, also if that had
  not come to a token yet: what it waited for there, in a queue or in a long prompt, has died with many others' at once,
  and a share of the traffic would refuse most of them. These are never refused, only spread out.
* Any further attempt without a token in between, and any that follows on an error of an instance that lives, is counted
  against a share of its caller's requests of the last minute, and may be refused. One caller's failing requests use up
  no other caller's retries.

So in the worst outage, where whatever is tried is lost, each request costs two attempts and the share, not all that its
own count would allow; and instances that answer with errors, as they do when there is too much, get the share alone.
"""

from collections import deque
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
    """How often something has happened, counted by seconds, so that its size does not depend on the traffic."""

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
    """Bounds retries per caller, to a share of the caller's own requests. All callers together have one pace for attempts
    that are owed."""

    def __init__(self, share: float, *, floor: int = MIN_RETRIES_PER_WINDOW) -> None:
        self._share = share
        self._floor = floor
        self._by_caller: dict[str, _CallerCounters] = {}
        self._next_cleanup_s = 0.0
        self._next_slot_s: float | None = None

    @property
    def num_callers(self) -> int:
        """Callers that are counted now: those of the last two minutes at most."""
        return len(self._by_caller)

    def record_request(self, caller: str, now_s: float) -> None:
        """A client's request has come."""
        counters = self._counters_of(caller, now_s)
        counters.requests.count(now_s)
        counters.requests.add(now_s)

    def try_spend(self, caller: str, now_s: float) -> bool:
        """Whether an attempt of this caller may begin that is not owed. If so, it is counted."""
        counters = self._counters_of(caller, now_s)
        allowed = max(self._floor, self._share * counters.requests.count(now_s))
        if counters.attempts.count(now_s) + 1 > allowed:
            return False
        counters.attempts.add(now_s)
        return True

    def pacing_delay_s(self, now_s: float) -> float:
        """How long an attempt that is owed should wait: the more of them at once, the longer, up to a bound."""
        interval_s = 1 / PACED_PER_S
        slot_s = max(now_s, self._next_slot_s if self._next_slot_s is not None else now_s)
        wait_s = max(0.0, slot_s - now_s - (PACE_BURST - 1) * interval_s)
        if wait_s >= MAX_PACE_S:
            return MAX_PACE_S
        self._next_slot_s = slot_s + interval_s
        return wait_s

    def _counters_of(self, caller: str, now_s: float) -> _CallerCounters:
        if now_s >= self._next_cleanup_s:
            self._by_caller = {name: one for name, one in self._by_caller.items() if not one.is_idle(now_s)}
            self._next_cleanup_s = now_s + WINDOW_S
        return self._by_caller.setdefault(caller, _CallerCounters())
