"""Runs the batches of a folder, in the one process that holds the folder's lock.

A batch is only its record, its input and the results so far, all on disk. A process that takes over after another one
was killed reads them, and sends the requests that have no result yet. Seeds are stored, so answers do not depend on how
often that happens.
"""

import asyncio
import contextlib
import enum
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import BinaryIO

import msgspec
from starlette.types import ASGIApp

from onward import log
from onward.batches.app_sender import app_sender
from onward.batches.batch_files import (
    MAX_LINE_BYTES,
    BatchError,
    BatchRequest,
    BatchResponse,
    BatchResult,
    InvalidLine,
    MissingInput,
    UnreadableResults,
    check_input,
    read_requests,
)
from onward.batches.batch_policy import (
    MAX_REQUESTS,
    MAX_REQUESTS_AT_ONCE,
    BatchLimits,
    caller_of_batches,
    concurrency_of,
    find_problem,
)
from onward.batches.batch_results import BatchResults, QuotaExceeded
from onward.batches.batch_runner import Retries, error_code, is_busy, run_batch
from onward.batches.batch_store import BatchStore
from onward.batches.caller_turns import complete_in_thread
from onward.batches.model_waits import ModelWaits, model_of
from onward.batches.records import BATCH_OUTPUT, BatchLineError, BatchRecord, BatchStatus, FileRecord, RequestCounts
from onward.batches.upload import UPLOAD_TIMEOUT_S
from onward.clock import Clock
from onward.web.auth.authenticator import ActiveKeys

SCAN_INTERVAL_S = 0.5
"""How often the folder is searched for new batches and requests to cancel, and the lock is tried."""
SWEEP_INTERVAL_S = 60.0
PROGRESS_INTERVAL_S = 1.0
RETRY_AFTER_FAULT_S = 5.0
MODEL_NOT_FOUND = "model_not_found"
_EXPIRED = BatchError("batch_expired", "this request was not answered within the batch's completion window")

_logger = logging.getLogger(__name__)


class _BatchWork(enum.Enum):
    SEND = enum.auto()
    END = enum.auto()


@dataclass(frozen=True, slots=True)
class _Running:
    batch_id: str
    task: "asyncio.Task[None]"


@dataclass(frozen=True, slots=True)
class _Ended(Exception):
    """How a batch ends before all its requests are answered."""

    status: BatchStatus
    errors: tuple[BatchLineError, ...] = ()


def _failed(code: str, message: str) -> _Ended:
    return _Ended("failed", (BatchLineError(code, message),))


_KEY_REMOVED = _failed("key_removed", "the API key of this batch does not exist any more")


