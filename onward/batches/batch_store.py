"""Files and batches on disk, in a folder that several processes share.

    DIR/runner.lock                              held by the process that runs batches
    DIR/callers/NAME/lock                        held while a caller's quota is checked and used
    DIR/callers/NAME/files/ID.json, ID.jsonl     a file: its record and its content
    DIR/callers/NAME/batches/ID.json, ID.cancel  a batch, and the request to cancel it
    DIR/callers/NAME/uploads/                    files that are being received

A record is replaced atomically, and exists only if the content is complete. All functions block, so event loops call
them in threads.
"""

import contextlib
import fcntl
import logging
import os
import re
import secrets
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from onward import log
from onward.batches.records import BatchRecord, FileRecord
from onward.errors import NotFound, StartupError
from onward.web.auth.api_key_table import Caller
from onward.web.auth.authenticator import may_access
from onward.web.auth.owned_request_ids import make_owned_id, owns_request_id

FILE_PREFIX, BATCH_PREFIX = "file-", "batch_"
_ANONYMOUS = "_anonymous"
"""The folder of clients without keys. No name of a key begins with an underscore."""
_ID = re.compile(r"(file-|batch_)([0-9a-f]{32})")
_logger = logging.getLogger(__name__)

Record = TypeVar("Record", FileRecord, BatchRecord)


