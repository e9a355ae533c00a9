"""Who guesses the next tokens of slots, so that one step can verify several. A guess costs time and nothing else: every
token is drawn as if there had been none, so a proposer may be wrong, late or empty, and need not be repeatable.

Of one step:   assigned (each new slot)  ->  propose (once, for all that may verify)  ->  the model's pass over known and
drafted tokens  ->  drawing  ->  computed (once, with what has been accepted)

    tokens of a slot   |---- prompt ----|---- generated ----|·· drafts ··|
                       0           num_prompt           num_tokens
    the model's KV     |-------------------------------->|  num_tokens - 1, when drafts are asked for
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
    """What a proposer sees of its worker. It changes none of it, but may write drafts behind a slot's tokens."""

    model: PreparedModel
    config: WorkerConfig
    tokens: np.ndarray
    """[slots, max_model_len + 1], int32: each slot's list; what lies behind its length is anybody's."""
    tables: "BlockTables"
    num_blocks: int
    """Of the KV pool. A model that drafts may keep KV of its own under the same block ids."""
    max_model_len: int
    threads: "ThreadPool"


@dataclass(frozen=True, slots=True)
class DraftRequest:
    slot: int
    num_drafts: int
    """At most so many are of use. Blocks for their KV are in the slot's table."""
    num_tokens: int
    """Length of the slot's list. The model's KV of all but the last is computed, or will be in this step."""
    num_prompt: int
    sampling: SamplingParams
    """A model that drafts draws with the same noise, keyed by seed, choice and position, to be right more often."""


@dataclass(frozen=True, slots=True)
class ComputedSpan:
    """Of one slot, the tokens [start, start + count) have their KV now, and are final. Those behind them in the same
    pass were drafts that were not accepted."""

    slot: int
    start: int
    count: int
    first_row: int
    """Of the pass: row `first_row + i` is token `start + i`."""
    num_tokens: int
    """Length of the slot's list now, new tokens included: at least start + count."""

    def __post_init__(self) -> None:
        assert self.start + self.count <= self.num_tokens, "only known tokens are computed"


class Proposer(Protocol):
    def on_assign(self, slot: int, num_tokens: int, num_computed: int) -> None:
        """A slot has a new request. KV of `num_computed` tokens came from the cache or from a peer."""
        ...

    def propose(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        """For each request, what may follow its list: none to `num_drafts` tokens of the vocabulary."""
        ...

    def on_computed(self, spans: Sequence[ComputedSpan], outputs: Callable[[], np.ndarray]) -> None:
        """After each pass of the model. `outputs` gives what its head reads of every row of the pass, float32
        [rows, hidden_size]; asking costs time."""
        ...


class ProposerFactory(Protocol):
    """A proposer that is not there yet: memory is shared out before it is taken."""

    @property
    def bytes_per_block(self) -> int:
        """That it keeps beside each block of the KV pool."""
        ...

    @property
    def draft_cost(self) -> float:
        """Of guessing one token for each slot, as a share of the model's own pass over them. Asked when it is open."""
        ...

    def create(self, context: ProposerContext) -> Proposer: ...
