"""The records of an instance's stream store, kept by id, for a limited time, with bounds for each kind.
Callers share the bounds fairly, see `fair_record_store`. Takes the time; does no I/O.
"""

from collections.abc import Collection, Mapping
from typing import get_args

from onward.fair_record_store import FairRecordStore, RecordLimits
from onward.proto.stream_store import EntryKind, StoreEntry

RECORD_OVERHEAD_BYTES = 512
DELETED_S = 60.0
"""How long a deleted response is remembered as deleted. The process that ran it stores its end within seconds, if at
all."""
DEFAULT_BOUNDS: Mapping[EntryKind, RecordLimits] = {
    **{kind: RecordLimits() for kind in get_args(EntryKind)},
    "response": RecordLimits(max_records=4096, max_bytes=128 << 20),
}


class EntryTable:
    def __init__(self, limits: Mapping[EntryKind, RecordLimits] = DEFAULT_BOUNDS) -> None:
        self._stores: dict[EntryKind, FairRecordStore[StoreEntry]] = {
            kind: FairRecordStore(kind_limits) for kind, kind_limits in limits.items()
        }

    def count(self) -> dict[str, int]:
        return {kind: len(store) for kind, store in self._stores.items()}

    def num_bytes(self) -> dict[str, int]:
        return {kind: store.num_bytes for kind, store in self._stores.items()}

    def put(self, entry: StoreEntry, now_s: float) -> int:
        """Replaces an earlier record, but not a later one, a final one, or another caller's. Returns the number of
        evicted records."""
        known = self.get(entry.request_id, now_s)
        if known is not None and not _may_replace(known, entry):
            return 0
        self.drop(entry.request_id)
        expires_at_s = now_s + entry.ttl_s
        return self._stores[entry.kind].put(entry.request_id, entry.caller, entry, size_of(entry), expires_at_s, now_s)

    def get(self, record_id: str, now_s: float) -> StoreEntry | None:
        found = (store.get(record_id, now_s) for store in self._stores.values())
        return next((entry for entry in found if entry is not None), None)

    def drop(self, record_id: str) -> None:
        for store in self._stores.values():
            store.drop(record_id)

    def drop_superseded(self, record_id: str, epoch: int, caller: str, now_s: float) -> None:
        """Drops the caller's record if it is of this attempt or an earlier one. The record of a response stays until the
        later attempt replaces it, because the process that runs the attempt may die before it has stored anything."""
        entry = self.get(record_id, now_s)
        if entry is None or entry.kind == "response":
            return
        if entry.attempt_epoch <= epoch and entry.caller == caller:
            self.drop(record_id)

    def drop_by_name(self, names: Collection[str], match_all: bool, caller: str | None, now_s: float) -> set[str]:
        """Drops records by name, or all records if `match_all` is set. With a caller, only that caller's records match.
        Stored responses stay, see `open_named`. Returns the names of dropped records; with `match_all`, their ids."""
        self.expire(now_s)
        wanted, dropped = set(names) - {""}, set[str]()
        for entry, matched in self._matching(wanted, match_all, caller):
            if not entry.is_stored:
                self.drop(entry.request_id)
                dropped |= matched
        return dropped

    def open_named(
        self, names: Collection[str], match_all: bool, caller: str | None, now_s: float
    ) -> dict[str, list[str]]:
        """Returns stored responses that have not ended, each with the names that matched."""
        self.expire(now_s)
        found = self._matching(set(names) - {""}, match_all, caller)
        return {
            entry.request_id: sorted(matched) for entry, matched in found if entry.is_stored and entry.status == "open"
        }

    def delete(self, record_id: str, caller: str, now_s: float) -> bool:
        """Deletes a record, and for a while refuses to store it again. Returns whether the caller had such a record."""
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

    def _matching(self, wanted: set[str], match_all: bool, caller: str | None) -> list[tuple[StoreEntry, set[str]]]:
        found: list[tuple[StoreEntry, set[str]]] = []
        for entry in (entry for store in self._stores.values() for entry in store.values()):
            matched = {entry.request_id} if match_all else wanted.intersection((entry.request_id, *entry.aliases))
            if matched and is_visible_to(entry, caller) and entry.status != "deleted":
                found.append((entry, matched))
        return found

    def expire(self, now_s: float) -> None:
        for store in self._stores.values():
            store.expire(now_s)


def _may_replace(known: StoreEntry, entry: StoreEntry) -> bool:
    return known.status == "open" and known.attempt_epoch <= entry.attempt_epoch and known.caller == entry.caller


def is_visible_to(entry: StoreEntry, caller: str | None) -> bool:
    return caller is None or entry.caller == caller


def size_of(entry: StoreEntry) -> int:
    return RECORD_OVERHEAD_BYTES + len(entry.data)
