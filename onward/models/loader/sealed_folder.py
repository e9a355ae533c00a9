"""Folders of the cache that are complete or absent: written under another name, sealed, and renamed.

The seal lists each file's size and a checksum. The checksum of a large file covers evenly spread samples. It detects a
file that is cut short, swapped or zeroed at the cost of a few pages, but not every flipped bit. Knows nothing of
models.
"""

import contextlib
import fcntl
import glob
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

SEAL = "seal.json"

_WHOLE_BYTES = 1 << 20
_SAMPLE_BYTES = 4096
_NUM_SAMPLES = 64
_LOCK_WAIT_S = 900.0
_LOCK_POLL_S = 0.1
_ABANDONED_S = 3600.0


class _FileSeal(msgspec.Struct, frozen=True):
    size: int
    checksum: int


def is_intact(folder: Path) -> bool:
    try:
        seals = msgspec.json.decode((folder / SEAL).read_bytes(), type=dict[str, _FileSeal])
        return all(_seal_of(folder / name) == seal for name, seal in seals.items())
    except (OSError, msgspec.DecodeError):
        return False


def build_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Calls `write` to fill a new folder, and renames it to `folder` unless another process was first.

    The lock only saves work if several processes want the same folder. The rename makes it safe, so a lock that stays
    taken is ignored after a time.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.parent / f".{folder.name}.lock"):
        if is_intact(folder):
            return
        _remove_abandoned(folder)
        temporary = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
        temporary.mkdir()
        try:
            write(temporary)
            _seal(temporary)
            _publish_folder(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _remove_abandoned(folder: Path) -> None:
    """Removes the folders of builds that were killed, each of which may be as large as a model. Keeps young ones: they
    may belong to a running build whose lock was ignored."""
    for candidate in folder.parent.glob(f".{glob.escape(folder.name)}.*"):
        with contextlib.suppress(OSError):  # another process was faster
            if candidate.is_dir() and is_abandoned(candidate):
                shutil.rmtree(candidate, ignore_errors=True)


def is_abandoned(folder: Path) -> bool:
    """Returns whether an unfinished folder is so old that no build writes it any more."""
    return time.time() - _newest_s(folder) > _ABANDONED_S


def _newest_s(folder: Path) -> float:
    """Returns when a file was last written there."""
    return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))


def _publish_folder(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError:
        if is_intact(folder):
            return
        damaged = folder.parent / f".{folder.name}.damaged.{uuid.uuid4().hex}"
        folder.rename(damaged)
        temporary.rename(folder)
        shutil.rmtree(damaged, ignore_errors=True)


def _seal(folder: Path) -> None:
    seals = {path.name: _seal_of(path) for path in sorted(folder.iterdir())}
    (folder / SEAL).write_bytes(msgspec.json.encode(seals))


def _seal_of(path: Path) -> _FileSeal:
    size, checksum = path.stat().st_size, 0
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            return _FileSeal(size, zlib.crc32(file.read()))
        for i in range(_NUM_SAMPLES):
            file.seek((size - _SAMPLE_BYTES) * i // (_NUM_SAMPLES - 1))
            checksum = zlib.crc32(file.read(_SAMPLE_BYTES), checksum)
    return _FileSeal(size, checksum)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        deadline_s = time.monotonic() + _LOCK_WAIT_S
        while not _try_lock(file.fileno()) and time.monotonic() < deadline_s:
            time.sleep(_LOCK_POLL_S)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
