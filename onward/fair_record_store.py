"""Records by id, each with a caller, a size and an expiry time, within bounds on their number and their bytes.

If a bound is exceeded, the caller that uses most of it loses its oldest record. So a caller that uses less than an
equal share of a bound never loses a record to another caller, and a single caller may use all of it. The time is passed
in, and there is no I/O.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RecordLimits:
    max_records: int = 512
    max_bytes: int = 32 << 20


@dataclass(frozen=True, slots=True)
class _StoredRecord(Generic[T]):
    value: T
    caller: str
    num_bytes: int
    expires_at_s: float


@dataclass(slots=True)
class _CallerUsage:
    """The records of one caller, and their total size."""

    ids: OrderedDict[str, None] = field(default_factory=OrderedDict[str, None])
    """Oldest first."""
    num_bytes: int = 0


class FairRecordStore(Generic[T]):
    def __init__(self, limits: RecordLimits) -> None:
        self.num_bytes = 0
        self._limits = limits
        self._records: dict[str, _StoredRecord[T]] = {}
        self._usage: dict[str, _CallerUsage] = {}
        self._next_expiry_s = math.inf
        """No record expires before this time."""

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, record_id: str) -> bool:
        return record_id in self._records

    def values(self) -> Iterator[T]:
        return (record.value for record in self._records.values())

    def get(self, record_id: str, now_s: float) -> T | None:
        record = self._records.get(record_id)
        return record.value if record is not None and record.expires_at_s > now_s else None

    def put(self, record_id: str, caller: str, value: T, num_bytes: int, expires_at_s: float, now_s: float) -> int:
        """Replaces a record of the same id. Returns the number of records that were evicted."""
        self.drop(record_id)
        self._records[record_id] = _StoredRecord(value, caller, num_bytes, expires_at_s)
        usage = self._usage.setdefault(caller, _CallerUsage())
        usage.ids[record_id] = None
        usage.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self._next_expiry_s = min(self._next_expiry_s, expires_at_s)
        if self._has_too_many or self._is_too_large:
            self.expire(now_s)
        num_before = len(self._records)
        while self._has_too_many:
            self._evict(max(self._usage.values(), key=lambda usage: len(usage.ids)))
        while self._is_too_large:
            self._evict(max(self._usage.values(), key=lambda usage: usage.num_bytes))
        return num_before - len(self._records)

    def drop(self, record_id: str) -> bool:
        record = self._records.pop(record_id, None)
        if record is None:
            return False
        usage = self._usage[record.caller]
        del usage.ids[record_id]
        usage.num_bytes -= record.num_bytes
        self.num_bytes -= record.num_bytes
        if not usage.ids:
            del self._usage[record.caller]
        return True

    def expire(self, now_s: float) -> None:
        if now_s < self._next_expiry_s:
            return
        for record_id in [expired_id for expired_id, record in self._records.items() if record.expires_at_s <= now_s]:
            self.drop(record_id)
        self._next_expiry_s = min((record.expires_at_s for record in self._records.values()), default=math.inf)

    @property
    def _has_too_many(self) -> bool:
        return len(self._records) > self._limits.max_records

    @property
    def _is_too_large(self) -> bool:
        return self.num_bytes > self._limits.max_bytes

    def _evict(self, usage: _CallerUsage) -> None:
        self.drop(next(iter(usage.ids)))
