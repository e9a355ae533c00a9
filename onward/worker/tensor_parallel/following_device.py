"""The device of a float model's rank other than 0: it computes this rank's part of each step that rank 0 announces. Knows
neither requests nor tokens."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from onward.config import set_triton_cache
from onward.models.loader.weights import open_weights
from onward.models.sharding.rank_exchange import RankExchange
from onward.models.sharding.shard_plan import Shard
from onward.proto.rank import RunSpans, StartShard
from onward.worker.tensor_parallel.shard_group import token_span
from onward.worker.token_span import TokenSpan


class ComputingDevice(Protocol):
    """The part of a device that such a rank uses."""

    def set_blocks(self, slot: int, first: int, block_ids: Sequence[int]) -> None: ...

    def forward(self, spans: Sequence[TokenSpan[Any]]) -> None: ...


class FollowingDevice:
    def __init__(
        self,
        start: StartShard,
        fds: Sequence[int],
        on_loaded: Callable[[], object],
        open_device: "OpenDevice | None" = None,
    ) -> None:
        """Takes over the file descriptors. Calls `on_loaded` when the rank has loaded its part, and then waits for the
        other ranks."""
        store_fd, *kv_memory_fds = fds
        self._exchange = RankExchange(Shard(start.rank, start.num_ranks), store_fd)

        def connect() -> None:
            on_loaded()
            self._exchange.connect()

        self._device = (open_device or open_rank_device)(start, self._exchange, connect, kv_memory_fds)

    def run(self, step: RunSpans) -> None:
        for change in step.blocks:
            self._device.set_blocks(change.slot, change.first, change.block_ids)
        self._device.forward([token_span(span) for span in step.spans])


OpenDevice = Callable[[StartShard, RankExchange, Callable[[], None], Sequence[int]], ComputingDevice]
"""Opens a rank's device. The third argument is called when the weights are loaded; the last one has the file descriptor of
the KV memory on a CPU."""


def open_rank_device(
    start: StartShard, exchange: RankExchange, connect: Callable[[], None], kv_memory_fds: Sequence[int]
) -> ComputingDevice:
    if start.config.device == "cuda":
        return _open_cuda(start, exchange, connect)
    from onward.worker.cpu_device import CpuDevice

    [kv_memory_fd] = kv_memory_fds
    device = CpuDevice(
        start.model, start.config, open_weights(start.model), kv_memory_fd=kv_memory_fd, exchange=exchange
    )
    connect()
    return device


def _open_cuda(start: StartShard, exchange: RankExchange, connect: Callable[[], None]) -> ComputingDevice:
    import torch

    from onward.worker.cuda.open_device import check_cuda, open_cuda_device

    check_cuda()
    set_triton_cache()
    try:
        return open_cuda_device(start.model, start.config, before_pool=connect, exchange=exchange)
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error).splitlines()[0]) from None
