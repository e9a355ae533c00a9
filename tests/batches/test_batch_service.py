"""One batch in one process, with an application that answers at once: what runs where, and how the batch ends."""

import asyncio
import errno
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.types import Receive, Scope, Send

from onward.batches import batch_files, batch_runner, batch_service
from onward.batches.batch_files import BatchRequest, InvalidLine, check_input, read_requests
from onward.batches.batch_policy import BatchLimits
from onward.batches.batch_results import BatchResults
from onward.batches.batch_service import BatchService, _BatchWork, _Run
from onward.batches.batch_store import BATCH_PREFIX, FILE_PREFIX, BatchStore
from onward.batches.model_waits import ModelWaits
from onward.batches.records import BatchRecord, FileRecord, RequestCounts
from onward.batches.upload import receive_upload
from onward.errors import NotFound, StartupError
from onward.web.auth.api_key_table import ApiKeyTable, Caller
from onward.web.auth.authenticator import ActiveKeys
from tests.batches.test_batch_results import RECORD, result
from tests.batches.test_batch_store import NOW_S, StillClock

URL = "/v1/completions"


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


class ModelClock(StillClock):
    seconds = 0.0

    def now_s(self) -> float:
        return self.seconds


class LateClock(StillClock):
    def wall_s(self) -> float:
        return NOW_S + 10.0


@pytest.fixture
def store(tmp_path: Path) -> BatchStore:
    made = BatchStore(str(tmp_path / "batches"))
    made.prepare()
    return made


def lines(ids: Iterable[str]) -> bytes:
    return b"".join(msgspec.json.encode(BatchRequest(custom_id, URL, {})) + b"\n" for custom_id in ids)


def new_batch(store: BatchStore, content: bytes, caller: str = "", **fields: Any) -> BatchRecord:
    upload = store.new_upload(caller)
    upload.write_bytes(content)
    file_id = store.new_id(FILE_PREFIX, caller)
    store.add_file(FileRecord(file_id, caller, NOW_S, "in", len(content), "batch", NOW_S + 9.0), upload)
    fields = {"caller": caller, "created_s": NOW_S, "expires_s": NOW_S + 9.0, **fields}
    record = msgspec.structs.replace(
        RECORD,
        id=store.new_id(BATCH_PREFIX, caller),
        input_file_id=file_id,
        output_file_id=store.new_id(FILE_PREFIX, caller),
        error_file_id=store.new_id(FILE_PREFIX, caller),
        **fields,
    )
    store.write_batch(record)
    return record


def service_of(store: BatchStore, max_bytes: int = 1 << 20, concurrency: int = 8) -> BatchService:
    return BatchService(store, BatchLimits(max_bytes, concurrency, 86_400.0), ActiveKeys(ApiKeyTable()), StillClock())


async def run(store: BatchStore, record: BatchRecord, app: Any = answer) -> BatchRecord:
    service = service_of(store)
    return await _Run(service, app, record, asyncio.Semaphore(8), ActiveKeys(ApiKeyTable())).run()


def test_a_file_of_blank_lines_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"\n" * 1000 + lines("a"))
    assert check_input(path) == ["a"]
    path.write_bytes(lines("a") + b"\n" * 2000)
    for read in (check_input, lambda path: list(read_requests(path))):
        with pytest.raises(InvalidLine, match="blank") as refused:
            read(path)
        assert refused.value.line == 1002


def test_a_line_that_is_longer_than_a_body_may_be_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(lines(["a", "b" * 200]))
    assert len(check_input(path)) == 2
    with pytest.raises(InvalidLine, match="longer than 200 bytes") as refused:
        check_input(path, max_line_bytes=200)
    assert refused.value.line == 2


def note_threads(patch: pytest.MonkeyPatch, threads: list[int], owner: Any, name: str) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def noted(*args: Any) -> Any:
        threads.append(threading.get_ident())
        return original(*args)

    patch.setattr(owner, name, noted)


