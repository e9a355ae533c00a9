"""Detects which model folders are in use, so that none is removed while a server uses it. Writes nothing.

A server holds a shared lock on the folder itself, which also works if the cache is read-only. Other processes are
detected by the weights that they have mapped. A process on another machine that shares the cache is not detected.
"""

import fcntl
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from onward.errors import StartupError

_PROCESSES = Path("/proc")


@contextmanager
def hold_model(folder: Path) -> Iterator[None]:
    """Locks the folder while the block runs, so that `claim` does not get it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as fault:
        raise StartupError(f"the model's folder {folder} is gone: {fault.strerror}; start again") from None
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits while the folder is being removed
        if not folder.is_dir():
            raise StartupError(f"the model's folder {folder} was removed meanwhile; start again")
        yield
    finally:
        os.close(descriptor)


@contextmanager
def claim(folders: Iterable[Path], mapped: Collection[bytes]) -> Iterator[bool]:
    """Yields whether no process uses any of the folders. If so, no server can begin to use them while the block runs.
    `mapped` are the files that processes have mapped."""
    folders = list(folders)
    with ExitStack() as opened:
        descriptors = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY) for folder in folders]
        for descriptor in descriptors:
            opened.callback(os.close, descriptor)
        is_free = all(_lock(descriptor) for descriptor in descriptors)
        # Links are resolved to the files themselves.
        files = {os.fsencode(path.resolve()) for folder in folders for path in folder.rglob("*")}
        yield is_free and files.isdisjoint(mapped)


def mapped_files() -> set[bytes]:
    """Returns the files that are mapped by processes which this process may inspect."""
    files: set[bytes] = set()
    for process in _PROCESSES.glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            for line in (process / "maps").read_bytes().splitlines():
                _, slash, path = line.partition(b"/")
                files.add(slash + path)
    return files


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: only mapped files show a use
        return True
    return True
