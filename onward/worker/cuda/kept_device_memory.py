"""Weights and KV pool of a worker on a device, in memory that outlives it. They are attached if an earlier worker has
left them, else allocated and handed over to the supervisor."""

import logging
import os

import torch

from onward import log
from onward.proto.control import DeviceKvAllocated, DeviceWeightsLoaded
from onward.worker.cuda.shared_regions import RegionAllocator, SharedRegion, checksum
from onward.worker.kept_memory import KeptMemory

logger = logging.getLogger(__name__)


class DamagedWeights(Exception):
    """Ends this worker. The supervisor then gives up both weights and KV, because the cause of the damage is
    unknown."""


class KeptDeviceMemory:
    def __init__(self, kept: KeptMemory, regions: RegionAllocator) -> None:
        self._kept, self._regions = kept, regions

    def attach_weights(self, num_bytes: int, layout: str) -> torch.Tensor | None:
        """Returns the weights that an earlier worker has loaded with this layout, or None. Raises `DamagedWeights` if they
        have changed since."""
        weights, self._kept.weights = self._kept.weights, None
        if weights is None:
            return None
        if (weights.num_bytes, weights.layout) != (num_bytes, layout):
            # An old server of another version has left them. A fault here would cost it its KV memory.
            logger.warning(log.event("kept weights have another layout, loading", num_bytes=weights.num_bytes))
            os.close(weights.fd)
            return None
        memory = self._regions.attach(weights.fd, num_bytes)
        if (found := checksum(memory)) != weights.checksum:
            raise DamagedWeights(f"the kept weights have the checksum {found}, and had {weights.checksum} when loaded")
        return memory

    def create_weights(self, num_bytes: int) -> SharedRegion:
        return self._regions.create(num_bytes)

    def keep_weights(self, region: SharedRegion, layout: str) -> None:
        """Hands complete weights over to the supervisor. A worker's death before this loses them, so half-loaded
        weights are never attached."""
        self._hand_over(DeviceWeightsLoaded(len(region.memory), checksum(region.memory), layout), region.fd)

    @property
    def num_kv_bytes(self) -> int:
        """Size of the pool that an earlier worker has left; 0 if none has."""
        return self._kept.kv_bytes

    def attach_kv(self) -> torch.Tensor:
        assert self._kept.kv_bytes, "an earlier worker has left a pool"
        return self._regions.attach(self._kept.kv_fd, self._kept.kv_bytes)

    def create_kv(self, num_bytes: int, *, has_standby_room: bool) -> torch.Tensor:
        """Allocates a pool of zeros and hands it over to the supervisor. If that fails, the pool ends with this worker,
        and `KeptMemory.reported_name` is empty."""
        fd, memory = self._regions.create(num_bytes)
        memory.zero_()
        if memory.is_cuda:
            torch.cuda.synchronize()  # before a standby worker may attach it
        self._kept.is_kv_kept = self._hand_over(DeviceKvAllocated(self._kept.name, num_bytes, has_standby_room), fd)
        return memory

    def _hand_over(self, message: DeviceKvAllocated | DeviceWeightsLoaded, fd: int) -> bool:
        try:
            return self._kept.hand_over(message, fd)
        finally:
            os.close(fd)
