"""The ranks of an int8 model, as rank 0 sees them: it starts the others, and leads their threads.

Rank 0 alone exchanges messages with the engine, knows requests and samples. The other ranks share its arrays, its KV memory
and its forward passes. The ranks of a group stay the same: if one dies, the supervisor ends the group.
"""

import weakref
from collections.abc import Sequence

import numpy as np

from onward.config import WorkerConfig
from onward.kernels.cpu.rank_threads import NUM_CONTROL_WORDS, LeadingThreads, num_joined
from onward.kernels.cpu.threads import ThreadPool
from onward.proto.model import PreparedModel
from onward.proto.rank import RankReply, StartRank
from onward.transport.control_channel import ChannelClosed, ControlChannel
from onward.worker.kv_pool import KvPool
from onward.worker.tensor_parallel.rank_replies import ended_in_start, wait_until_ready
from onward.worker.tensor_parallel.shared_arrays import SharedArrays

CONTROL_ARRAY, BLOCK_TABLES_ARRAY = "control", "block_tables"


class RankGroup:
    def __init__(self, fds: Sequence[int]) -> None:
        """`fds` are the sockets to the other ranks, in the order of the ranks."""
        self._channels = [ControlChannel(fd, RankReply) for fd in fds]
        self.arrays = SharedArrays()
        self._control = self.arrays.zeros(CONTROL_ARRAY, NUM_CONTROL_WORDS, np.int64)
        self._num_threads = 0
        for channel in self._channels:
            weakref.finalize(self, channel.close)

    @property
    def size(self) -> int:
        return 1 + len(self._channels)

    def lead(self, threads: ThreadPool) -> LeadingThreads:
        """Returns the threads of all ranks. `threads` are those of rank 0; each other rank has as many."""
        self._num_threads = threads.size
        return LeadingThreads(threads, self._control, self.size)

    def start(
        self, model: PreparedModel, config: WorkerConfig, pool: KvPool, *, max_model_len: int, max_rows: int,
        max_sampled: int,
    ) -> None:  # fmt: skip
        """Starts the other ranks, and waits until each has loaded the model. Raises `StartupError` if one cannot."""
        assert pool.fd is not None, "the KV memory of a group can be shared"
        for rank, channel in enumerate(self._channels, start=1):
            start = StartRank(
                rank, self.size, self._num_threads, model, config, pool.geometry.num_blocks, max_model_len, max_rows,
                max_sampled, self.arrays.specs,
            )  # fmt: skip
            try:
                channel.send(start, (self.arrays.fd, pool.fd))
            except ChannelClosed:
                raise ended_in_start(rank) from None
        wait_until_ready(self._channels)

    def num_joined(self) -> list[int]:
        """Returns, for each rank, how often its threads have taken part in a forward pass. Rank 0 counts none."""
        return num_joined(self._control)[: self.size]
