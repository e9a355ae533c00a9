"""Messages between rank 0 and the other ranks of a worker with `--tensor-parallel`, over a socket pair for each of them.

Ranks of an int8 model get a message for the start only: their steps go through memory that all ranks map
(`kernels.cpu.rank_threads`). Ranks of a float model get the block tables and the spans of each step.
"""

import msgspec

from onward.config import WorkerConfig
from onward.proto.field_types import Count, Serial, SerialOrNone
from onward.proto.model import PreparedModel

MAX_RANKS = 64
SHARED_ARRAYS_FILE = "onward-ranks"
"""Name of the memory file of the shared arrays."""


class SharedArraySpec(msgspec.Struct, frozen=True):
    """The place of an array in the memory that ranks share."""

    offset: Serial
    shape: tuple[Count, ...]
    dtype: str


class StartRank(msgspec.Struct, frozen=True, tag="start_rank"):
    """From rank 0: load this model and take part in its steps. The file descriptors of the shared arrays and of the KV
    memory travel with it."""

    rank: Count
    num_ranks: Count
    num_threads: Count
    """Threads of each rank."""
    model: PreparedModel
    config: WorkerConfig
    num_kv_blocks: Count
    """Blocks in the KV memory, the scratch block included."""
    max_model_len: Count
    max_rows: Count
    max_sampled: Count
    arrays: dict[str, SharedArraySpec]


class StartShard(msgspec.Struct, frozen=True, tag="start_shard"):
    """From rank 0: load this rank's part of a float model. With it travel the file descriptor of the store through which
    ranks find each other, and on a CPU that of the KV memory."""

    rank: Count
    num_ranks: Count
    model: PreparedModel
    """The whole model."""
    config: WorkerConfig


class SlotBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of a slot's table from index `first` on. Entries after them have no meaning."""

    slot: Count
    first: Count
    block_ids: list[Count]


class RankSpan(msgspec.Struct, frozen=True, array_like=True):
    """The part of `worker.token_span.TokenSpan` that decides what is computed."""

    slot: Count
    start: Count
    end: Count
    is_sampled: bool
    num_drafts: Count = 0
    new_block: SerialOrNone = -1
    reported: tuple[Count, Count] | None = None
    """First position whose logits are needed, and the one after the last."""


class RunSpans(msgspec.Struct, frozen=True, tag="run_spans"):
    """From rank 0: compute these tokens, after the changes of block tables."""

    blocks: list[SlotBlocks]
    spans: list[RankSpan]


class RankReady(msgspec.Struct, frozen=True, tag="rank_ready"):
    """To rank 0: the model is loaded, and the rank waits for steps."""


class RankFailed(msgspec.Struct, frozen=True, tag="rank_failed"):
    """To rank 0: the rank cannot start."""

    message: str


ToRank = StartRank | StartShard | RunSpans
RankReply = RankReady | RankFailed
