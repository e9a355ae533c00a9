"""Weights and KV pool of a worker on a device, in memory that outlives it: attached if an earlier worker has left it, else
allocated and handed over to the supervisor."""

import logging
import os

import torch

from onward import log
from onward.proto.control import DeviceKvAllocated, DeviceWeightsLoaded
from onward.worker.cuda.shared_regions import RegionAllocator, SharedRegion, checksum
from onward.worker.kept_memory import KeptMemory

logger = logging.getLogger(__name__)


class KeptDeviceMemory:
    def __init__(self, kept: KeptMemory, regions: RegionAllocator) -> None:
        self._kept, self._regions = kept, regions
        self._new_weights: SharedRegion | None = None

    def attach_weights(self, num_bytes: int) -> torch.Tensor | None:
        """The weights of an earlier worker, if it has left them complete and nothing has changed them since: after a crash
        of any kind the checksum decides."""
        weights, self._kept.weights = self._kept.weights, None
        if weights is None:
            return None
        if weights.num_bytes != num_bytes:
            os.close(weights.fd)
            return None
        memory = self._regions.attach(weights.fd, num_bytes)
        if (found := checksum(memory)) != weights.checksum:
            logger.error(log.event("kept weights are damaged", expected=weights.checksum, found=found))
            return None
        return memory

    def create_weights(self, num_bytes: int) -> torch.Tensor:
        """To be loaded, and then given to `keep_weights`."""
        self._new_weights = self._regions.create(num_bytes)
        return self._new_weights.memory

    def keep_weights(self) -> None:
        """They are complete. Before this a worker's death loses them, so none is ever attached half loaded."""
        assert self._new_weights is not None, "weights are created before they are kept"
        (fd, memory), self._new_weights = self._new_weights, None
        self._hand_over(DeviceWeightsLoaded(len(memory), checksum(memory)), fd)

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
