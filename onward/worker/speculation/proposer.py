"""The interface of proposers, which draft the next tokens of slots so that one step can verify several. Drafts only
cost time: every token is sampled as without drafts. So a proposer may be wrong, late or empty, and need not be
repeatable.

One step:   on_assign (each new slot)  ->  propose (once, for all slots that may verify)  ->  the model's pass over
known and drafted tokens  ->  sampling  ->  on_computed (once, with the accepted tokens)

    tokens of a slot   |---- prompt ----|---- generated ----|·· drafts ··|
                       0           num_prompt           num_tokens
    the model's KV     |-------------------------------->|  num_tokens - 1, when drafts are requested
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from onward.config import WorkerConfig
from onward.proto.model import PreparedModel
from onward.proto.sampling_params import SamplingParams

if TYPE_CHECKING:
    from onward.kernels.cpu.threads import ThreadPool
    from onward.worker.kv_pool import BlockTables


@dataclass(frozen=True, slots=True)
class ProposerContext:
    """The parts of the worker that a proposer reads. It changes none of them, but may write drafts after a slot's
    tokens."""

    model: PreparedModel
    config: WorkerConfig
    tokens: np.ndarray
    """[slots, max_model_len + 1], int32: each slot's list. Entries after its length have no meaning."""
    tables: "BlockTables"
    num_blocks: int
    """Blocks of the KV pool. A draft model may keep KV of its own under the same block ids."""
    max_model_len: int
    threads: "ThreadPool"


@dataclass(frozen=True, slots=True)
class DraftRequest:
    slot: int
    num_drafts: int
    """Drafts that can be used, at most. Blocks for their KV are in the slot's table."""
    num_tokens: int
    """Length of the slot's list. The model's KV of all but the last is computed, or will be in this step."""
    num_prompt: int
    sampling: SamplingParams
    """A draft model samples with the same noise, keyed by seed, choice and position, to be right more often."""


@dataclass(frozen=True, slots=True)
class ComputedSpan:
    """The tokens [start, start + count) of one slot, which have their KV now and are final. The tokens after them in
    the same pass were drafts that were not accepted."""

    slot: int
    start: int
    count: int
    first_row: int
    """The first row in the pass: row `first_row + i` is token `start + i`."""
    num_tokens: int
    """Length of the slot's list now, new tokens included: at least start + count."""

    def __post_init__(self) -> None:
        assert self.start + self.count <= self.num_tokens, "only known tokens are computed"


class Proposer(Protocol):
    def on_assign(self, slot: int, num_tokens: int, num_computed: int) -> None:
        """Prepares for a new request in a slot. KV of `num_computed` tokens came from the cache or from a peer."""
        ...

    def propose(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Returns the drafts that may follow each request's list: none to `num_drafts` tokens of the vocabulary."""
        ...

    def on_computed(self, spans: Sequence[ComputedSpan], outputs: Callable[[], np.ndarray]) -> None:
        """Processes the final tokens of a pass of the model, after each pass. `outputs` returns the hidden states that
        the model's head reads, for every row of the pass: float32 [rows, hidden_size]. Calling `outputs` costs time."""
        ...


class ProposerFactory(Protocol):
    """Creates a proposer, and knows a proposer's memory needs before it is created: the number of KV blocks is chosen
    first, and the proposer needs memory for each block."""

    @property
    def bytes_per_block(self) -> int:
        """Bytes that the proposer keeps for each block of the KV pool."""
        ...

    @property
    def draft_cost(self) -> float:
        """Cost of drafting one token for each slot, as a share of the model's own pass over them. Read after
        `create`."""
        ...

    def create(self, context: ProposerContext) -> Proposer: ...
