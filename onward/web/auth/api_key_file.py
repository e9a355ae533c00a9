"""Reads and writes the file with the table of API keys. Its size is limited, and each write replaces it atomically."""

import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onward.errors import StartupError
from onward.proto.api_key_entry import ApiKeyEntry
from onward.web.auth.api_key_table import ApiKeyTable, admin_entries, merge_tables, parse_table, table_text

MAX_FILE_BYTES = 1 << 20
_TABLE_LINE = re.compile(r"\s*\[\[\s*key\s*\]\]")
KEY_PREFIX = "ow-"
KEY_BYTES = 32
LOCK_RETRY_S = 0.02
MAX_LOCK_ATTEMPTS = 500
"""Adding a key takes milliseconds, so this is enough for hundreds of additions at once."""


class ApiKeySource:
    """The sources of an instance's API keys. They can be read again."""

    def __init__(self, plain: tuple[str, ...] = (), file: str | None = None) -> None:
        self.plain = plain
        self.file = file

    @property
    def has_keys(self) -> bool:
        """Whether there are API keys. A file always counts, because a file without keys is refused."""
        return bool(self.plain) or self.file is not None

    def read(self) -> ApiKeyTable:
        """Returns all keys. Raises `StartupError`, also for a file without keys: a server without keys accepts every
        client."""
        if self.file is not None and not Path(self.file).exists():
            raise StartupError(
                f"--api-keys {self.file} does not exist; make it with `onward keys add {self.file} NAME`"
            )
        keys = merge_tables(admin_entries(self.plain), read_table(Path(self.file)) if self.file is not None else ())
        if self.file is not None and not len(keys):
            raise StartupError(f"{self.file} has no key; make one with `onward keys add {self.file} NAME`")
        return keys


def read_table(path: Path) -> list[ApiKeyEntry]:
    return parse_table(_text(path), str(path))


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def add_entry(path: Path, entry: ApiKeyEntry) -> None:
    """Appends an entry. The rest of the file stays unchanged, comments included."""
    with _only_writer(path):
        text = _text(path) if path.exists() else ""
        existing = text.rstrip("\n") + "\n\n" if text.strip() else ""
        new_text = existing + table_text(entry)
        parse_table(new_text, str(path))
        _replace(path, new_text)


def remove_entry(path: Path, name: str) -> None:
    """Removes an entry. The rest of the file stays unchanged. The last key cannot be removed: servers refuse to read a
    file without keys, and would continue to accept the removed key."""
    with _only_writer(path):
        text = _text(path)
        names = [entry.name for entry in parse_table(text, str(path))]
        if name not in names:
            raise StartupError(f"{path} has no key of the name {name[:80]}")
        if len(names) == 1:
            raise StartupError(
                f"{name} is the only key of {path}, which servers do not read without one; add another first"
            )
        new_text = _without_table(text, names.index(name))
        if [entry.name for entry in parse_table(new_text, str(path))] != [
            entry_name for entry_name in names if entry_name != name
        ]:
            raise StartupError(f"{path} is not written as `onward keys` writes it; remove {name} in an editor")
        _replace(path, new_text)


def _without_table(text: str, number: int) -> str:
    """Returns the text without the lines of one [[key]]. Comments above a table belong to it."""
    lines = text.splitlines(keepends=True)
    starts = [index for index, line in enumerate(lines) if _TABLE_LINE.match(line)]
    if number >= len(starts):
        return text
    start, end = starts[number], starts[number + 1] if number + 1 < len(starts) else len(lines)
    while number + 1 < len(starts) and end > start and lines[end - 1].lstrip().startswith("#"):
        end -= 1
    return "".join(lines[:start] + lines[end:])


@contextmanager
def _only_writer(path: Path) -> Iterator[None]:
    """Holds the lock of the file's folder, so that no other process changes the file between reading and replacing it.

    The folder and not the file: a lock on a file that is replaced is a lock on the old one. No lock file is left behind.
    """
    try:
        folder_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as fault:
        raise StartupError(f"cannot read {path.parent}: {fault.strerror}") from None
    try:
        _lock(folder_fd, path)
        yield
    finally:
        os.close(folder_fd)


def _lock(folder_fd: int, path: Path) -> None:
    for _ in range(MAX_LOCK_ATTEMPTS):
        try:
            return fcntl.flock(folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_RETRY_S)
        except OSError as fault:
            raise StartupError(f"cannot lock {path.parent}: {fault.strerror}") from None
    raise StartupError(f"another process holds the lock of {path.parent}, so {path.name} was not changed; try again")


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as fault:
        raise StartupError(f"cannot read {path}: {fault.strerror}") from None
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StartupError(f"others can write {path} and could add keys of their own: chmod 600 {path}")
    if len(raw) > MAX_FILE_BYTES:
        raise StartupError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return raw.decode()
    except UnicodeDecodeError as fault:
        raise StartupError(f"{path} is not UTF-8 (byte {fault.start})") from None


def _replace(path: Path, text: str) -> None:
    """Replaces the file atomically: a server that reads it meanwhile gets the complete old or the complete new file."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(fd, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as fault:
        raise StartupError(f"cannot write {path}: {fault.strerror}") from None
