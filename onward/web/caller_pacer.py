"""Rates at which one caller may use a process that all callers share. Takes times and names, and never waits itself.

Callers share the time of an api process, and both body bytes and refusals cost time: megabytes are copied and decoded
while nothing else runs, and a refused request is parsed, tokenized and sent to the engine first. So each caller has a
rate for both.
"""

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PacingRate:
    per_s: float
    burst: float
    """Amount that a caller may use at once after a pause, without any wait."""
    max_wait_s: float


REFUSAL_RATE = PacingRate(per_s=20.0, burst=50.0, max_wait_s=5.0)
"""Rate of requests that are refused because of a limit of their own caller."""
BODY_BYTE_RATE = PacingRate(per_s=32 << 20, burst=1 << 20, max_wait_s=60.0)
"""Rate of body bytes, without the first `UNPACED_BODY_BYTES` of each body."""
UNPACED_BODY_BYTES = 64 << 10
MAX_BUFFERED_BODY_BYTES = 64 << 20
"""Limit on the bytes of one caller's bodies that are being received."""
MAX_PACED_REQUESTS = 256
"""Requests of one caller that may wait because earlier ones were refused."""


class CallerPacer:
    """Delays a caller that goes on faster than its rate, and never refuses it (the generic cell rate algorithm). Meters
    body bytes and refused requests. Limits that refuse are in `engine.caller_limiter`."""

    def __init__(self, rate: PacingRate) -> None:
        self._rate = rate
        self._paid_at_s: dict[str, float] = {}
        """When the rate has made up for all that the caller has used. At most one entry for each API key."""

    def wait_s(self, caller: str, now_s: float) -> float:
        """Returns how long this caller has to wait for its next step."""
        paid_at_s = self._paid_at_s.get(caller, now_s)
        if paid_at_s <= now_s:
            self._paid_at_s.pop(caller, None)
        return max(0.0, paid_at_s - now_s - self._rate.burst / self._rate.per_s)

    def charge(self, caller: str, amount: float, now_s: float) -> None:
        rate, paid_at_s = self._rate, max(now_s, self._paid_at_s.get(caller, now_s))
        latest_s = now_s + rate.burst / rate.per_s + rate.max_wait_s
        self._paid_at_s[caller] = min(paid_at_s + amount / rate.per_s, latest_s)

    def refund(self, caller: str, amount: float) -> None:
        if caller in self._paid_at_s:
            self._paid_at_s[caller] -= amount / self._rate.per_s


class RefusalPacer:
    """Decides which requests wait before they are processed: the requests of callers that were refused too often."""

    def __init__(self, rate: PacingRate = REFUSAL_RATE, max_waiting: int = MAX_PACED_REQUESTS) -> None:
        self._rates = CallerPacer(rate)
        self._max_waiting = max_waiting
        self._waiting: Counter[str] = Counter()

    def is_full(self, caller: str, now_s: float) -> bool:
        """Returns whether as many requests of this caller wait as may."""
        return self._waiting[caller] >= self._max_waiting and self._rates.wait_s(caller, now_s) > 0

    def start_wait(self, caller: str, now_s: float) -> float:
        """Returns how long a new request waits. A request that waits is charged now, so that waiting requests continue
        one by one."""
        wait_s = self._rates.wait_s(caller, now_s)
        if wait_s:
            self._rates.charge(caller, 1, now_s)
            self._waiting[caller] += 1
        return wait_s

    def end_wait(self, caller: str) -> None:
        """Ends the wait of one request."""
        self._waiting[caller] -= 1
        if not self._waiting[caller]:
            del self._waiting[caller]

    def finish_request(self, caller: str, now_s: float, *, has_waited: bool, is_refused: bool) -> None:
        if is_refused and not has_waited:
            self._rates.charge(caller, 1, now_s)
        elif has_waited and not is_refused:
            self._rates.refund(caller, 1)


class BodyMemoryLimit:
    """Limits the bytes of bodies that are being received, by caller. Any hashable object can identify a body."""

    def __init__(self, max_bytes: int = MAX_BUFFERED_BODY_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held: dict[str, dict[object, int]] = {}
        """Bytes of each body, in the order in which the bodies became large."""

    def try_reserve(self, caller: str, body: object, num_bytes: int) -> bool:
        """Returns whether `num_bytes` more of this body may be received now. The oldest body always may, whatever its
        size, so that bodies never wait for each other."""
        bodies = self._held.setdefault(caller, {})
        bodies.setdefault(body, 0)
        if sum(bodies.values()) + num_bytes > self._max_bytes and next(iter(bodies)) != body:
            return False
        bodies[body] += num_bytes
        return True

    def release(self, caller: str, body: object) -> None:
        """Releases a body that has arrived, or that its client has abandoned."""
        bodies = self._held.get(caller, {})
        bodies.pop(body, None)
        if not bodies:
            self._held.pop(caller, None)
