"""The results of one batch on disk: answers with status 200 in the output file, all others in the error file."""

from types import TracebackType
from typing import Self

from onward.batches.batch_files import BatchError, BatchOutputFile, BatchResult
from onward.batches.batch_store import BatchStore
from onward.batches.records import BatchRecord, RequestCounts


class QuotaExceeded(Exception):
    """The caller's files have as many bytes as they may."""


class BatchResults:
    """Opening it reads the results of earlier runs. Each `custom_id` is in one of the two files, and once."""

    def __init__(self, store: BatchStore, record: BatchRecord, max_bytes: int) -> None:
        """`max_bytes` is the limit on the bytes of both files."""
        self.max_bytes = max_bytes
        self._output = BatchOutputFile(store.content_path(record.caller, record.output_file_id))
        try:
            self._errors = BatchOutputFile(store.content_path(record.caller, record.error_file_id))
        except BaseException:
            self._output.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._output.close()
        self._errors.close()

    def sync(self) -> None:
        """Returns when a loss of power cannot lose the results any more."""
        self._output.sync()
        self._errors.sync()

    @property
    def num_output_bytes(self) -> int:
        return self._output.num_bytes

    @property
    def num_error_bytes(self) -> int:
        return self._errors.num_bytes

    def has(self, custom_id: str) -> bool:
        return custom_id in self._output.answered or custom_id in self._errors.answered

    def is_completed(self, custom_id: str) -> bool:
        """Returns whether the request was answered with status 200."""
        return custom_id in self._output.answered

    def counts(self, total: int) -> RequestCounts:
        return RequestCounts(total, len(self._output.answered), len(self._errors.answered))

    def add(self, result: BatchResult) -> None:
        """Raises `QuotaExceeded` if the files are full already."""
        if self.num_output_bytes + self.num_error_bytes >= self.max_bytes:
            raise QuotaExceeded
        (self._errors if result.failed else self._output).add(result)

    def add_unanswered(self, custom_ids: list[str], error: BatchError) -> None:
        """Adds an error for each request that has no result."""
        for custom_id in custom_ids:
            if not self.has(custom_id):
                self.add(BatchResult(f"batch_req_{custom_id}", custom_id, None, error))
