"""Where numba finds compiled kernels. Its own locators pass over a folder that they cannot write, and compile again."""

from pathlib import Path

from numba.core.caching import UserProvidedCacheLocator


class KernelCacheLocator(UserProvidedCacheLocator):
    """The folder in numba's `CACHE_DIR`; one that is read-only too, if kernels are there."""

    def ensure_cache_path(self) -> None:
        try:
            super().ensure_cache_path()
        except OSError:
            if not any(Path(self.get_cache_path()).glob("*.nbi")):
                raise
