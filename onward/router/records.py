"""Streams whose client has gone, or may not have seen the end: kept for a while, within bounds, so that it can return.

Takes the time; does no I/O.
"""

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass

from onward.router.stream import Origin, Stream

MAX_RECORDS = 4096
MAX_RECORD_BYTES = 256 << 20
TOMBSTONE_S = 60.0
MAX_TOMBSTONES = 16384


@dataclass(frozen=True, slots=True)
class _Kept:
    stream: Stream
    until_s: float
    num_bytes: int


class Records:
    def __init__(self, ttl_s: float, max_records: int = MAX_RECORDS, max_bytes: int = MAX_RECORD_BYTES) -> None:
        self._ttl_s = ttl_s
        self._max_records, self._max_bytes = max_records, max_bytes
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        """All live equally long, so the oldest is also the first to go."""
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, stream: Stream, now_s: float) -> None:
        self.drop(stream.request_id)
        kept = _Kept(stream, now_s + self._ttl_s, stream.size_bytes())
        self._kept[stream.request_id] = kept
        self._num_bytes += kept.num_bytes
        while len(self._kept) > self._max_records or self._num_bytes > self._max_bytes:
            self.drop(next(iter(self._kept)))

    def find(self, request_id: str, now_s: float) -> Stream | None:
        self.expire(now_s)
        kept = self._kept.get(request_id)
        return kept.stream if kept else None

    def drop(self, request_id: str) -> bool:
        kept = self._kept.pop(request_id, None)
        if kept is None:
            return False
        self._num_bytes -= kept.num_bytes
        return True

    def drop_meant(self, names: Set[str] | None, caller: str | None) -> list[Origin]:
        """Those that go by one of these names, or all; a caller's own, or everybody's. Returns whose they were."""
        dropped = [one.stream.origin for one in self._kept.values() if is_meant(one.stream.origin, names, caller)]
        for origin in dropped:
            self.drop(origin.request_id)
        return dropped

    def expire(self, now_s: float) -> None:
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if oldest.until_s > now_s:
                return
            self.drop(oldest.stream.request_id)


def is_meant(origin: Origin, names: Set[str] | None, caller: str | None) -> bool:
    """By an id or a label, None: by any; among a caller's own, None: among everybody's."""
    own = {origin.request_id, origin.label} - {""}
    return caller in (None, origin.caller) and (names is None or not names.isdisjoint(own))


class Tombstones:
    """Requests that were aborted: nothing may bring them back while an attempt at them may still be on its way."""

    def __init__(self) -> None:
        self._until_s: OrderedDict[str, float] = OrderedDict()

    def add(self, request_id: str, now_s: float) -> None:
        self._until_s[request_id] = now_s + TOMBSTONE_S
        self._until_s.move_to_end(request_id)
        while len(self._until_s) > MAX_TOMBSTONES:
            self._until_s.popitem(last=False)

    def has(self, request_id: str, now_s: float) -> bool:
        return self._until_s.get(request_id, now_s) > now_s
