"""Tells a fault of the cache folder from one of the model: a person mends the first with a variable of the environment.

Knows nothing of what is kept there.
"""

import errno
import os
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Only the cache is written, so these are its faults although they name no file."""
_CLOSED = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST)


def is_cache_error(fault: OSError, cache_dir: Path) -> bool:
    """Whether the folder cannot be made or written. A file that is missing within it is not its fault."""
    if fault.errno in _FULL:
        return True
    if not isinstance(fault.filename, str | bytes):
        return False
    path, cache_dir = Path(os.fsdecode(fault.filename)).absolute(), cache_dir.absolute()
    return cache_dir.is_relative_to(path) or (fault.errno in _CLOSED and path.is_relative_to(cache_dir))


def cache_error_message(fault: OSError, cache_dir: Path, variable: str = "ONWARD_CACHE") -> str:
    return f"the cache folder {cache_dir} cannot be written: {fault}; set {variable} to another one"
