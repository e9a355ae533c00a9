"""The files of a batch in OpenAI's format: a request on each line of the input, an answer on each line of the output.

Only complete lines of the output count: the run after an interrupted one removes a partial last line, and continues
with the requests that have no line yet. This module knows nothing of servers.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from onward.errors import InvalidRequest, StartupError

MAX_LINE_BYTES = 64 << 20
MAX_ID_LENGTH = 512
MAX_BLANK_LINES = 1_000
"""In one file. Blank lines cost time, and belong to no request."""


class BatchRequest(msgspec.Struct, frozen=True):
    custom_id: str
    url: str
    body: dict[str, msgspec.Raw]
    """The fields, each still undecoded: the server that answers the request decodes them."""
    method: str = "POST"


class BatchResponse(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: Any


class BatchError(msgspec.Struct, frozen=True):
    code: str
    message: str


class BatchResult(msgspec.Struct, frozen=True):
    id: str
    custom_id: str
    response: BatchResponse | None
    error: BatchError | None
    """Why there is no response."""

    @property
    def failed(self) -> bool:
        return self.response is None or self.response.status_code != 200


class _WrittenStatus(msgspec.Struct, frozen=True):
    status_code: int


class _WrittenResult(msgspec.Struct, frozen=True):
    """The parts of a written answer that the next run needs."""

    custom_id: str
    response: _WrittenStatus | None

    @property
    def failed(self) -> bool:
        return self.response is None or self.response.status_code != 200


_requests = msgspec.json.Decoder(BatchRequest)
_written = msgspec.json.Decoder(_WrittenResult)


class InvalidLine(InvalidRequest):
    def __init__(self, path: Path, line: int, problem: str) -> None:
        super().__init__(f"{path}:{line}: {problem}")
        self.line = line
        self.problem = problem


class UnreadableResults(StartupError):
    """The output has a line that is no result."""


class MissingInput(StartupError):
    """There is no input file. Other errors of the disk may pass."""


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """Yields the requests one by one, because a batch may be larger than memory. Raises an `InvalidLine`."""
    for number, line in _lines(path):
        yield _checked(path, number, line)


def _accept(_: BatchRequest) -> str | None:
    return None


def check_input(
    path: Path,
    find_problem: Callable[[BatchRequest], str | None] = _accept,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> list[str]:
    """Checks every line, so that a batch with a fault is not begun. Returns all ids, in order. `find_problem` returns
    what else is wrong with a request, or None."""
    seen: dict[str, None] = {}
    for number, line in _lines(path, max_line_bytes):
        request = _checked(path, number, line)
        if request.custom_id in seen:
            raise InvalidLine(path, number, f"custom_id: {request.custom_id[:80]!r} is there already, further up")
        if (problem := find_problem(request)) is not None:
            raise InvalidLine(path, number, problem)
        seen[request.custom_id] = None
    return list(seen)


def _lines(path: Path, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            number = num_blank = 0
            while line := file.readline(max_line_bytes + 1):
                number += 1
                if len(line) > max_line_bytes:
                    raise InvalidLine(path, number, f"longer than {max_line_bytes} bytes")
                if line.strip():
                    yield number, line
                    continue
                num_blank += 1
                if num_blank > MAX_BLANK_LINES:
                    raise InvalidLine(path, number, f"more than {MAX_BLANK_LINES} lines of the file are blank")
    except OSError as fault:
        error = MissingInput if isinstance(fault, FileNotFoundError) else StartupError
        raise error(f"cannot read {path}: {fault.strerror}") from fault


def _checked(path: Path, number: int, line: bytes) -> BatchRequest:
    try:
        request = _requests.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise InvalidLine(path, number, str(fault)) from None
    if (problem := _problem(request)) is not None:
        raise InvalidLine(path, number, problem)
    return request


def _problem(request: BatchRequest) -> str | None:
    if not 1 <= len(request.custom_id) <= MAX_ID_LENGTH:
        return f"custom_id: must have 1 to {MAX_ID_LENGTH} characters"
    if request.method != "POST":
        return f"method: must be POST, got {request.method[:80]!r}"
    if not request.url.startswith("/v1/") or not request.url.isascii() or not request.url.isprintable():
        return f"url: must be a path such as /v1/chat/completions, got {request.url[:80]!r}"
    if bytes(request.body.get("stream", b"null")) not in (b"false", b"null"):
        return "body.stream: must not be true: each answer is one line"
    return None


class BatchOutputFile:
    """The results so far, and the file for new ones. `drop_failed` removes failed results, so that their requests are
    sent again."""

    def __init__(self, path: Path, *, drop_failed: bool = False) -> None:
        self._path = path
        self._file = self._open()
        self.answered: set[str] = set()
        self.num_failed = 0
        try:
            self._load_results(drop_failed)
        except BaseException:
            self._file.close()
            raise

    def _load_results(self, drop_failed: bool) -> None:
        self._truncate_partial_line()
        if drop_failed:
            self._drop_failed()
        for _, answer in self._lines():
            self.answered.add(answer.custom_id)
            self.num_failed += answer.failed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def sync(self) -> None:
        """Returns when a loss of power cannot lose the results any more."""
        os.fsync(self._file.fileno())

    @property
    def num_bytes(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def add(self, answer: BatchResult) -> None:
        line = msgspec.json.encode(answer) + b"\n"
        # Writes are unbuffered appends: either the whole line is in the file, or the file ends with a part of it.
        while line:
            line = line[self._file.write(line) :]
        self.answered.add(answer.custom_id)
        self.num_failed += answer.failed

    def _open(self) -> Any:
        try:
            file = self._path.open("a+b", buffering=0)
        except OSError as fault:
            raise StartupError(f"cannot write to {self._path}: {fault.strerror}") from fault
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise StartupError(f"another run writes to {self._path} at this moment") from None
        return file

    def _truncate_partial_line(self) -> None:
        """Removes the partial last line of a run that was interrupted."""
        end = end_of_lines = self._file.seek(0, os.SEEK_END)
        while end_of_lines and (
            part := os.pread(self._file.fileno(), min(end_of_lines, 1 << 16), max(0, end_of_lines - (1 << 16)))
        ):
            found = part.rfind(b"\n")
            if found >= 0:
                end_of_lines -= len(part) - found - 1
                break
            end_of_lines -= len(part)
        if end_of_lines != end:
            self._file.truncate(end_of_lines)

    def _lines(self) -> Iterator[tuple[bytes, _WrittenResult]]:
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield line, _written.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
                    message = f"is not an answer of a batch ({fault}); move the file away, or name another"
                    raise UnreadableResults(f"{self._path}:{number} {message}") from None

    def _drop_failed(self) -> None:
        """Removes failed results. The file is replaced atomically: a run that is interrupted here leaves the old file
        or the new one."""
        new_path = self._path.with_name(self._path.name + ".new")
        with new_path.open("wb") as file:
            file.writelines(line for line, answer in self._lines() if not answer.failed)
        new_path.replace(self._path)
        self._file.close()
        self._file = self._open()
