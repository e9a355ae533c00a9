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


def can_keep_kv_memory(config: ServeConfig) -> bool:
    """Returns whether KV memory can outlive its worker. It cannot with an EAGLE proposer. The EAGLE layer has KV of its
    own, computed from the model's outputs, and could not draft for a context of which only the model's KV is kept."""
    return config.speculative is None or parse_speculative(config.speculative).kind != "eagle"


class KvMemoryFds(NamedTuple):
    pool: int
    """Mapped by workers. -1 on a CUDA device if no worker has allocated it yet."""
    hashes: int
    """Mapped by engines."""


@dataclass(slots=True)
class KvMemoryOwner:
    device: Device = "cpu"
    weights: KeptWeights | None = None
    """The weights on a CUDA device. They are kept when KV memory is given up, because each worker that attaches them
    compares their checksum."""
    num_pool_bytes: int = 0
    """Size of the KV pool on a CUDA device; 0 if no worker has allocated it yet."""
    _name: str = ""
    _fds: KvMemoryFds | None = None

    def fds_of(self, name: str) -> KvMemoryFds | None:
        """Returns the memory of this name, either new or as earlier processes have left it. Memory of another name is
        given up, because it is never attached again. Returns None for an empty name: a worker allocates such memory for
        itself."""
        if name != self._name:
            self._close_kv()
            self._fds = _allocate(name, self.device) if name else None
            self._name = name
        return self._fds

    def adopt(self, name: str, fds: KvMemoryFds, num_pool_bytes: int, weights: KeptWeights | None) -> None:
        """Takes over the memory of an old server, under a name that this server gives it."""
        assert self._fds is None and self.weights is None, "memory is adopted before any is made"
        self._name, self._fds, self.num_pool_bytes, self.weights = name, fds, num_pool_bytes, weights

    def has_pool(self, name: str) -> bool:
        """Returns whether a standby worker can attach the memory of this name. Never gives up memory of another
        name."""
        return name == self._name and self._fds is not None and self._fds.pool >= 0

    def take_kv(self, allocated: DeviceKvAllocated, fd: int) -> None:
        """Takes the KV memory that a worker has allocated on its device."""
        if allocated.kv_memory != self._name or self._fds is None or self._fds.pool >= 0:
            os.close(fd)  # it was given up meanwhile
            return
        self._fds, self.num_pool_bytes = self._fds._replace(pool=fd), allocated.num_bytes

    def take_weights(self, loaded: DeviceWeightsLoaded, fd: int) -> None:
        """Takes the weights that a worker has loaded onto its device, and drops earlier ones."""
        self.drop_weights()
        self.weights = KeptWeights(fd, loaded.num_bytes, loaded.checksum, loaded.layout)

    def close(self) -> None:
        self._close_kv()
        self.drop_weights()

    def _close_kv(self) -> None:
        for fd in self._fds or ():
            if fd >= 0:
                os.close(fd)
        self._fds, self._name, self.num_pool_bytes = None, "", 0

    def drop_weights(self) -> None:
        """Gives up the weights, so that the next worker loads them again."""
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
