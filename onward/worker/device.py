"""The interface between the model runner and the device that runs the forward pass and samples tokens.

Independent of torch, Triton and numba.

One step:   assign, extend (each slot that changes)  ->  launch  ->  sample, if that was deferred  ->  collect

A device executes steps in the order of their launches. A synchronous device (`is_synchronous`) is the simple case: it
computes in the call, so every step that it has launched is done.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from onward.proto.kv_transfer import KvLayout
from onward.proto.sampling_params import Pooling, SamplingParams
from onward.proto.step import AssignSlot, TokenLogprobs
from onward.worker.slot_state import SlotState
from onward.worker.speculation.draft_manager import DraftManager
from onward.worker.token_bitmasks import TokenBitmasks
from onward.worker.token_span import TokenSpan

if TYPE_CHECKING:
    from onward.worker.kv_pool import KvPool

MAX_STEPS_IN_FLIGHT = 4
"""Limits memory: a step keeps its buffers until it is collected."""


@dataclass(slots=True)
class LaunchHandle:
    """Identifies a step in flight on the device: `Device.launch` returns it for `sample`, `is_done` and `collect`.

    `LaunchedStep` is the runner's record of the same step: its plan, events and grammar state."""

    sampling: Sequence[TokenSpan[SlotState]]
    """Spans that sample, in the order of their rows of logits. Each has one row, and one more for each draft."""
    not_sampling: Sequence[TokenSpan[SlotState]]
    reporting: Sequence[TokenSpan[SlotState]]
    """Spans whose given tokens' logprobs are requested."""
    work: Any
    """The device's own state of the step."""


class SampledRow(NamedTuple):
    """A row of logits, and the number of drafts of its span that precede it (`depth`)."""

    row: int
    span: TokenSpan[SlotState]
    depth: int


@dataclass(slots=True)
class StepOutput:
    token_ids: list[int]
    """The token of each sampled row."""
    are_valid: list[int]
    """0 where the logits are not numbers, so that there is no token."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By row, if requested."""
    given_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Logprobs of given tokens, in the order of `LaunchHandle.reporting`."""
    vectors: dict[int, bytes] = field(default_factory=dict)
    """Vectors of complete prompts by slot: float32, little-endian."""


@dataclass(frozen=True, slots=True)
class DummySteps:
    """A prompt of `length` tokens in each of `num_slots` slots, and `num_decodes` decode steps after it."""

    num_slots: int
    sampling: SamplingParams
    length: int
    num_decodes: int


@dataclass(frozen=True, slots=True)
class KvTransferMemory:
    """KV memory that takes part in transfers: the transfer thread reads it to push blocks, and peers write it."""

    pool: "KvPool"
    layout: KvLayout
    layers_done: Callable[[], int]
    """Returns the number of layers that have written all their KV, since the start. Any thread may call it."""


class Device(Protocol):
    """Runs forward passes and samples: int8 or float on the CPU, plain torch, or Triton."""

    @property
    def is_synchronous(self) -> bool: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def scratch_block(self) -> int:
        """The block that dummy steps write. If the KV memory may hold an earlier worker's blocks, it is outside the
        pool, so the engine never hands it out."""
        ...

    @property
    def num_mask_threads(self) -> int: ...

    @property
    def num_threads(self) -> int:
        """Threads that compute; 0 if they are not the host's."""
        ...

    @property
    def kernels(self) -> str:
        """Description of the kernels, for people to read."""
        ...

    @property
    def attention_window(self) -> int | None:
        """Number of positions whose KV is read for a token, its own included; None: all positions. Earlier blocks may
        be given to other requests, so nothing of them may be read, not even to be masked."""
        ...

    @property
    def kv_memory(self) -> KvTransferMemory | None:
        """The memory for KV transfers; None if its KV cannot be exchanged with peers."""
        ...

    @property
    def draft_manager(self) -> DraftManager | None:
        """None: no drafts."""
        ...

    def assign(self, assign: AssignSlot) -> None:
        """Takes the slot's tokens, blocks and sampling parameters."""
        ...

    def extend(self, slot: int, first: int, block_ids: Sequence[int], decoding_at: int | None) -> int:
        """Adds blocks to the slot's table, from index `first` on. `decoding_at` is the position of the slot's one
        token, if it decodes. Returns a block that the slot's span has to carry, or `NO_BLOCK`."""
        ...

    def new_logits_processor(self, sampling: SamplingParams, prompt: np.ndarray, output: np.ndarray) -> Any: ...

    def new_pooler(self, pooling: Pooling) -> Any: ...

    def launch(self, spans: Sequence[TokenSpan[SlotState]], *, is_deferred: bool) -> LaunchHandle:
        """Computes all tokens of the spans, and samples unless `is_deferred`."""
        ...

    def new_bitmask(self, handle: LaunchHandle, num_rows: int) -> np.ndarray:
        """Returns a buffer for bitmasks from which `sample` reads them: uint8 [rows, bytes], one bit for each token."""
        ...

    def sample(
        self, handle: LaunchHandle, masks: TokenBitmasks | None = None, rows: Sequence[SampledRow] | None = None
    ) -> None:
        """Samples these rows (None: one of each span), after penalties, masks and `min_tokens` have changed the logits.
        Appends the tokens to the slots' lists and advances logits processors."""
        ...

    def is_done(self, handle: LaunchHandle) -> bool:
        """Returns whether everything that was launched for this step is done."""
        ...

    def collect(self, handle: LaunchHandle) -> StepOutput:
        """Waits until the step is done, and returns its output. The output's rows are those of the last `sample`."""
        ...

    def logits_of(self, spans: Sequence[TokenSpan[Any]]) -> np.ndarray:
        """Returns float32 logits of every row of these spans, without sampling."""
        ...

    def warm_up_steps(self) -> Iterable[DummySteps]: ...
