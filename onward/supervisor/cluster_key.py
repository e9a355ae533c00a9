"""The cluster key, a secret that the instances of a cluster share: 32 random bytes, as hex in a file that only its owner
can read."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from onward.errors import StartupError
from onward.supervisor.secret_file import check_secret_file

KEY_BYTES = 32
MAX_FILE_BYTES = 1024


def new_key() -> str:
    return secrets.token_hex(KEY_BYTES)


def write_key(path: Path) -> None:
    """Writes a new key. Never overwrites an existing file: instances that have the old key would be locked out."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise StartupError(f"{path} exists already; delete it first if no instance uses it any more") from None
    except OSError as fault:
        raise StartupError(f"cannot write {path}: {fault.strerror}") from fault
    with os.fdopen(fd, "w") as file:
        file.write(new_key() + "\n")


@contextlib.contextmanager
def key_in_memory(key: str) -> Iterator[int]:
    """Yields a file descriptor of a file with this key. The file has no name, and is gone with the processes that hold
    it."""
    fd = os.memfd_create("onward-cluster-key", os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        os.write(fd, key.encode())
        yield fd
    finally:
        os.close(fd)


def read_key(path: str | None) -> str:
    """Returns the key as hex; empty if `path` is None. Raises `StartupError` if the file has no valid key, or if others
    than its owner can read it."""
    if path is None:
        return ""
    try:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(MAX_FILE_BYTES)
    except FileNotFoundError:
        raise StartupError(f"--cluster-key-file {path} does not exist; make it with `onward keygen {path}`") from None
    except OSError as fault:
        raise StartupError(f"cannot read --cluster-key-file {path}: {fault.strerror}") from fault
    check_secret_file(status, "--cluster-key-file", path)
    return _checked(path, text)


def _checked(path: str, text: bytes) -> str:
    try:
        key = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        raise StartupError(
            f"--cluster-key-file {path} is not a cluster key: it has characters other than 0-9 and a-f; "
            "make a new one with `onward keygen FILE`"
        ) from None
    if len(key) != KEY_BYTES:
        raise StartupError(
            f"--cluster-key-file {path} is not a cluster key: it has {2 * len(key)} hex digits instead of {2 * KEY_BYTES}; "
            "make a new one with `onward keygen FILE`"
        )
    return key.hex()
