"""The one secret that the instances of a cluster share: 32 random bytes, as hex in a file that only its owner can read."""

import os
import secrets
import stat
from pathlib import Path

from onward.errors import StartupError

KEY_BYTES = 32
MAX_FILE_BYTES = 1024


def new_key() -> str:
    return secrets.token_hex(KEY_BYTES)


def write_key(path: Path) -> None:
    """Makes a new key. Never overwrites one: instances that hold the old one would be locked out."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise StartupError(f"{path} exists already; delete it first if no instance uses it any more") from None
    except OSError as fault:
        raise StartupError(f"cannot write {path}: {fault.strerror}") from fault
    with os.fdopen(fd, "w") as file:
        file.write(new_key() + "\n")


def read_key(path: str | None) -> str:
    """The key as hex; empty where no file is named. Raises `StartupError` for a file that holds none, or is no secret."""
    if path is None:
        return ""
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(MAX_FILE_BYTES)
    except FileNotFoundError:
        raise StartupError(f"--cluster-key-file {path} does not exist; make it with `onward keygen {path}`") from None
    except OSError as fault:
        raise StartupError(f"cannot read --cluster-key-file {path}: {fault.strerror}") from fault
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise StartupError(f"others can read --cluster-key-file {path}; close it to them: chmod 600 {path}")
    return _checked(path, text)


def _checked(path: str, text: bytes) -> str:
    try:
        key = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        raise StartupError(
            f"--cluster-key-file {path} is no key: it has characters other than 0-9 and a-f; "
            "make a new one with `onward keygen FILE`"
        ) from None
    if len(key) != KEY_BYTES:
        raise StartupError(
            f"--cluster-key-file {path} is no key: it has {2 * len(key)} hex digits instead of {2 * KEY_BYTES}; "
            "make a new one with `onward keygen FILE`"
        )
    return key.hex()
