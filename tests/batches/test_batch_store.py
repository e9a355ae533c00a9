"""What is kept on disk, what is removed, and which ids lead to it."""

import os
import sys
from pathlib import Path

import msgspec
import pytest

from onward.batches.batch_policy import BatchLimits
from onward.batches.batch_service import BatchService
from onward.batches.batch_store import BATCH_PREFIX, FILE_PREFIX, BatchStore
from onward.batches.records import BatchRecord, FileRecord
from onward.errors import NotFound, StartupError
from onward.web.auth.api_key_table import ApiKeyTable, Caller
from onward.web.auth.authenticator import ActiveKeys
from tests.batches.test_batch_results import RECORD

ANN, BOSS = Caller("ann", "user"), Caller("boss", "admin")
NOW_S = 1_000_000.0
DAY_S = 86_400.0


class StillClock:
    def now_s(self) -> float:
        return 0.0

    def wall_s(self) -> float:
        return NOW_S


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    made = BatchStore(str(tmp_path / "batches"))
    made.prepare()
    return made


def add(store: BatchStore, caller: str, expires_s: float) -> FileRecord:
    upload = store.new_upload(caller)
    upload.write_bytes(b"content")
    record = FileRecord(store.new_id(FILE_PREFIX, caller), caller, NOW_S - DAY_S, "in", 7, "batch", expires_s)
    store.add_file(record, upload)
    return record


def add_batch(store: BatchStore, input_file_id: str, ended_s: float | None) -> BatchRecord:
    status = "in_progress" if ended_s is None else "completed"
    batch_id = store.new_id(BATCH_PREFIX, "ann")
    record = msgspec.structs.replace(
        RECORD, id=batch_id, caller="ann", input_file_id=input_file_id, status=status, ended_s=ended_s
    )
    store.write_batch(record)
    return record


def sweep(store: BatchStore) -> None:
    keys = ActiveKeys(ApiKeyTable())
    BatchService(store, BatchLimits(1000, 8, ttl_s=DAY_S), keys, StillClock())._sweep()


def test_an_expired_file_is_not_found_and_its_bytes_are_freed(store: BatchStore) -> None:
    old, kept = add(store, "ann", NOW_S - 1), add(store, "ann", NOW_S + 1)
    with pytest.raises(NotFound):
        store.find_file(ANN, old.id, NOW_S)
    sweep(store)
    assert store.files("ann") == [kept] and store.stored_bytes("ann") == 7


def test_the_input_of_a_batch_that_runs_does_not_expire(store: BatchStore) -> None:
    old = add(store, "ann", NOW_S - 1)
    add_batch(store, old.id, None)
    sweep(store)
    assert store.files("ann") == [old]


def test_batches_that_ended_long_ago_are_removed(store: BatchStore) -> None:
    old, new = add_batch(store, "file-0", NOW_S - DAY_S - 1), add_batch(store, "file-0", NOW_S - 5)
    store.request_cancel(old, NOW_S - DAY_S)
    sweep(store)
    assert store.batches("ann") == [new] and store.cancelled_s(old) is None


def test_what_killed_processes_leave_is_removed_after_a_while(store: BatchStore) -> None:
    record = add(store, "ann", NOW_S + DAY_S)
    running = add_batch(store, record.id, None)
    half, fresh = store.new_upload("ann"), store.new_upload("ann")
    orphan = store.content_path("ann", "file-" + "0" * 32)
    output = store.content_path("ann", running.output_file_id)
    for path, age_s in ((half, 2 * DAY_S), (fresh, 0.0), (orphan, 2 * DAY_S), (output, 2 * DAY_S)):
        path.write_bytes(b"x")
        os.utime(path, (NOW_S - age_s, NOW_S - age_s))
    sweep(store)
    assert [path.exists() for path in (half, fresh, orphan, output)] == [False, True, False, True]
    assert store.content_path("ann", record.id).exists()


@pytest.mark.parametrize("text", ["", "..", "file-x", "file-" + "0" * 33, "file-../../x", "batch_" + "0" * 32, "\0"])
def test_an_id_that_is_none_leads_nowhere(store: BatchStore, text: str) -> None:
    for caller in (ANN, BOSS):
        with pytest.raises(NotFound):
            store.find_file(caller, text, NOW_S)


def test_an_admin_finds_the_files_of_others_and_a_user_does_not(store: BatchStore) -> None:
    record = add(store, "ann", NOW_S + 1)
    assert store.find_file(ANN, record.id, NOW_S) == store.find_file(BOSS, record.id, NOW_S) == record
    with pytest.raises(NotFound):
        store.find_file(Caller("bob", "user"), record.id, NOW_S)


def test_one_process_at_a_time_has_the_lock(store: BatchStore) -> None:
    held = store.try_lock_runner()
    assert held is not None and store.try_lock_runner() is None
    held.close()
    again = store.try_lock_runner()
    assert again is not None
    again.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StartupError, match="--batch-dir"):
        BatchStore(str(tmp_path / "file")).prepare()


def calls_of_a_search(folder: Path, num_callers: int) -> int:
    store = BatchStore(str(folder))
    store.prepare()
    for number in range(num_callers):
        store.write_batch(msgspec.structs.replace(RECORD, caller=f"caller-{number}", status="completed", ended_s=NOW_S))

    def search() -> None:
        for caller in store.callers():
            assert len(store.batches(caller)) == 1

    search()
    num_calls = 0

    def count(*_: object) -> None:
        nonlocal num_calls
        num_calls += 1

    sys.setprofile(count)
    try:
        search()
    finally:
        sys.setprofile(None)
    return num_calls


def test_the_cost_of_a_search_grows_with_the_number_of_callers_and_not_with_its_square(tmp_path: Path) -> None:
    few, many = calls_of_a_search(tmp_path / "few", 25), calls_of_a_search(tmp_path / "many", 200)
    assert many < 8.5 * few
