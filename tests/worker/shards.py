"""Workers of several ranks with float weights: ranks in threads, with weights that no file has."""

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from onward.config import WorkerConfig
from onward.models.sharding.rank_exchange import RankExchange
from onward.proto.model import ModelConfig, PreparedModel
from onward.proto.rank import RankReady, StartShard, ToRank
from onward.transport.control_channel import ChannelClosed, ControlChannel
from onward.worker.model_runner import ModelRunner
from onward.worker.tensor_parallel.following_device import FollowingDevice, OpenDevice
from onward.worker.tensor_parallel.leading_device import LeadingDevice
from onward.worker.tensor_parallel.shard_group import ShardGroup
from tests.worker.driver import Driver, prepared

_SETTINGS = {"num_kv_blocks": 256, "max_num_seqs": 64, "max_model_len": 512, "threads": 1}


class ShardedDriver(Driver):
    """Drives a group of ranks on the CPU as `Driver` drives one."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Any], num_ranks: int, *, dtype: str = "float32", **more: Any
    ) -> None:  # fmt: skip
        group = shards_in_threads(num_ranks, _cpu_opener(weights))
        self._open_sharded(group, prepared(config, dtype=dtype), weights, **more)

    @classmethod
    def of_group(cls, model: PreparedModel, weights: Mapping[str, Any], group: ShardGroup, **more: Any) -> Self:
        driver = cls.__new__(cls)
        driver._open_sharded(group, model, weights, **more)
        return driver

    def _open_sharded(
        self, group: ShardGroup, model: PreparedModel, weights: Mapping[str, Any], drafter: Any = None,
        kv_memory_fd: int | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        from onward.worker.cpu_device import CpuDevice
        from onward.worker.kv_pool import KvPool

        self.config = WorkerConfig(**(_SETTINGS | settings), tensor_parallel=group.exchange.shard.num_ranks)

        def start(pool: KvPool) -> None:
            assert pool.fd is not None
            self.kv_memory_fd = pool.fd
            group.start(model, self.config, pool.fd)

        device = CpuDevice(
            model, self.config, weights, drafter, kv_memory_fd, exchange=group.exchange, on_kv_pool=start
        )
        group.connect()
        self._open(ModelRunner(model, self.config, LeadingDevice(device, group)))


class ShardedDeviceDriver(Driver):
    """Drives a group of ranks whose devices compute with torch tensors: on the host, or all on one CUDA device."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Any], num_ranks: int, *, dtype: str = "float32",
        device: str = "cpu", new_ops: Callable[[], Any] | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        from onward.kernels.torch_ops import TorchOps
        from onward.worker.cuda.torch_device import TorchDevice
        from tests.worker.cuda.small_model import SETTINGS

        new_ops = new_ops or TorchOps
        model = prepared(config, dtype=dtype)
        self.config = WorkerConfig(**(SETTINGS | settings), device="cuda", tensor_parallel=num_ranks)

        def open_rank(
            start: StartShard, exchange: RankExchange, connect: Callable[[], None], kv_memory_fds: Sequence[int]
        ) -> TorchDevice:
            assert not kv_memory_fds, "each rank has its own KV memory on its device"
            return TorchDevice(
                start.model, start.config, weights, ops=new_ops(), device=device, before_pool=connect, exchange=exchange
            )

        group = shards_in_threads(num_ranks, open_rank)
        group.start(model, self.config)
        leading = TorchDevice(
            model,
            self.config,
            weights,
            ops=new_ops(),
            device=device,
            before_pool=group.connect,
            exchange=group.exchange,
        )
        self._open(ModelRunner(model, self.config, LeadingDevice(leading, group)))


def shards_in_threads(num_ranks: int, open_device: OpenDevice) -> ShardGroup:
    """They end with the group."""
    fds = []
    for _ in range(1, num_ranks):
        leader_end, rank_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds.append(leader_end.detach())
        threading.Thread(target=_run_rank, args=(rank_end.detach(), open_device), daemon=True).start()
    return ShardGroup(fds)


def _run_rank(fd: int, open_device: OpenDevice) -> None:
    channel = ControlChannel(fd, ToRank)
    try:
        start = channel.wait_receive()
        device = FollowingDevice(start, channel.take_fds(), lambda: channel.send(RankReady()), open_device)
        while True:
            device.run(channel.wait_receive())
    except ChannelClosed:
        channel.close()


def _cpu_opener(weights: Mapping[str, Any]) -> OpenDevice:
    def open_rank(
        start: StartShard, exchange: RankExchange, connect: Callable[[], None], kv_memory_fds: Sequence[int]
    ) -> Any:
        from onward.worker.cpu_device import CpuDevice

        [kv_memory_fd] = kv_memory_fds
        device = CpuDevice(start.model, start.config, weights, kv_memory_fd=kv_memory_fd, exchange=exchange)
        connect()
        return device

    return open_rank