class BatchService:
    def __init__(
        self,
        store: BatchStore,
        limits: BatchLimits,
        active_keys: ActiveKeys,
        clock: Clock,
        model_grace_s: float = 0.0,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        """`model_grace_s`: how long a batch waits for a missing model that has not answered any of its requests."""
        self.max_line_bytes = max_line_bytes
        self.model_grace_s = model_grace_s
        self.store = store
        self.limits = limits
        self.clock = clock
        self._active_keys = active_keys
        self._places = asyncio.Semaphore(MAX_REQUESTS_AT_ONCE)
        self._running: dict[tuple[str, _BatchWork], _Running] = {}
        """What is done for each caller: one batch that sends requests, and one behind it that only ends."""
        self._paused_until_s: dict[str, float] = {}
        """Callers whose folders could not be read, and when to try again."""
        self._app: ASGIApp | None = None
        self._task: asyncio.Task[None] | None = None
        self._swept_at_s: float | None = None

    def set_app(self, app: ASGIApp) -> None:
        """Sets what answers the requests of batches: this process's application, without checks of keys."""
        self._app = app

    def start(self) -> None:
        """Runs batches from now on, whenever this process has the lock."""
        assert self._app is not None, "there is an application"
        self._task = asyncio.get_running_loop().create_task(self._run(self._app))

    async def close(self) -> None:
        """Stops. Requests without a result are sent again by the process that takes over."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    def stop(self) -> None:
        """Begins to stop."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self, app: ASGIApp) -> None:
        lock: BinaryIO | None = None
        try:
            while True:
                try:
                    lock = lock or await asyncio.to_thread(self.store.try_lock_runner)
                    if lock is not None:
                        await self._scan(app)
                except Exception:
                    _logger.exception(log.event("batches cannot be run; trying again"))
                    await asyncio.sleep(RETRY_AFTER_FAULT_S)
                await asyncio.sleep(SCAN_INTERVAL_S)
        finally:
            running = [one.task for one in self._running.values()]
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)
            if lock is not None:
                lock.close()

    async def _scan(self, app: ASGIApp) -> None:
        """Starts tasks for callers with batches that have not ended, and removes what has expired."""
        for caller in await asyncio.to_thread(self.store.callers):
            if self._paused_until_s.get(caller, 0.0) > self.clock.now_s():
                continue
            self._paused_until_s.pop(caller, None)
            try:
                await self._scan_caller(app, caller)
            except Exception:
                _logger.exception(log.event("batches of a caller cannot be run; trying again", caller=caller))
                self._paused_until_s[caller] = self.clock.now_s() + RETRY_AFTER_FAULT_S
        now_s = self.clock.now_s()
        if self._swept_at_s is None or now_s - self._swept_at_s >= SWEEP_INTERVAL_S:
            self._swept_at_s = now_s
            await asyncio.to_thread(self._sweep)

    async def _scan_caller(self, app: ASGIApp, caller: str) -> None:
        # A batch that ends while the records are read must not run again.
        free = [work for work in _BatchWork if (caller, work) not in self._running]
        busy_ids = {one.batch_id for (name, _), one in self._running.items() if name == caller}
        found = await asyncio.to_thread(self._find_work, caller, busy_ids) if free else {}
        for work, record in found.items():
            if work in free:
                self._start_batch(app, work, record)

    def _start_batch(self, app: ASGIApp, work: _BatchWork, record: BatchRecord) -> None:
        key = (record.caller, work)
        task = asyncio.get_running_loop().create_task(self._run_batch(app, record))
        self._running[key] = _Running(record.id, task)
        task.add_done_callback(lambda _: self._running.pop(key))

    def _find_work(self, caller: str, busy_ids: Collection[str]) -> dict[_BatchWork, BatchRecord]:
        """Returns the oldest batch, and the oldest one behind it that only has to end. None of `busy_ids`."""
        first, *queued = [record for record in self.store.batches(caller) if not record.has_ended] or [None]
        found = {} if first is None or first.id in busy_ids else {_BatchWork.SEND: first}
        over = (record for record in queued if record and record.id not in busy_ids and self._is_over(record))
        if (record := next(over, None)) is not None:
            found[_BatchWork.END] = record
        return found

    def _is_over(self, record: BatchRecord) -> bool:
        """Returns whether a batch ends without sending its requests."""
        return self.clock.wall_s() >= record.expires_s or self.store.cancelled_s(record) is not None

    def _sweep(self) -> None:
        for caller in self.store.callers():
            try:
                self._sweep_caller(caller, self.clock.wall_s())
            except Exception:
                _logger.exception(log.event("what has expired of a caller cannot be removed", caller=caller))

    def _sweep_caller(self, caller: str, now_s: float) -> None:
        with self.store.locked(caller):
            batches = self.store.batches(caller)
            for record in batches:
                if record.ended_s is not None and record.ended_s + self.limits.ttl_s <= now_s:
                    self.store.delete_batch(record)
            running = [record for record in batches if not record.has_ended]
            inputs = {record.input_file_id for record in running}
            for file in self.store.files(caller):
                if file.expires_s <= now_s and file.id not in inputs:
                    self.store.delete_file(file)
            outputs = {file_id for record in running for file_id in (record.output_file_id, record.error_file_id)}
            self.store.delete_leftovers(caller, outputs, now_s - UPLOAD_TIMEOUT_S)

    # One batch.

    async def _run_batch(self, app: ASGIApp, record: BatchRecord) -> None:
        _logger.info(log.event("batch runs", batch=record.id, caller=record.caller))
        try:
            record = await _Run(self, app, record, self._places, self._active_keys).run()
        except Exception:
            # For example a full disk. The batch is run again, until it expires.
            _logger.exception(log.event("a batch was interrupted by an error; it is run again", batch=record.id))
            await asyncio.sleep(RETRY_AFTER_FAULT_S)
        else:
            counts = record.counts
            fields = {"status": record.status, "completed": counts.completed, "failed": counts.failed}
            _logger.info(log.event("batch ended", batch=record.id, **fields))


