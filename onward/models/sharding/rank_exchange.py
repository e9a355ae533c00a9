"""How the ranks of a group exchange tensors: `torch.distributed` with gloo, over the loopback interface.

Sums are gathered and added in the order of the ranks, in float32. So their bits depend neither on timing nor on the
library's algorithm, and all ranks have the same ones. Tensors of a CUDA device pass through the host, so ranks may share a
device.
"""

import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from onward.models.sharding.rank_lost import RankLost
from onward.models.sharding.shard_plan import Shard

_c10d: Any = torch.distributed
"""Process groups as objects, of which a process may have several. torch's type stubs do not have their methods."""
_ADDRESS = "127.0.0.1"
_TIMEOUT = timedelta(hours=24)
"""gloo's own limit. The supervisor's limits for a stalled or stopped worker are much shorter, and only they end a group."""
STORE_FILE = "onward-rank-store"
"""Name of the anonymous memory in which ranks find each other's addresses."""


def create_store() -> int:
    """Returns the file descriptor of memory through which the ranks of a group find each other. Only processes that get
    the file descriptor can join, and nothing of it is left when they have ended."""
    return os.memfd_create(STORE_FILE, os.MFD_CLOEXEC)


class RankExchange:
    def __init__(self, shard: Shard, store_fd: int) -> None:
        """Takes over the file descriptor of the store."""
        self.shard, self.store_fd = shard, store_fd
        self._connected: list[Any] = []
        weakref.finalize(self, _disconnect, self._connected, store_fd)

    def connect(self) -> None:
        """Waits until all ranks of the group have called this."""
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=_ADDRESS)]
        options._timeout = _TIMEOUT
        store = _c10d.FileStore(f"/proc/self/fd/{self.store_fd}", self.shard.num_ranks)
        try:
            self._connected.append(_c10d.ProcessGroupGloo(store, self.shard.rank, self.shard.num_ranks, options))
        except RuntimeError as error:
            raise RankLost(str(error)) from None

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replaces the tensor by that of rank 0."""
        host, options = tensor.cpu().contiguous(), _c10d.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._wait(lambda group: group.broadcast([host], options))
        if self.shard.rank:
            tensor.copy_(host)

    def sum(self, part: torch.Tensor) -> None:
        """Replaces the tensor by the sum of the tensors of all ranks."""
        host = part.cpu().contiguous()
        parts = [torch.empty_like(host) for _ in range(self.shard.num_ranks)]
        self._wait(lambda group: group.allgather([parts], [host]))
        total = parts[0].float()
        for other in parts[1:]:
            total = total + other
        part.copy_(total)

    def smallest(self, number: int) -> int:
        """Returns the smallest of the numbers of all ranks."""
        host = torch.tensor([number])
        parts = [torch.empty_like(host) for _ in range(self.shard.num_ranks)]
        self._wait(lambda group: group.allgather([parts], [host]))
        return min(int(part) for part in parts)

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tensors of all ranks, which have one shape, at rank 0; an empty list at the others."""
        host, options = part.cpu().contiguous(), _c10d.GatherOptions()
        options.rootRank = 0
        parts = [] if self.shard.rank else [torch.empty_like(host) for _ in range(self.shard.num_ranks)]
        self._wait(lambda group: group.gather([parts] if parts else [], [host], options))
        return [one.to(part.device) for one in parts]

    def _wait(self, launch: Callable[[Any], Any]) -> None:
        [group] = self._connected
        try:
            launch(group).wait()
        except RuntimeError as error:
            raise RankLost(str(error)) from None


def _disconnect(connected: list[Any], store_fd: int) -> None:
    """The store opens its file once more when the last group that uses it ends, so this comes first."""
    connected.clear()
    os.close(store_fd)
