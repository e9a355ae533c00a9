"""How the tensors of a float model are divided among ranks. Does no I/O.

    q, k, v              by outputs: whole KV heads with their query heads
    o                    by inputs, as q is by outputs
    gate, up             by outputs, of each MLP and each expert
    down                 by inputs, as gate and up are by outputs
    embedding, head      by the vocabulary

Every rank has all norms and the expert router. Shares may differ: 3 KV heads on two ranks are 1 and 2. A rank computes its
share like a smaller model, whose config is `rank_config`.
"""

from dataclasses import dataclass

import msgspec

from onward.proto.model import Experts, ModelConfig, PreparedModel

SHARD_UNIT = 16
"""Shares of an MLP and of the vocabulary are multiples of this, except the last one: kernels read vectors of this size."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The place of a rank in its group."""

    rank: int
    num_ranks: int

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.num_ranks, "ranks are counted from 0"

    def share(self, total: int, unit: int = SHARD_UNIT) -> range:
        """Returns this rank's part of `total` values. The parts of all ranks follow each other. Rank 0 has the smallest
        one, because it also samples."""
        start, end = (rank * (total // unit) // self.num_ranks * unit for rank in (self.rank, self.rank + 1))
        return range(start, total if self.rank == self.num_ranks - 1 else end)

    def device_index(self, num_devices: int) -> int:
        """Returns the CUDA device of this rank: one for each rank if there are enough, else the first one for all."""
        return self.rank if num_devices >= self.num_ranks else 0

    def ranks_per_device(self, num_devices: int) -> int:
        return 1 if num_devices >= self.num_ranks else self.num_ranks

    def kv_heads(self, config: ModelConfig) -> range:
        return self.share(config.num_kv_heads, unit=1)

    def query_heads(self, config: ModelConfig) -> range:
        """Returns the query heads of this rank's KV heads."""
        group, kv_heads = config.num_heads // config.num_kv_heads, self.kv_heads(config)
        return range(kv_heads.start * group, kv_heads.stop * group)


def rank_model(model: PreparedModel, shard: Shard) -> PreparedModel:
    """Returns the smaller model that one rank computes."""
    return msgspec.structs.replace(model, config=rank_config(model.config, shard))


def rank_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Returns the config of the model of one rank."""
    return msgspec.structs.replace(
        config,
        vocab_size=len(shard.share(config.vocab_size)),
        num_heads=len(shard.query_heads(config)),
        num_kv_heads=len(shard.kv_heads(config)),
        intermediate_size=len(shard.share(config.intermediate_size)),
        experts=None if config.experts is None else _rank_experts(config.experts, shard),
    )


def _rank_experts(experts: Experts, shard: Shard) -> Experts:
    shared = experts.shared_intermediate_size
    return msgspec.structs.replace(
        experts,
        intermediate_size=len(shard.share(experts.intermediate_size)),
        shared_intermediate_size=None if shared is None else len(shard.share(shared)),
    )


def max_num_ranks(config: ModelConfig) -> int:
    """Returns the largest number of ranks that all have a part of everything that is divided."""
    sizes = [config.vocab_size]
    if config.experts is None or any(kind.is_dense for kind in config.layers):
        sizes.append(config.intermediate_size)
    if config.experts is not None:
        sizes.append(config.experts.intermediate_size)
        sizes.append(config.experts.shared_intermediate_size or config.experts.intermediate_size)
    return max(1, min(config.num_kv_heads, *(size // SHARD_UNIT for size in sizes)))
