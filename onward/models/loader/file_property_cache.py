"""Computed properties of large files, cached by path, size and modification time, so that starts stay quick."""

import hashlib
import logging
import os
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec

from onward.log import event

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[str, float | None], None]

_PIECE_BYTES = 8 << 20


class _CachedProperty(msgspec.Struct, frozen=True):
    path: str
    size: int
    mtime_ns: int
    answer: str


def cached_property_of(path: Path, property_name: str, cache_dir: Path, compute: Callable[[Path], str]) -> str:
    """Returns `compute(path)`, or the cached value if the file has not changed since it was computed."""
    path = path.resolve()
    cache_path = cache_dir / "facts" / hashlib.sha256(os.fsencode(path) + property_name.encode()).hexdigest()[:32]
    stat = path.stat()
    identity = (str(path), stat.st_size, stat.st_mtime_ns)
    cached = _read_cached(cache_path)
    if cached is not None and (cached.path, cached.size, cached.mtime_ns) == identity:
        return cached.answer
    value = compute(path)
    try:
        write_atomically(cache_path, msgspec.json.encode(_CachedProperty(*identity, value)))
    except OSError as fault:  # the next start computes it again
        logger.info(event("fact not kept", question=property_name, why=fault))
    return value


def sha256_of(path: Path, cache_dir: Path, progress: ProgressCallback) -> str:
    return cached_property_of(path, "sha256", cache_dir, lambda resolved: hash_file(resolved, progress))


def write_atomically(path: Path, content: bytes) -> None:
    """Readers see the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    temporary.write_bytes(content)
    temporary.replace(path)


def _read_cached(cache_path: Path) -> _CachedProperty | None:
    try:
        return msgspec.json.decode(cache_path.read_bytes(), type=_CachedProperty)
    except (OSError, msgspec.DecodeError):
        return None


def hash_file(path: Path, progress: ProgressCallback) -> str:
    digest, done, size = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            done += len(piece)
            progress(f"checking {path.name}", done / max(size, done))
    return digest.hexdigest()
