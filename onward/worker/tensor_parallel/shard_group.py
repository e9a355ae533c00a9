"""The ranks of a float model, as rank 0 sees them: each holds a part of the weights and of the KV.

Rank 0 alone exchanges messages with the engine, knows requests and samples. It sends the others the spans of each step, and
all ranks then compute the step together. The ranks of a group stay the same: if one dies, the supervisor ends the group.
"""

import weakref
from collections.abc import Sequence
from typing import Any

from onward.config import WorkerConfig
from onward.models.sharding.rank_exchange import RankExchange, create_store
from onward.models.sharding.rank_lost import RankLost
from onward.models.sharding.shard_plan import Shard
from onward.proto.model import PreparedModel
from onward.proto.rank import RankReply, RankSpan, RunSpans, SlotBlocks, StartShard
from onward.transport.control_channel import ChannelClosed, ControlChannel
from onward.worker.tensor_parallel.rank_replies import ended_in_start, wait_until_ready
from onward.worker.token_span import TokenSpan


class ShardGroup:
    def __init__(self, fds: Sequence[int]) -> None:
        """`fds` are the sockets to the other ranks, in the order of the ranks."""
        self._channels = [ControlChannel(fd, RankReply) for fd in fds]
        self.exchange = RankExchange(Shard(0, 1 + len(fds)), create_store())
        for channel in self._channels:
            weakref.finalize(self, channel.close)

    def start(self, model: PreparedModel, config: WorkerConfig, kv_memory_fd: int | None = None) -> None:
        """Has the other ranks load their parts of the model. Raises `StartupError` if one has ended."""
        store_fd, num_ranks = self.exchange.store_fd, self.exchange.shard.num_ranks
        fds = [store_fd] if kv_memory_fd is None else [store_fd, kv_memory_fd]
        for rank, channel in enumerate(self._channels, start=1):
            try:
                channel.send(StartShard(rank, num_ranks, model, config), fds)
            except ChannelClosed:
                raise ended_in_start(rank) from None

    def connect(self) -> None:
        """Waits until each rank has loaded its part, and connects all ranks. Raises `StartupError` if one cannot."""
        wait_until_ready(self._channels)
        self.exchange.connect()

    def run(self, blocks: list[SlotBlocks], spans: Sequence[TokenSpan[Any]]) -> None:
        """Has the other ranks compute these spans, after the changes of block tables. Rank 0 has to compute them too: the
        ranks wait for each other in each layer."""
        message = RunSpans(blocks, [_rank_span(span) for span in spans])
        for rank, channel in enumerate(self._channels, start=1):
            try:
                is_sent = channel.send(message)
            except ChannelClosed as closed:
                raise RankLost(f"rank {rank} is gone: {closed}") from None
            if not is_sent:
                raise RankLost(f"rank {rank} does not read its messages")


def _rank_span(span: TokenSpan[Any]) -> RankSpan:
    positions = span.logprob_positions
    reported = None if positions is None else (positions.start, positions.stop)
    return RankSpan(span.slot, span.start, span.end, span.is_sampled, len(span.drafts), span.new_block, reported)


def token_span(span: RankSpan) -> TokenSpan[None]:
    """Returns the span at another rank, where drafts have no tokens: rank 0 has those of all rows."""
    positions = None if span.reported is None else range(*span.reported)
    return TokenSpan(
        span.slot, span.start, span.end, span.is_sampled, None, new_block=span.new_block, logprob_positions=positions,
        drafts=(0,) * span.num_drafts,
    )  # fmt: skip
