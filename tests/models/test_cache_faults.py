import errno
import os
from pathlib import Path

import pytest

from onward.models.loader.cache_errors import is_cache_error

CACHE = Path("/home/me/.cache/onward")


def fault(number: int, path: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), path) if path is not None else OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    "one",
    [
        fault(errno.EACCES, "/home/me/.cache/onward/models"),
        fault(errno.ENOTDIR, "/home/me/.cache/onward/downloads"),
        fault(errno.EACCES, "/home/me/.cache"),
        fault(errno.ENOENT, "/home/me/.cache/onward"),
        fault(errno.ENOSPC),
        fault(errno.EROFS, "/home/me/.cache/onward/facts"),
    ],
)
def test_a_folder_that_cannot_be_made_or_written_is_the_caches_fault(one: OSError) -> None:
    assert is_cache_error(one, CACHE)


@pytest.mark.parametrize(
    "one",
    [
        fault(errno.EACCES, "/models/tiny/config.json"),
        fault(errno.ENOENT, "/home/me/.cache/onward/hub/models--a--b/config.json"),
        fault(errno.EACCES, "/home/me/.cache/onward-models/config.json"),
        fault(errno.EIO),
        OSError("a connection was refused"),
    ],
)
def test_a_model_that_cannot_be_read_or_fetched_is_not(one: OSError) -> None:
    assert not is_cache_error(one, CACHE)
