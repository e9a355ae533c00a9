"""What an instance keeps for its api processes: records by their ids, for a while, each kind within bounds of its own.

Callers share the bounds fairly, see `fair_record_store`. Takes the time; does no I/O.
"""

from collections.abc import Collection, Mapping
from typing import get_args

from onward.fair_record_store import FairRecordStore, RecordLimits
from onward.proto.stream_store import EntryKind, StoreEntry

RECORD_OVERHEAD_BYTES = 512
DELETED_S = 60.0
"""How long a deleted response is remembered as such. The process that ran it puts its end within seconds, if at all."""
DEFAULT_BOUNDS: Mapping[EntryKind, RecordLimits] = {
    **{kind: RecordLimits() for kind in get_args(EntryKind)},
    "response": RecordLimits(max_records=4096, max_bytes=128 << 20),
}


class EntryTable:
    def __init__(self, bounds: Mapping[EntryKind, RecordLimits] = DEFAULT_BOUNDS) -> None:
        self._of_kind: dict[EntryKind, FairRecordStore[StoreEntry]] = {
            kind: FairRecordStore(one) for kind, one in bounds.items()
        }

    def count(self) -> dict[str, int]:
        return {kind: len(records) for kind, records in self._of_kind.items()}

    def num_bytes(self) -> dict[str, int]:
        return {kind: records.num_bytes for kind, records in self._of_kind.items()}

    def put(self, record: StoreEntry, now_s: float) -> int:
        """Replaces an earlier record; not a later one, one that has ended, or another caller's. Returns the number of
        records that were evicted."""
        known = self.get(record.request_id, now_s)
        if known is not None and not _may_replace(known, record):
            return 0
        self.drop(record.request_id)
        until_s = now_s + record.ttl_s
        return self._of_kind[record.kind].put(record.request_id, record.caller, record, size_of(record), until_s, now_s)

    def get(self, record_id: str, now_s: float) -> StoreEntry | None:
        found = (records.get(record_id, now_s) for records in self._of_kind.values())
        return next((record for record in found if record is not None), None)

    def drop(self, record_id: str) -> None:
        for records in self._of_kind.values():
            records.drop(record_id)

    def drop_superseded(self, record_id: str, epoch: int, caller: str, now_s: float) -> None:
        """Drops what an earlier attempt left. A response stays until the later attempt replaces its record: the process
        that runs the attempt may die before it has put anything."""
        record = self.get(record_id, now_s)
        if record is None or record.kind == "response":
            return
        if record.attempt_epoch <= epoch and record.caller == caller:
            self.drop(record_id)

    def drop_by_name(self, names: Collection[str], everything: bool, caller: str | None, now_s: float) -> set[str]:
        """Which of these names were here; or, with everything, the ids. With a caller, only among its own. Stored responses
        stay, see `open_named`."""
        self.expire(now_s)
        wanted, dropped = set(names) - {""}, set[str]()
        for record, hit in self._named(wanted, everything, caller):
            if not record.is_stored:
                self.drop(record.request_id)
                dropped |= hit
        return dropped

    def open_named(
        self, names: Collection[str], everything: bool, caller: str | None, now_s: float
    ) -> dict[str, list[str]]:
        """Stored responses that have not ended, with those of the names that they go by."""
        self.expire(now_s)
        found = self._named(set(names) - {""}, everything, caller)
        return {one.request_id: sorted(hit) for one, hit in found if one.is_stored and one.status == "open"}

    def delete(self, record_id: str, caller: str, now_s: float) -> bool:
        """For good: what is put of it later is not kept. Whether it was there."""
        known = self.get(record_id, now_s)
        if known is not None and (known.caller != caller or known.status == "deleted"):
            return False
        self.drop(record_id)
        deleted = StoreEntry(
            request_id=record_id,
            aliases=(),
            caller=caller,
            kind="response",
            attempt_epoch=0,
            data=b"",
            ttl_s=DELETED_S,
            status="deleted",
        )
        self.put(deleted, now_s)
        return known is not None

    def _named(self, wanted: set[str], everything: bool, caller: str | None) -> list[tuple[StoreEntry, set[str]]]:
        found: list[tuple[StoreEntry, set[str]]] = []
        for record in (record for records in self._of_kind.values() for record in records.values()):
            hit = {record.request_id} if everything else wanted.intersection((record.request_id, *record.aliases))
            if hit and is_visible_to(record, caller) and record.status != "deleted":
                found.append((record, hit))
        return found

    def expire(self, now_s: float) -> None:
        for records in self._of_kind.values():
            records.expire(now_s)


def _may_replace(known: StoreEntry, record: StoreEntry) -> bool:
    return known.status == "open" and known.attempt_epoch <= record.attempt_epoch and known.caller == record.caller


def is_visible_to(record: StoreEntry, caller: str | None) -> bool:
    return caller is None or record.caller == caller


def size_of(record: StoreEntry) -> int:
    return RECORD_OVERHEAD_BYTES + len(record.data)
