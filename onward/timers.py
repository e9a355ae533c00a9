"""Timers for many keys, without checking every key in each turn.

A timer only means "not before then": the caller decides whether anything is due, and sets the next timer. So a time
that moves into the future, as most do with each message, costs nothing.
"""

from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

Key = TypeVar("Key")


class Timers(Generic[Key]):
    def __init__(self) -> None:
        self._at_s: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        """Includes entries that an earlier time or `cancel` has replaced. They are dropped when their time has come, or
        by `_compact`."""
        self._serials = count()

    def __len__(self) -> int:
        return len(self._at_s)

    def set_earliest(self, key: Key, at_s: float) -> None:
        """Makes `take_due` return this key at `at_s`, or earlier if its current timer is earlier."""
        current_s = self._at_s.get(key)
        if current_s is None or at_s < current_s:
            self._at_s[key] = at_s
            heappush(self._heap, (at_s, next(self._serials), key))
            self._compact()

    def cancel(self, key: Key) -> None:
        self._at_s.pop(key, None)

    def take_due(self, now_s: float) -> list[Key]:
        """Returns the keys with a time that has come, in order of time, and removes their timers."""
        keys: list[Key] = []
        while self._heap and self._heap[0][0] <= now_s:
            at_s, _, key = heappop(self._heap)
            if self._at_s.get(key) == at_s:
                del self._at_s[key]
                keys.append(key)
        return keys

    def _compact(self) -> None:
        """Drops replaced entries once there are over 64 more of them than valid ones, so that memory is bounded by the
        number of timers."""
        if len(self._heap) > 2 * len(self._at_s) + 64:
            self._heap = sorted(entry for entry in self._heap if self._at_s.get(entry[2]) == entry[0])
