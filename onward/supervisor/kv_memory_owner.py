"""Holds the KV memory of an instance while workers and engines come and go: anonymous memory that they map and nobody
copies.

The first worker gives the pool its size, and the first engine the table of block hashes. They are freed with the last
process that has them mapped or open, so nothing is left after a SIGKILL of all.
"""

import os
from typing import NamedTuple

from onward.config import ServeConfig
from onward.proto.speculative_config import parse_speculative
from onward.supervisor.pd_config import PdConfig


def can_keep_kv_memory(config: ServeConfig, pd: PdConfig) -> bool:
    """Not where peers write it: a write may come late. Nor where an EAGLE layer drafts: it has KV of its own, made of the
    model's outputs, and could draft nothing for a context of which only the model's KV is kept."""
    has_eagle = config.speculative is not None and parse_speculative(config.speculative).kind == "eagle"
    return config.device == "cpu" and not pd.is_enabled and not has_eagle


class KvMemoryFds(NamedTuple):
    pool: int
    """For workers."""
    hashes: int
    """For engines."""


class KvMemoryOwner:
    def __init__(self) -> None:
        self._name = ""
        self._fds: KvMemoryFds | None = None

    def fds_of(self, name: str) -> KvMemoryFds | None:
        """The memory of this name, empty or as others have left it. Memory of another name is given up: one that ended is
        not attached again. None for memory without a name, which a worker allocates for itself."""
        if name != self._name:
            self.close()
            self._fds = _allocate(name) if name else None
            self._name = name
        return self._fds

    def close(self) -> None:
        for fd in self._fds or ():
            os.close(fd)
        self._fds, self._name = None, ""


def _allocate(name: str) -> KvMemoryFds:
    pool = os.memfd_create(f"onward-kv-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        return KvMemoryFds(pool, os.memfd_create(f"onward-kv-hashes-{name}", os.MFD_CLOEXEC))
    except OSError:
        os.close(pool)
        raise
