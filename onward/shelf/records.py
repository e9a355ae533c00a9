"""What is kept: records by their ids, for a while, within bounds that are kept by forgetting the oldest of a kind.

Takes the time; does no I/O.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import get_args

from onward.proto.shelf import RecordKind, ShelfRecord

RECORD_OVERHEAD_BYTES = 512


@dataclass(frozen=True, slots=True)
class Bounds:
    max_records: int = 512
    max_bytes: int = 32 << 20


DEFAULT_BOUNDS: Mapping[RecordKind, Bounds] = {
    **{kind: Bounds() for kind in get_args(RecordKind)},
    "response": Bounds(max_records=4096, max_bytes=128 << 20),
}


@dataclass(slots=True)
class _Row:
    """All of one kind, oldest first."""

    bounds: Bounds
    kept: OrderedDict[str, tuple[ShelfRecord, float]] = field(default_factory=OrderedDict)
    """And until when."""
    num_bytes: int = 0

    def add(self, record: ShelfRecord, until_s: float) -> None:
        self.kept[record.record_id] = record, until_s
        self.num_bytes += size_of(record)

    def remove(self, record_id: str) -> None:
        record, _ = self.kept.pop(record_id)
        self.num_bytes -= size_of(record)

    @property
    def is_too_full(self) -> bool:
        return len(self.kept) > self.bounds.max_records or self.num_bytes > self.bounds.max_bytes


class Records:
    def __init__(self, bounds: Mapping[RecordKind, Bounds] = DEFAULT_BOUNDS) -> None:
        self._rows = {kind: _Row(one) for kind, one in bounds.items()}

    def count(self) -> dict[str, int]:
        return {kind: len(row.kept) for kind, row in self._rows.items()}

    def num_bytes(self) -> dict[str, int]:
        return {kind: row.num_bytes for kind, row in self._rows.items()}

    def put(self, record: ShelfRecord, now_s: float) -> int:
        """Replaces an earlier record; not a later one, one that has ended, or another caller's. Returns the number of
        records that were evicted."""
        known = self.get(record.record_id, now_s)
        if known is not None and not _may_replace(known, record):
            return 0
        self.drop(record.record_id)
        row = self._rows[record.kind]
        row.add(record, now_s + record.ttl_s)
        if row.is_too_full:
            self.expire(now_s)
        num_before = len(row.kept)
        while row.is_too_full:
            row.remove(next(iter(row.kept)))
        return num_before - len(row.kept)

    def get(self, record_id: str, now_s: float) -> ShelfRecord | None:
        for row in self._rows.values():
            record, until_s = row.kept.get(record_id, (None, 0.0))
            if record is not None and until_s > now_s:
                return record
        return None

    def drop(self, record_id: str) -> None:
        for row in self._rows.values():
            if record_id in row.kept:
                row.remove(record_id)

    def forget(self, record_id: str, epoch: int, caller: str, now_s: float) -> None:
        """Drops what an earlier attempt left. A response stays until the later attempt replaces its record: the process
        that runs the attempt may die before it has put anything."""
        record = self.get(record_id, now_s)
        if record is None or record.kind == "response":
            return
        if record.epoch <= epoch and record.caller == caller:
            self.drop(record_id)

    def drop_named(self, names: Collection[str], everything: bool, caller: str | None, now_s: float) -> set[str]:
        """Which of these names were here; or, with everything, the ids. With a caller, only among its own."""
        self.expire(now_s)
        wanted, dropped = set(names) - {""}, set[str]()
        for record in [record for row in self._rows.values() for record, _ in row.kept.values()]:
            hit = {record.record_id} if everything else wanted.intersection((record.record_id, *record.names))
            if hit and is_for(record, caller):
                self.drop(record.record_id)
                dropped |= hit
        return dropped

    def expire(self, now_s: float) -> None:
        for row in self._rows.values():
            for record_id in [one for one, (_, until_s) in row.kept.items() if until_s <= now_s]:
                row.remove(record_id)


def _may_replace(known: ShelfRecord, record: ShelfRecord) -> bool:
    return known.ending == "open" and known.epoch <= record.epoch and known.caller == record.caller


def is_for(record: ShelfRecord, caller: str | None) -> bool:
    return caller is None or record.caller == caller


def size_of(record: ShelfRecord) -> int:
    return RECORD_OVERHEAD_BYTES + len(record.data)