class _Run:
    """One run of one batch, from its record to its end."""

    def __init__(
        self,
        service: BatchService,
        app: ASGIApp,
        record: BatchRecord,
        places: asyncio.Semaphore,
        active_keys: ActiveKeys,
    ) -> None:
        self._service = service
        self._store, self._limits, self._clock = service.store, service.limits, service.clock
        self._app, self._record, self._places, self._active_keys = app, record, places, active_keys
        self._input = service.store.content_path(record.caller, record.input_file_id)
        self._model_of: dict[str, bytes] = {}
        """The model of each request, by `custom_id`."""
        self._models = ModelWaits(service.model_grace_s)

    async def run(self) -> BatchRecord:
        """Returns the record of the batch when it has ended."""
        custom_ids: list[str] = []
        try:
            custom_ids = await asyncio.to_thread(self._check_input)
        except _Ended as end:
            if self._record.ending is None:
                self._record = msgspec.structs.replace(self._record, ending=end.status, errors=[*end.errors])
        max_bytes = await asyncio.to_thread(self._bytes_left)
        try:
            results = await asyncio.to_thread(BatchResults, self._store, self._record, max_bytes)
        except UnreadableResults:
            _logger.exception(log.event("a batch fails because its results are damaged", batch=self._record.id))
            error = BatchLineError("results_unreadable", "the results that were written so far are damaged")
            sizes = await asyncio.to_thread(self._result_sizes)
            return await self._end("failed", sizes, self._record.counts, errors=[error])
        with results:
            is_incomplete = self._record.ending == "completed" and self._num_missing(custom_ids, results) > 0
            if self._record.ending is None or is_incomplete:
                in_progress_s = self._record.in_progress_s or self._clock.wall_s()
                counts = results.counts(len(custom_ids))
                await self._write(status="in_progress", in_progress_s=in_progress_s, counts=counts)
                end = await self._send_all(custom_ids, results)
                if end.status == "completed" and (num_missing := self._num_missing(custom_ids, results)):
                    raise RuntimeError(f"{num_missing} requests have no result although all were sent")
                # No record may say how the batch ends while a loss of power could still lose results.
                await complete_in_thread(results.sync)
                # A process that takes over from here must not decide again how the batch has ended.
                finalizing_s = self._clock.wall_s()
                await self._write(
                    status="finalizing", ending=end.status, errors=[*end.errors], finalizing_s=finalizing_s
                )
            return await self._finish(custom_ids, results)

    def _num_missing(self, custom_ids: list[str], results: BatchResults) -> int:
        return sum(not results.has(custom_id) for custom_id in custom_ids)

    def _check_input(self) -> list[str]:
        num_requests = 0
        models: dict[bytes, bytes] = {}

        def problem(request: BatchRequest) -> str | None:
            nonlocal num_requests
            num_requests += 1
            if num_requests > MAX_REQUESTS:
                return f"a batch may have at most {MAX_REQUESTS} requests"
            model = model_of(request)
            self._model_of[request.custom_id] = models.setdefault(model, model)
            return find_problem(request, self._record.endpoint)

        try:
            custom_ids = check_input(self._input, problem, self._service.max_line_bytes)
        except InvalidLine as fault:
            raise _Ended("failed", (BatchLineError("invalid_line", fault.problem, fault.line),)) from None
        except MissingInput:
            raise _failed("file_not_found", "the input file does not exist any more") from None
        if not custom_ids:
            raise _failed("empty_file", "the input file has no requests")
        return custom_ids

    def _bytes_left(self) -> int:
        """Returns how many bytes both output files may have."""
        record, store = self._record, self._store
        stored = store.stored_bytes(record.caller) - sum(self._result_sizes())
        return max(0, self._limits.max_bytes - stored)

    def _result_sizes(self) -> tuple[int, int]:
        """Returns the bytes of the output and the error file."""
        record = self._record
        return self._size_of(record.output_file_id), self._size_of(record.error_file_id)

    def _size_of(self, file_id: str) -> int:
        try:
            return self._store.content_path(self._record.caller, file_id).stat().st_size
        except FileNotFoundError:
            return 0

    async def _send_all(self, custom_ids: list[str], results: BatchResults) -> _Ended:
        """Sends the requests that have no result yet. Returns how the batch ends."""
        remaining = self._num_missing(custom_ids, results)
        caller = self._active_keys.keys.named(self._record.caller)
        if (end := await self._early_end()) is not None or caller is None:
            return end or _KEY_REMOVED
        requests = (request for request in read_requests(self._input) if not results.has(request.custom_id))
        sender = app_sender(self._app, caller_of_batches(caller), self._record.seed, self._places)
        concurrency = min(concurrency_of(caller, self._limits), remaining)
        for custom_id in custom_ids:
            if results.is_completed(custom_id):
                self._models.add_answer(self._model_of[custom_id])
        adding = asyncio.Lock()

        async def on_result(result: BatchResult) -> None:
            async with adding:
                await complete_in_thread(results.add, result)
            if not result.failed:
                self._models.add_answer(self._model_of[result.custom_id])

        retries = Retries(waits_for=self._may_answer_later)
        sending = asyncio.ensure_future(run_batch(sender, requests, concurrency, on_result, retries))
        try:
            return await self._watch(sending, results, len(custom_ids))
        finally:
            sending.cancel()
            await asyncio.wait((sending,))

    def _may_answer_later(self, request: BatchRequest, answer: BatchResponse) -> bool:
        """Returns whether a request is sent again until the batch ends."""
        if answer.status_code == 404 and error_code(answer) == MODEL_NOT_FOUND:
            return self._models.may_come(model_of(request), self._clock.now_s())
        return is_busy(answer)

    async def _watch(self, sending: "asyncio.Future[None]", results: BatchResults, total: int) -> _Ended:
        """Waits until all is sent, or the batch ends early, and returns how it ends. Meanwhile writes the progress
        and renews the byte limit. After an early end the caller cancels `sending`."""
        while not (await asyncio.wait((sending,), timeout=PROGRESS_INTERVAL_S))[0]:
            if (end := await self._early_end()) is not None:
                return end
            # The caller may have added or deleted files.
            results.max_bytes = await asyncio.to_thread(self._bytes_left)
            counts = results.counts(total)
            if counts != self._record.counts:
                await self._write(counts=counts)
        try:
            sending.result()
        except ExceptionGroup as group:
            if group.subgroup(QuotaExceeded) is None:
                raise
            problem = "the results have more bytes than you may store (--batch-max-bytes); delete files"
            return _failed("quota_exceeded", problem)
        return _Ended("completed")

    async def _early_end(self) -> _Ended | None:
        """Returns how the batch ends although requests are not answered, or None."""
        if await asyncio.to_thread(self._store.cancelled_s, self._record) is not None:
            return _Ended("cancelled")
        if self._clock.wall_s() >= self._record.expires_s:
            return _Ended("expired")
        return None if self._active_keys.keys.named(self._record.caller) else _KEY_REMOVED

    async def _finish(self, custom_ids: list[str], results: BatchResults) -> BatchRecord:
        """Makes the output files visible, and ends the batch. It can be repeated."""
        record = self._record
        if record.ending == "expired":
            with contextlib.suppress(QuotaExceeded):
                await complete_in_thread(results.add_unanswered, custom_ids, _EXPIRED)
        await complete_in_thread(results.sync)
        assert record.ending is not None, "it is decided how the batch ends"
        counts = results.counts(len(custom_ids) or record.counts.total)
        sizes = (results.num_output_bytes, results.num_error_bytes)
        return await self._end(record.ending, sizes, counts, errors=record.errors)

    async def _end(
        self, status: BatchStatus, sizes: tuple[int, int], counts: RequestCounts, errors: list[BatchLineError]
    ) -> BatchRecord:
        record, ended_s = self._record, self._clock.wall_s()
        has_output = await asyncio.to_thread(self._show_file, record.output_file_id, "output", sizes[0], ended_s)
        has_errors = await asyncio.to_thread(self._show_file, record.error_file_id, "errors", sizes[1], ended_s)
        return await self._write(
            status=status,
            counts=counts,
            has_output=has_output,
            has_errors=has_errors,
            errors=errors,
            ended_s=ended_s,
        )

    def _show_file(self, file_id: str, kind: str, num_bytes: int, now_s: float) -> bool:
        """Writes the record of an output file, or removes the file if it is empty."""
        batch = self._record
        filename = f"{batch.id}_{kind}.jsonl"
        expires_s = now_s + batch.output_ttl_s
        file = FileRecord(file_id, batch.caller, now_s, filename, num_bytes, BATCH_OUTPUT, expires_s)
        if not num_bytes:
            self._store.delete_file(file)
            return False
        self._store.write_file_record(file)
        return True

    async def _write(self, **changes: object) -> BatchRecord:
        self._record = msgspec.structs.replace(self._record, **changes)
        # No thread may write after another process has the lock, or to a closed file.
        await complete_in_thread(self._store.write_batch, self._record)
        return self._record