def test_requests_are_read_and_results_written_outside_the_event_loop(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading: list[int] = []
    writing: list[int] = []
    note_threads(monkeypatch, reading, batch_files, "_checked")
    note_threads(monkeypatch, writing, BatchResults, "add")
    record = new_batch(store, lines(str(number) for number in range(20)))
    ended = asyncio.run(run(store, record))
    assert (ended.status, ended.counts.completed) == ("completed", 20)
    assert len(reading) == 40 and len(writing) == 20
    assert threading.get_ident() not in {*reading, *writing}


@pytest.fixture
def disk_steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is synced and replaced, in order, by the name of the file or folder."""
    steps: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(descriptor: int) -> None:
        steps.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        fsync(descriptor)

    def noted_replace(source: Path, target: Path) -> Path:
        steps.append(f"replace {target.name}")
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    return steps


def test_results_are_on_disk_before_a_record_says_that_the_batch_has_ended(
    store: BatchStore, disk_steps: list[str]
) -> None:
    record = new_batch(store, lines("ab"))
    disk_steps.clear()
    asyncio.run(run(store, record))
    last_of = {step: number for number, step in enumerate(disk_steps)}
    written = [number for number, step in enumerate(disk_steps) if step == f"replace {record.id}.json"]
    assert disk_steps.index(f"sync {record.output_file_id}.jsonl") < written[-2], "before it is finalizing"
    results_synced = max(last_of[f"sync {one}.jsonl"] for one in (record.output_file_id, record.error_file_id))
    file_shown = last_of[f"replace {record.output_file_id}.json"]
    assert results_synced < file_shown < last_of["sync files"] < last_of[f"replace {record.id}.json"]
    assert disk_steps[-2:] == [f"replace {record.id}.json", "sync batches"]


def test_an_upload_is_on_disk_before_its_record(store: BatchStore, disk_steps: list[str]) -> None:
    path = store.new_upload("")
    disk_steps.clear()
    body = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc\r\n--x--\r\n'
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return messages.pop()

    asyncio.run(receive_upload(receive, "multipart/form-data; boundary=x", path, 100))
    assert disk_steps == [f"sync {path.name}"] and path.read_bytes() == b"abc"
    store.add_file(FileRecord("file-1", "", NOW_S, "in", 3, "batch", NOW_S), path)
    steps = [step for step in disk_steps if not step.endswith(".new")]
    assert steps[1:] == ["replace file-1.jsonl", "sync files", "replace file-1.json", "sync files"]


def test_an_error_of_the_disk_that_passes_does_not_fail_a_batch(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = new_batch(store, lines("ab"))
    original = Path.open

    def open_input(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == f"{record.input_file_id}.jsonl":
            raise OSError(errno.EIO, "Input/output error")
        return original(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_input)
        with pytest.raises(StartupError, match="Input/output error"):
            asyncio.run(run(store, record))
    [kept] = store.batches("")
    assert not kept.has_ended
    ended = asyncio.run(run(store, kept))
    assert (ended.status, ended.counts.completed) == ("completed", 2)


def test_a_batch_whose_input_is_gone_keeps_the_results_that_it_has(store: BatchStore) -> None:
    record = new_batch(store, lines("ab"), counts=RequestCounts(2, 1, 0))
    with BatchResults(store, record, 10_000) as results:
        results.add(result("a"))
    store.content_path("", record.input_file_id).unlink()
    ended = asyncio.run(run(store, record))
    assert (ended.status, ended.has_output, ended.counts) == ("failed", True, RequestCounts(2, 1, 0))
    assert [error.code for error in ended.errors] == ["file_not_found"]
    assert record.output_file_id in [file.id for file in store.files("")]


async def wait_for_ends(service: BatchService, work: _BatchWork) -> None:
    """Scans until nothing of this kind is done any more."""
    await service._scan(answer)
    while tasks := [one.task for (_, kind), one in service._running.items() if kind is work]:
        await asyncio.wait(tasks)
        await service._scan(answer)


def test_batches_that_wait_are_cancelled_and_expire_without_their_turn(store: BatchStore) -> None:
    async def never(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.get_running_loop().create_future()

    first = new_batch(store, lines("a"), created_s=1.0)
    waiting = new_batch(store, lines("a"), created_s=2.0)
    cancelled = new_batch(store, lines("a"), created_s=3.0)
    expired = new_batch(store, lines("a"), created_s=4.0, expires_s=NOW_S)
    store.request_cancel(cancelled, NOW_S)

    async def scenario() -> None:
        service = service_of(store)
        await service._scan(never)
        await wait_for_ends(service, _BatchWork.END)
        assert service._running["", _BatchWork.SEND].batch_id == first.id
        await stop(service)

    asyncio.run(scenario())
    statuses = {record.id: record.status for record in store.batches("")}
    assert (statuses[cancelled.id], statuses[expired.id]) == ("cancelled", "expired")
    assert statuses[waiting.id] == "validating" and statuses[first.id] != "completed"


async def stop(service: BatchService) -> None:
    tasks = [one.task for one in service._running.values()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_no_batch_runs_twice_at_once_however_scans_and_ends_follow(store: BatchStore) -> None:
    batches = [new_batch(store, lines("a"), created_s=float(number)) for number in range(6)]
    for record in batches[1::2]:
        store.request_cancel(record, NOW_S)

    async def scenario() -> None:
        service = service_of(store)
        while any(not record.has_ended for record in store.batches("")):
            await service._scan(answer)
            ids = [one.batch_id for one in service._running.values()]
            assert len(set(ids)) == len(ids)
            await asyncio.sleep(0)

    asyncio.run(scenario())
    assert [record.status for record in store.batches("")] == ["completed", "cancelled"] * 3


@pytest.mark.parametrize("damaged", [b"", b"\0" * 100, b'{"id": "\xff"}', b"[]"])
def test_a_damaged_record_holds_up_no_other_batch(
    store: BatchStore, damaged: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Reads the folder several times, as a server does."""
    bad, good, of_other = (new_batch(store, lines("a"), caller) for caller in ("ann", "ann", "bob"))
    store._batch_path(bad, "json").write_bytes(damaged)

    async def scenario() -> None:
        service = service_of(store)
        await wait_for_ends(service, _BatchWork.SEND)
        service._sweep()

    asyncio.run(scenario())
    assert [(one.id, one.status) for one in store.batches("ann")] == [(good.id, "completed")]
    assert [(one.id, one.status) for one in store.batches("bob")] == [(of_other.id, "completed")]
    assert caplog.text.count("a record is damaged") == 1
    with pytest.raises(NotFound):
        store.find_batch(Caller("ann", "user"), bad.id)


def test_a_folder_of_a_caller_that_cannot_be_read_holds_up_no_other_caller(store: BatchStore) -> None:
    new_batch(store, lines("a"), "ann")
    of_other = new_batch(store, lines("a"), "bob")
    file_of_other = store.content_path("bob", of_other.input_file_id)
    folder = store._folder("ann")
    shutil.rmtree(folder)
    folder.write_bytes(b"")

    async def scenario() -> None:
        service = service_of(store)
        await wait_for_ends(service, _BatchWork.SEND)
        service.clock = LateClock()
        service._sweep()

    asyncio.run(scenario())
    assert [one.status for one in store.batches("bob")] == ["completed"]
    assert not file_of_other.exists(), "it has expired"


def test_a_batch_with_damaged_results_fails_and_shows_them(store: BatchStore) -> None:
    record = new_batch(store, lines("ab"))
    output = store.content_path("", record.output_file_id)
    output.write_bytes(b"damaged\n")
    ended = asyncio.run(run(store, record))
    assert (ended.status, ended.has_output, ended.has_errors) == ("failed", True, False)
    assert [error.code for error in ended.errors] == ["results_unreadable"]
    assert output.read_bytes() == b"damaged\n"


def test_files_that_are_added_while_a_batch_runs_leave_it_less_room(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = new_batch(store, lines("abc"))
    looked_twice = asyncio.Event()
    num_looks = 0
    original = _Run._bytes_left

    async def scenario() -> BatchRecord:
        loop = asyncio.get_running_loop()

        def noted(self: _Run) -> int:
            nonlocal num_looks
            num_looks += 1
            if num_looks >= 2:
                loop.call_soon_threadsafe(looked_twice.set)
            return original(self)

        async def fill(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal num_looks
            if not looked_twice.is_set():
                new_batch(store, lines("x" * 500 for _ in range(100)), created_s=NOW_S + 1.0)
                num_looks = 0
                monkeypatch.setattr(_Run, "_bytes_left", noted)
                await asyncio.wait_for(looked_twice.wait(), 30.0)
            await answer(scope, receive, send)

        service = service_of(store, max_bytes=20_000, concurrency=1)
        return await _Run(service, fill, record, asyncio.Semaphore(1), ActiveKeys(ApiKeyTable())).run()

    monkeypatch.setattr(batch_service, "PROGRESS_INTERVAL_S", 0.01)
    ended = asyncio.run(scenario())
    assert ended.status == "failed" and [error.code for error in ended.errors] == ["quota_exceeded"]
    assert ended.counts == RequestCounts(3, 0, 0)


def test_a_batch_does_not_end_completed_without_a_result_for_each_request(store: BatchStore) -> None:
    record = new_batch(store, lines("abc"), status="finalizing", ending="completed")
    with BatchResults(store, record, 10_000) as results:
        results.add(result("a"))
    ended = asyncio.run(run(store, record))
    assert (ended.status, ended.counts) == ("completed", RequestCounts(3, 3, 0))
    assert len(store.content_path("", record.output_file_id).read_bytes().splitlines()) == 3


def test_a_batch_that_has_ended_early_is_not_sent_again(store: BatchStore) -> None:
    record = new_batch(store, lines("ab"), status="finalizing", ending="cancelled")
    ended = asyncio.run(run(store, record))
    assert (ended.status, ended.counts) == ("cancelled", RequestCounts(2, 0, 0))


def test_a_batch_whose_input_was_cut_while_it_ran_is_run_again(store: BatchStore) -> None:
    content = b"".join(
        msgspec.json.encode(BatchRequest(name, URL, {"prompt": msgspec.Raw(b'"%s"' % (b"x" * 200_000))})) + b"\n"
        for name in "abc"
    )
    record = new_batch(store, content)
    path = store.content_path("", record.input_file_id)

    async def cut(scope: Scope, receive: Receive, send: Send) -> None:
        os.truncate(path, len(content) // 3 * 2)
        await answer(scope, receive, send)

    one_at_a_time = service_of(store, concurrency=1)
    with pytest.raises(RuntimeError, match="no result"):
        asyncio.run(_Run(one_at_a_time, cut, record, asyncio.Semaphore(1), ActiveKeys(ApiKeyTable())).run())
    [kept] = store.batches("")
    assert kept.ending is None and not kept.has_ended
    path.write_bytes(content)
    ended = asyncio.run(run(store, kept))
    assert (ended.status, ended.counts) == ("completed", RequestCounts(3, 3, 0))


NOT_FOUND = b'{"error": {"code": "model_not_found", "retryable": false}}'


@pytest.mark.parametrize("is_run_again", [False, True])
def test_a_model_that_has_answered_in_a_batch_is_waited_for_and_one_that_never_has_for_a_while(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch, is_run_again: bool
) -> None:
    """The last instance of a model is away for longer than a model may be missing at first."""
    bodies = [("a", b"served"), ("b", b"served"), ("c", b"unknown")]
    record = new_batch(
        store,
        b"".join(
            msgspec.json.encode(BatchRequest(name, URL, {"model": msgspec.Raw(b'"%s"' % model)})) + b"\n"
            for name, model in bodies
        ),
    )
    num_sent: Counter[str] = Counter()
    clock = ModelClock()

    async def restart(scope: Scope, receive: Receive, send: Send) -> None:
        model = msgspec.json.decode((await receive())["body"])["model"]
        num_sent[model] += 1
        clock.seconds += 50.0
        if model == "unknown" or 2 <= num_sent[model] < 9:
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": NOT_FOUND})
        else:
            await answer(scope, receive, send)

    if is_run_again:
        num_sent["served"] = 1
        with BatchResults(store, record, 10_000) as results:
            results.add(result("a"))
    monkeypatch.setattr(batch_runner, "MAX_PAUSE_S", 0.0)
    keys = ActiveKeys(ApiKeyTable())
    service = BatchService(store, BatchLimits(1 << 20, 1, 1.0), keys, clock, model_grace_s=120.0)
    ended = asyncio.run(_Run(service, restart, record, asyncio.Semaphore(1), keys).run())
    assert (ended.status, ended.counts) == ("completed", RequestCounts(3, 2, 1))
    assert num_sent == {"served": 9, "unknown": 4}


def test_without_a_grace_an_unknown_model_is_not_waited_for() -> None:
    waits = ModelWaits(0.0)
    waits.add_answer(b"a")
    assert not waits.may_come(b"a", 0.0)
