"""Distinguishes faults of the cache folder, which the user can fix with an environment variable, from faults of the
model.

Knows nothing of the contents of the cache.
"""

import errno
import os
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Only the cache is written, so these errors are its faults even if they name no file."""
_CLOSED = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)


def is_cache_error(fault: OSError, cache_dir: Path) -> bool:
    """Returns whether the cache folder cannot be created or written. A file that is missing in it is not such a
    fault."""
    if fault.errno in _FULL:
        return True
    if not isinstance(fault.filename, str | bytes):
        return False
    path, cache_dir = Path(os.fsdecode(fault.filename)).absolute(), cache_dir.absolute()
    return cache_dir.is_relative_to(path) or (fault.errno in _CLOSED and path.is_relative_to(cache_dir))


def cache_error_message(fault: OSError, cache_dir: Path, variable: str = "ONWARD_CACHE") -> str:
    return f"the cache folder {cache_dir} cannot be written: {fault}; set {variable} to another one"
