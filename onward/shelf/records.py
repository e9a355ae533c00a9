"""What an instance keeps for its api processes: records by their ids, for a while, each kind within bounds of its own.

Callers share the bounds fairly, see `fair_records`. Takes the time; does no I/O.
"""

from collections.abc import Collection, Mapping
from typing import get_args

from onward.fair_records import Bounds, FairRecords
from onward.proto.shelf import RecordKind, ShelfRecord

RECORD_OVERHEAD_BYTES = 512
DELETED_S = 60.0
"""How long a deleted response is remembered as such. The process that ran it puts its end within seconds, if at all."""
DEFAULT_BOUNDS: Mapping[RecordKind, Bounds] = {
    **{kind: Bounds() for kind in get_args(RecordKind)},
    "response": Bounds(max_records=4096, max_bytes=128 << 20),
}


class Records:
    def __init__(self, bounds: Mapping[RecordKind, Bounds] = DEFAULT_BOUNDS) -> None:
        self._of_kind: dict[RecordKind, FairRecords[ShelfRecord]] = {
            kind: FairRecords(one) for kind, one in bounds.items()
        }

    def count(self) -> dict[str, int]:
        return {kind: len(records) for kind, records in self._of_kind.items()}

    def num_bytes(self) -> dict[str, int]:
        return {kind: records.num_bytes for kind, records in self._of_kind.items()}

    def put(self, record: ShelfRecord, now_s: float) -> int:
        """Replaces an earlier record; not a later one, one that has ended, or another caller's. Returns the number of
        records that were evicted."""
        known = self.get(record.record_id, now_s)
        if known is not None and not _may_replace(known, record):
            return 0
        self.drop(record.record_id)
        until_s = now_s + record.ttl_s
        return self._of_kind[record.kind].put(record.record_id, record.caller, record, size_of(record), until_s, now_s)

    def get(self, record_id: str, now_s: float) -> ShelfRecord | None:
        found = (records.get(record_id, now_s) for records in self._of_kind.values())
        return next((record for record in found if record is not None), None)

    def drop(self, record_id: str) -> None:
        for records in self._of_kind.values():
            records.drop(record_id)

    def forget(self, record_id: str, epoch: int, caller: str, now_s: float) -> None:
        """Drops what an earlier attempt left. A response stays until the later attempt replaces its record: the process
        that runs the attempt may die before it has put anything."""
        record = self.get(record_id, now_s)
        if record is None or record.kind == "response":
            return
        if record.epoch <= epoch and record.caller == caller:
            self.drop(record_id)

    def drop_named(self, names: Collection[str], everything: bool, caller: str | None, now_s: float) -> set[str]:
        """Which of these names were here; or, with everything, the ids. With a caller, only among its own. Stored responses
        stay, see `open_named`."""
        self.expire(now_s)
        wanted, dropped = set(names) - {""}, set[str]()
        for record, hit in self._named(wanted, everything, caller):
            if not record.is_stored:
                self.drop(record.record_id)
                dropped |= hit
        return dropped

    def open_named(
        self, names: Collection[str], everything: bool, caller: str | None, now_s: float
    ) -> dict[str, list[str]]:
        """Stored responses that have not ended, with those of the names that they go by."""
        self.expire(now_s)
        found = self._named(set(names) - {""}, everything, caller)
        return {one.record_id: sorted(hit) for one, hit in found if one.is_stored and one.ending == "open"}

    def delete(self, record_id: str, caller: str, now_s: float) -> bool:
        """For good: what is put of it later is not kept. Whether it was there."""
        known = self.get(record_id, now_s)
        if known is not None and (known.caller != caller or known.ending == "deleted"):
            return False
        self.drop(record_id)
        deleted = ShelfRecord(
            record_id=record_id,
            names=(),
            caller=caller,
            kind="response",
            epoch=0,
            data=b"",
            ttl_s=DELETED_S,
            ending="deleted",
        )
        self.put(deleted, now_s)
        return known is not None

    def _named(self, wanted: set[str], everything: bool, caller: str | None) -> list[tuple[ShelfRecord, set[str]]]:
        found: list[tuple[ShelfRecord, set[str]]] = []
        for record in (record for records in self._of_kind.values() for record in records.values()):
            hit = {record.record_id} if everything else wanted.intersection((record.record_id, *record.names))
            if hit and is_for(record, caller) and record.ending != "deleted":
                found.append((record, hit))
        return found

    def expire(self, now_s: float) -> None:
        for records in self._of_kind.values():
            records.expire(now_s)


def _may_replace(known: ShelfRecord, record: ShelfRecord) -> bool:
    return known.ending == "open" and known.epoch <= record.epoch and known.caller == record.caller


def is_for(record: ShelfRecord, caller: str | None) -> bool:
    return caller is None or record.caller == caller


def size_of(record: ShelfRecord) -> int:
    return RECORD_OVERHEAD_BYTES + len(record.data)
