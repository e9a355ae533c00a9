"""The files of a batch as OpenAI has them: a request on each line in, an answer on each line out.

A line of the output is written whole or not at all; what a run that was cut off has left of its last line is taken away by
the next, which goes on with the requests that have no line yet. Knows nothing of servers.
"""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from onward.errors import InvalidRequest, StartupError

MAX_LINE_BYTES = 64 << 20
MAX_ID_LENGTH = 512


class BatchRequest(msgspec.Struct, frozen=True):
    custom_id: str
    url: str
    body: dict[str, Any]
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
    """As much of an answer as the next run wants to know."""

    custom_id: str
    response: _WrittenStatus | None

    @property
    def failed(self) -> bool:
        return self.response is None or self.response.status_code != 200


_requests = msgspec.json.Decoder(BatchRequest)
_written = msgspec.json.Decoder(_WrittenResult)


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """One by one: a batch may be larger than memory. Raises `InvalidRequest` that names the line."""
    for location, line in _lines(path):
        yield _checked(location, line)


def check_input(path: Path) -> list[str]:
    """All ids, in order, after a look at every line: a batch with a fault in it is not begun."""
    seen: dict[str, None] = {}
    for location, line in _lines(path):
        custom_id = _checked(location, line).custom_id
        if custom_id in seen:
            raise _invalid(location, f"custom_id: {custom_id[:80]!r} is there already, further up")
        seen[custom_id] = None
    return list(seen)


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise _invalid(f"{path}:{number}", f"longer than {MAX_LINE_BYTES} bytes")
                if line.strip():
                    yield f"{path}:{number}", line
    except OSError as fault:
        raise StartupError(f"cannot read {path}: {fault.strerror}") from fault


def _checked(location: str, line: bytes) -> BatchRequest:
    try:
        request = _requests.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise _invalid(location, str(fault)) from None
    if not 1 <= len(request.custom_id) <= MAX_ID_LENGTH:
        raise _invalid(location, f"custom_id: must have 1 to {MAX_ID_LENGTH} characters")
    if request.method != "POST":
        raise _invalid(location, f"method: must be POST, got {request.method[:80]!r}")
    if not request.url.startswith("/v1/") or not request.url.isascii() or not request.url.isprintable():
        raise _invalid(location, f"url: must be a path such as /v1/chat/completions, got {request.url[:80]!r}")
    if request.body.get("stream"):
        raise _invalid(location, "body.stream: must not be true: each answer is one line")
    return request


class BatchOutputFile:
    """The results so far, and those to come. `drop_failed`: failed requests are sent again."""

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
        os.fsync(self._file.fileno())
        self._file.close()

    def add(self, answer: BatchResult) -> None:
        line = msgspec.json.encode(answer) + b"\n"
        # Unbuffered and at the end of the file: the line is there whole, or its beginning is the last thing in the file.
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
        """A run was cut off in the middle of it."""
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
                    message = f"is no answer of a batch ({fault}); move the file away, or name another"
                    raise StartupError(f"{self._path}:{number} {message}") from None

    def _drop_failed(self) -> None:
        """At once: a run that is cut off here leaves the old file or the new one."""
        new_path = self._path.with_name(self._path.name + ".new")
        with new_path.open("wb") as file:
            file.writelines(line for line, answer in self._lines() if not answer.failed)
        new_path.replace(self._path)
        self._file.close()
        self._file = self._open()


def _invalid(location: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{location}: {message}")
