"""Holds the file descriptors of memory that outlives workers and engines. They map the memory; it is never copied.

On a CPU this is the KV pool, as anonymous memory whose size the first worker sets. On a CUDA device it is the weights and
the KV pool: a worker allocates them and sends their file descriptors, which keep the memory allocated without a CUDA
context. On both it is also the table of block hashes, which engines map. The kernel frees the memory when the last process
that maps it or has it open ends, so nothing is left after a SIGKILL of all processes.
"""

import os
from dataclasses import dataclass
from typing import NamedTuple

from onward.config import Device, ServeConfig
from onward.proto.control import DeviceKvAllocated, DeviceWeightsLoaded, KeptWeights
from onward.proto.speculative_config import parse_speculative
from onward.supervisor.pd_config import PdConfig


def can_keep_kv_memory(config: ServeConfig, pd: PdConfig) -> bool:
    """Not where peers write it: a write may come late. Nor where an EAGLE layer drafts: it has KV of its own, made of the
    model's outputs, and could draft nothing for a context of which only the model's KV is kept."""
    has_eagle = config.speculative is not None and parse_speculative(config.speculative).kind == "eagle"
    return not pd.is_enabled and not has_eagle


class KvMemoryFds(NamedTuple):
    pool: int
    """For workers. -1 on a CUDA device: no worker has allocated it yet."""
    hashes: int
    """For engines."""


@dataclass(slots=True)
class KvMemoryOwner:
    device: Device = "cpu"
    weights: KeptWeights | None = None
    """On a CUDA device. They stay when KV memory is given up: each worker that attaches them compares their checksum."""
    num_pool_bytes: int = 0
    """On a CUDA device; 0: no worker has allocated it yet."""
    _name: str = ""
    _fds: KvMemoryFds | None = None

    def fds_of(self, name: str) -> KvMemoryFds | None:
        """The memory of this name, empty or as others have left it. Memory of another name is given up: one that ended is
        not attached again. None for memory without a name, which a worker allocates for itself."""
        if name != self._name:
            self._close_kv()
            self._fds = _allocate(name, self.device) if name else None
            self._name = name
        return self._fds

    def has_pool(self, name: str) -> bool:
        """Whether a standby worker could attach it."""
        memory = self.fds_of(name)
        return memory is not None and memory.pool >= 0

    def take_kv(self, allocated: DeviceKvAllocated, fd: int) -> None:
        """What a worker has allocated on its device."""
        if allocated.kv_memory != self._name or self._fds is None or self._fds.pool >= 0:
            os.close(fd)  # it was given up meanwhile
            return
        self._fds, self.num_pool_bytes = self._fds._replace(pool=fd), allocated.num_bytes

    def take_weights(self, loaded: DeviceWeightsLoaded, fd: int) -> None:
        """What a worker has loaded onto its device, in place of earlier ones."""
        self.drop_weights()
        self.weights = KeptWeights(fd, loaded.num_bytes, loaded.checksum)

    def close(self) -> None:
        self._close_kv()
        self.drop_weights()

    def _close_kv(self) -> None:
        for fd in self._fds or ():
            if fd >= 0:
                os.close(fd)
        self._fds, self._name, self.num_pool_bytes = None, "", 0

    def drop_weights(self) -> None:
        """The next worker loads them."""
        if self.weights is not None:
            os.close(self.weights.fd)
        self.weights = None


def _allocate(name: str, device: Device) -> KvMemoryFds:
    hashes = os.memfd_create(f"onward-kv-hashes-{name}", os.MFD_CLOEXEC)
    if device != "cpu":
        return KvMemoryFds(-1, hashes)
    try:
        return KvMemoryFds(os.memfd_create(f"onward-kv-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), hashes)
    except OSError:
        os.close(hashes)
        raise
