"""Files and batches as they are stored, and as clients see them. Pure data; reads no clock and no disk."""

from typing import Literal

import msgspec

BATCH, BATCH_OUTPUT = "batch", "batch_output"
Purpose = Literal["batch", "batch_output"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
Endpoint = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/generate",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
]
ENDED: frozenset[str] = frozenset({"failed", "completed", "expired", "cancelled"})


class FileRecord(msgspec.Struct, frozen=True):
    id: str
    caller: str
    created_s: float
    filename: str
    num_bytes: int
    purpose: Purpose
    expires_s: float


class FileObject(msgspec.Struct, frozen=True):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    expires_at: int
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"
    """Always `processed`: a file is checked when a batch begins."""


def file_object(record: FileRecord) -> FileObject:
    return FileObject(
        record.id, record.num_bytes, int(record.created_s), record.filename, record.purpose, int(record.expires_s)
    )


class BatchLineError(msgspec.Struct, frozen=True):
    """Why a batch failed as a whole."""

    code: str
    message: str
    line: int | None = None
    """The line of the input file, from 1."""
    param: str | None = None


class RequestCounts(msgspec.Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. The process that created it writes it once; after that only the process that runs batches does."""

    id: str
    caller: str
    created_s: float
    expires_s: float
    """When requests that are not answered yet end with `batch_expired`."""
    seed: int
    """The seeds of requests that bring none are derived from it, so that a repeated request has the same answer."""
    endpoint: str
    input_file_id: str
    completion_window: str
    output_file_id: str
    error_file_id: str
    output_ttl_s: float
    """How long the output files are kept."""
    metadata: dict[str, str] | None = None
    status: BatchStatus = "validating"
    counts: RequestCounts = RequestCounts()
    errors: list[BatchLineError] = []
    has_output: bool = False
    has_errors: bool = False
    ending: BatchStatus | None = None
    """How it ends, once that is decided."""
    in_progress_s: float | None = None
    finalizing_s: float | None = None
    ended_s: float | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class BatchErrors(msgspec.Struct, frozen=True):
    data: list[BatchLineError]
    object: Literal["list"] = "list"


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None
    """Why a batch failed as a whole. Failed requests are in the error file."""
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    """A line for each answer with status 200, once the batch has ended."""
    error_file_id: str | None
    """A line for each other answer, once the batch has ended."""
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


def batch_object(record: BatchRecord, cancelled_s: float | None) -> BatchObject:
    """Returns the batch as the API shows it. `cancelled_s`: when its cancellation was requested; None: it was not."""
    status: BatchStatus = record.status
    if cancelled_s is not None and not record.has_ended:
        status = "cancelling"

    def ended(name: BatchStatus) -> int | None:
        return _second(record.ended_s) if record.status == name else None

    return BatchObject(
        id=record.id,
        endpoint=record.endpoint,
        errors=BatchErrors(record.errors) if record.errors else None,
        input_file_id=record.input_file_id,
        completion_window=record.completion_window,
        status=status,
        output_file_id=record.output_file_id if record.has_output else None,
        error_file_id=record.error_file_id if record.has_errors else None,
        created_at=int(record.created_s),
        in_progress_at=_second(record.in_progress_s),
        expires_at=int(record.expires_s),
        finalizing_at=_second(record.finalizing_s),
        completed_at=ended("completed"),
        failed_at=ended("failed"),
        expired_at=ended("expired"),
        cancelling_at=_second(cancelled_s),
        cancelled_at=ended("cancelled"),
        request_counts=record.counts,
        metadata=record.metadata,
    )


def _second(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s)


class DeletedFile(msgspec.Struct, frozen=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class FileList(msgspec.Struct, frozen=True):
    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class BatchList(msgspec.Struct, frozen=True):
    data: list[BatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class ExpiresAfter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: int


class CreateBatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    input_file_id: str
    """A file that was uploaded with the purpose `batch`."""
    endpoint: Endpoint
    """The path of all requests in the file."""
    completion_window: Literal["24h"]
    """Requests that are not answered by then end with `batch_expired`."""
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None
    """How long the output files are kept (default: `--batch-ttl-s`)."""
