"""Finds numba's folder of compiled kernels. numba's own locators skip a folder that they cannot write, and compile
again."""

from pathlib import Path

from numba.core.caching import UserProvidedCacheLocator


class KernelCacheLocator(UserProvidedCacheLocator):
    """The folder in numba's `CACHE_DIR`. A read-only folder is used too, if it has kernels."""

    def ensure_cache_path(self) -> None:
        try:
            super().ensure_cache_path()
        except OSError:
            if not any(Path(self.get_cache_path()).glob("*.nbi")):
                raise