class BatchStore:
    def __init__(self, folder: str) -> None:
        self._root = Path(folder)
        self._callers = self._root / "callers"
        self._final: dict[Path, dict[Path, FileRecord | BatchRecord]] = {}
        """Records that do not change any more, by folder, so that a search for unfinished batches reads few files."""
        self._damaged: dict[Path, dict[Path, int]] = {}
        """When each damaged record was written, by folder: each is logged once, and not with each search."""

    def prepare(self) -> None:
        """Creates the folder. Only this user may read it, because it has prompts and answers."""
        try:
            self._callers.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as fault:
            raise StartupError(f"--batch-dir {self._root}: {fault.strerror}") from fault

    def try_lock_runner(self) -> BinaryIO | None:
        """Returns the lock of the process that runs batches, or None while another process has it. The kernel releases
        the lock when the process ends, however it ends."""
        file = (self._root / "runner.lock").open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return None
        return file

    @contextlib.contextmanager
    def locked(self, caller: str) -> Iterator[None]:
        """Holds off other processes that add files or batches of this caller."""
        with (self._folder(caller) / "lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def callers(self) -> list[str]:
        return sorted("" if path.name == _ANONYMOUS else path.name for path in self._callers.iterdir())

    # Files.

    def new_id(self, prefix: str, caller: str) -> str:
        return prefix + make_owned_id(secrets.token_hex(16), caller)

    def files(self, caller: str) -> list[FileRecord]:
        return self._records(caller, "files", FileRecord)

    def find_file(self, caller: Caller, file_id: str, now_s: float, param: str = "file_id") -> FileRecord:
        """Returns a file that the caller may see. Raises the same `NotFound` for another caller's file as for one that
        never existed."""
        record = self._find(caller, file_id, FILE_PREFIX, "files", FileRecord)
        if record is None or record.expires_s <= now_s:
            raise _not_found("file", file_id, param)
        return record

    def content_path(self, caller: str, file_id: str) -> Path:
        return self._folder(caller) / "files" / f"{file_id}.jsonl"

    def add_file(self, record: FileRecord, content: Path) -> None:
        """Moves the content, which is on disk already, to its place, and then writes the record."""
        path = self.content_path(record.caller, record.id)
        content.replace(path)
        _sync_folder(path.parent)
        self.write_file_record(record)

    def write_file_record(self, record: FileRecord) -> None:
        _write(self._folder(record.caller) / "files" / f"{record.id}.json", msgspec.json.encode(record))

    def delete_file(self, record: FileRecord) -> None:
        (self._folder(record.caller) / "files" / f"{record.id}.json").unlink(missing_ok=True)
        self.content_path(record.caller, record.id).unlink(missing_ok=True)

    def stored_bytes(self, caller: str) -> int:
        """Returns the bytes of all contents, also of files that a running batch still writes."""
        num_bytes = 0
        for path in (self._folder(caller) / "files").glob("*.jsonl"):
            with contextlib.suppress(FileNotFoundError):  # deleted just now
                num_bytes += path.stat().st_size
        return num_bytes

    def new_upload(self, caller: str) -> Path:
        return self._folder(caller) / "uploads" / f"{secrets.token_hex(8)}.part"

    def delete_leftovers(self, caller: str, kept_ids: Collection[str], before_s: float) -> None:
        """Removes what killed processes have left: partial uploads, and contents without a record. `kept_ids` are files
        that batches still write."""
        folder = self._folder(caller)
        orphans = (
            path
            for path in (folder / "files").glob("*.jsonl")
            if path.stem not in kept_ids and not path.with_suffix(".json").exists()
        )
        for path in [*(folder / "uploads").glob("*.part"), *folder.glob("*/*.new"), *orphans]:
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < before_s:
                    path.unlink()

    # Batches.

    def batches(self, caller: str) -> list[BatchRecord]:
        return self._records(caller, "batches", BatchRecord)

    def find_batch(self, caller: Caller, batch_id: str, param: str = "batch_id") -> BatchRecord:
        record = self._find(caller, batch_id, BATCH_PREFIX, "batches", BatchRecord)
        if record is None:
            raise _not_found("batch", batch_id, param)
        return record

    def write_batch(self, record: BatchRecord) -> None:
        _write(self._batch_path(record, "json"), msgspec.json.encode(record))

    def request_cancel(self, record: BatchRecord, now_s: float) -> None:
        _write(self._batch_path(record, "cancel"), str(now_s).encode())

    def cancelled_s(self, record: BatchRecord) -> float | None:
        """Returns when the batch was asked to end, or None."""
        try:
            return float(self._batch_path(record, "cancel").read_bytes())
        except FileNotFoundError:
            return None

    def delete_batch(self, record: BatchRecord) -> None:
        for suffix in ("json", "cancel"):
            self._batch_path(record, suffix).unlink(missing_ok=True)

    def _batch_path(self, record: BatchRecord, suffix: str) -> Path:
        return self._folder(record.caller) / "batches" / f"{record.id}.{suffix}"

    def _folder(self, caller: str) -> Path:
        folder = self._callers / (caller or _ANONYMOUS)
        if not (folder / "uploads").is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)
            for name in ("files", "batches", "uploads"):
                (folder / name).mkdir(mode=0o700, exist_ok=True)
            _sync_folder(folder)
            _sync_folder(self._callers)
        return folder

    def _records(self, caller: str, kind: str, struct: type[Record]) -> list[Record]:
        """Returns a caller's records, oldest first."""
        folder = self._folder(caller) / kind
        paths = set(folder.glob("*.json"))
        for known in (self._final.setdefault(folder, {}), self._damaged.setdefault(folder, {})):
            for path in [path for path in list(known) if path not in paths]:
                known.pop(path, None)
        found = [record for path in paths if (record := self._read_cached(folder, path, struct)) is not None]
        return sorted(found, key=lambda record: (record.created_s, record.id))

    def _read_cached(self, folder: Path, path: Path, struct: type[Record]) -> Record | None:
        final, damaged = self._final[folder], self._damaged[folder]
        if isinstance(known := final.get(path), struct):
            return known
        modified_ns = _modified_ns(path)
        if modified_ns is not None and damaged.get(path) == modified_ns:
            return None
        record = _read(path, struct)
        if record is None and modified_ns is not None:
            damaged[path] = modified_ns
        if isinstance(record, FileRecord) or (isinstance(record, BatchRecord) and record.has_ended):
            final[path] = record
        return record

    def _find(self, caller: Caller, text: str, prefix: str, kind: str, struct: type[Record]) -> Record | None:
        match = _ID.fullmatch(text)
        if match is None or match[1] != prefix or not owns_request_id(caller, match[2]):
            return None
        # Only an admin may see the records of other callers, and the id does not say whose it is.
        others = [name for name in self.callers() if name != caller.name] if caller.is_admin else []
        for name in (caller.name, *others):
            record = _read(self._folder(name) / kind / f"{text}.json", struct)
            if record is not None and may_access(caller, record.caller):
                return record
        return None


def _modified_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _read(path: Path, struct: type[Record]) -> Record | None:
    """Returns a record, or None if there is none that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=struct)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as fault:
        _logger.error(log.event("a record is damaged and ignored", path=str(path), problem=str(fault)))
        return None


def _write(path: Path, data: bytes) -> None:
    """Replaces a file atomically, and keeps the old one if this process or the machine ends meanwhile."""
    new_path = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    with new_path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new_path.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Returns when a loss of power cannot undo that files of this folder were created or replaced."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _not_found(kind: str, text: str, param: str) -> NotFound:
    return NotFound(f"{param}: there is no {kind} {text[:80]!r} of yours here", code=f"{kind}_not_found", param=param)
