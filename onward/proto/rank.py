"""Messages between rank 0 and the other ranks of a worker with `--tensor-parallel`, over a socket pair for each of them.

They are only for the start. Steps go through memory that all ranks map (`kernels.cpu.rank_threads`).
"""

import msgspec

from onward.config import WorkerConfig
from onward.proto.field_types import Count, Serial
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


class RankReady(msgspec.Struct, frozen=True, tag="rank_ready"):
    """To rank 0: the model is loaded, and the rank's threads wait for steps."""


class RankFailed(msgspec.Struct, frozen=True, tag="rank_failed"):
    """To rank 0: the rank cannot start."""

    message: str


RankReply = RankReady | RankFailed
