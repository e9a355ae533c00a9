"""Memory that outlives this worker, and that worker and supervisor pass to each other. Independent of torch."""

from collections.abc import Callable
from dataclasses import dataclass

from onward.proto.control import DeviceKvAllocated, DeviceWeightsLoaded, KeptWeights


@dataclass(slots=True)
class KeptMemory:
    """File descriptors keep the memory allocated; the supervisor holds them while workers come and go."""

    name: str
    """Name of the KV memory. The engine relies on its content after a worker's death only if both workers report this
    name."""
    kv_fd: int = -1
    """-1 on a CUDA device: no worker has allocated it yet."""
    kv_bytes: int = 0
    """Size of device memory, which cannot be read from its file descriptor."""
    weights: KeptWeights | None = None
    """On a CUDA device, if a worker has loaded them."""
    hand_over: Callable[[DeviceKvAllocated | DeviceWeightsLoaded, int], bool] = lambda message, fd: False
    """Sends a file descriptor to the supervisor; False if it could not be sent."""
    is_kv_kept: bool = True
    """False if the supervisor did not get the KV memory, which then ends with this worker."""

    @property
    def reported_name(self) -> str:
        return self.name if self.is_kv_kept else ""
