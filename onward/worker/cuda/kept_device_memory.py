"""Weights and KV pool of a worker on a device, in memory that outlives it: attached if an earlier worker has left it, else
allocated and handed over to the supervisor."""

import os

import torch

from onward.proto.control import DeviceKvAllocated, DeviceWeightsLoaded
from onward.worker.cuda.shared_regions import RegionAllocator, SharedRegion, checksum
from onward.worker.kept_memory import KeptMemory


class DamagedWeights(Exception):
    """Ends this worker. The supervisor then gives up weights and KV: nothing else is known of what has damaged them."""


class KeptDeviceMemory:
    def __init__(self, kept: KeptMemory, regions: RegionAllocator) -> None:
        self._kept, self._regions = kept, regions

    def attach_weights(self, num_bytes: int) -> torch.Tensor | None:
        """Those that an earlier worker has loaded, if there are any. Raises `DamagedWeights` if they have changed since."""
        weights, self._kept.weights = self._kept.weights, None
        if weights is None:
            return None
        assert weights.num_bytes == num_bytes, "all workers of an instance have the same model"
        memory = self._regions.attach(weights.fd, num_bytes)
        if (found := checksum(memory)) != weights.checksum:
            raise DamagedWeights(f"the kept weights have the checksum {found}, and had {weights.checksum} when loaded")
        return memory

    def create_weights(self, num_bytes: int) -> SharedRegion:
        return self._regions.create(num_bytes)

    def keep_weights(self, region: SharedRegion) -> None:
        """They are complete. Before this a worker's death loses them, so half-loaded weights are never attached."""
        self._hand_over(DeviceWeightsLoaded(len(region.memory), checksum(region.memory)), region.fd)

    @property
    def num_kv_bytes(self) -> int:
        """Of the pool that an earlier worker has left; 0: none has."""
        return self._kept.kv_bytes

    def attach_kv(self) -> torch.Tensor:
        assert self._kept.kv_bytes, "an earlier worker has left a pool"
        return self._regions.attach(self._kept.kv_fd, self._kept.kv_bytes)

    def create_kv(self, num_bytes: int, *, has_standby_room: bool) -> torch.Tensor:
        """Of zeros. If the supervisor cannot be given it, it ends with this worker, and the engine is told so."""
        fd, memory = self._regions.create(num_bytes)
        memory.zero_()
        if memory.is_cuda:
            torch.cuda.synchronize()  # before a standby worker may see it
        self._kept.is_kv_kept = self._hand_over(DeviceKvAllocated(self._kept.name, num_bytes, has_standby_room), fd)
        return memory

    def _hand_over(self, message: DeviceKvAllocated | DeviceWeightsLoaded, fd: int) -> bool:
        try:
            return self._kept.hand_over(message, fd)
        finally:
            os.close(fd)
