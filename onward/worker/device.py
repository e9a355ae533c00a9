"""The interface between the model runner and the device that runs the forward pass and samples tokens.

Independent of torch, Triton and numba.

Of one step:   assign, extend (each slot that changes)  ->  launch  ->  sample, where that was deferred  ->  collect

A device works in the order of its launches. One that computes in the call (`is_synchronous`) is the simple case: whatever
it has launched is done.
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
"""A step keeps its buffers until it is collected."""


@dataclass(slots=True)
class LaunchHandle:
    """Identifies a step in flight on the device: `Device.launch` returns it for `sample`, `is_done` and `collect`.

    `LaunchedStep` is the runner's record of the same step: its plan, events and grammar state."""

    sampling: Sequence[TokenSpan[SlotState]]
    """In the order of their rows of logits; each has one, and one more for each draft."""
    not_sampling: Sequence[TokenSpan[SlotState]]
    reporting: Sequence[TokenSpan[SlotState]]
    """Those with logprobs of given tokens."""
    work: Any
    """The device's own state of the step."""


class SampledRow(NamedTuple):
    """A row of logits behind so many drafts of its span."""

    row: int
    span: TokenSpan[SlotState]
    depth: int


@dataclass(slots=True)
class StepOutput:
    token_ids: list[int]
    """Of each row that was sampled."""
    are_valid: list[int]
    """0 where the logits are not numbers, so that there is no token."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By row, where asked for."""
    given_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of `LaunchHandle.reporting`, in order."""
    vectors: dict[int, bytes] = field(default_factory=dict)
    """By slot, of prompts that are whole: float32, little-endian."""


@dataclass(frozen=True, slots=True)
class DummySteps:
    """A prompt in each of so many slots, and steps that decode behind it."""

    num_slots: int
    sampling: SamplingParams
    length: int
    num_decodes: int


@dataclass(frozen=True, slots=True)
class KvMemory:
    """KV memory that a transfer thread reads and peers write."""

    pool: "KvPool"
    layout: KvLayout
    layers_done: Callable[[], int]
    """Layers that have written all their KV, since the beginning; any thread may ask."""


class Device(Protocol):
    """Runs forward passes and samples: int8 or float on the CPU, plain torch, or Triton."""

    @property
    def is_synchronous(self) -> bool: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def scratch_block(self) -> int:
        """The block that dummy steps write. Where KV memory may hold an earlier worker's blocks, it is none of those that
        the engine hands out."""
        ...

    @property
    def num_mask_threads(self) -> int: ...

    @property
    def num_threads(self) -> int:
        """That compute; 0 where they are not the host's."""
        ...

    @property
    def kernels(self) -> str:
        """What computes, for people to read."""
        ...

    @property
    def attention_window(self) -> int | None:
        """How many positions a token's KV is read for, the token's own included. Blocks before them may be given to other
        requests, so nothing of them may be read, not even to be masked. None: all positions are read."""
        ...

    @property
    def kv_memory(self) -> KvMemory | None:
        """None: its KV cannot be exchanged with peers."""
        ...

    @property
    def draft_manager(self) -> DraftManager | None:
        """None: no drafts."""
        ...

    def assign(self, assign: AssignSlot) -> None:
        """Takes the slot's tokens, blocks and sampling parameters."""
        ...

    def extend(self, slot: int, first: int, block_ids: Sequence[int], decoding_at: int | None) -> int:
        """The slot's table gets these blocks from index `first` on. `decoding_at`: the position of its one token, if it
        decodes. Returns a block that its span has to carry, or `NO_BLOCK`."""
        ...

    def new_logits_processor(self, sampling: SamplingParams, prompt: np.ndarray, output: np.ndarray) -> Any: ...

    def new_pooler(self, pooling: Pooling) -> Any: ...

    def launch(self, spans: Sequence[TokenSpan[SlotState]], *, is_deferred: bool) -> LaunchHandle:
        """Computes all tokens of the spans, and samples, unless that is deferred."""
        ...

    def new_bitmask(self, handle: LaunchHandle, num_rows: int) -> np.ndarray:
        """uint8 [rows, bytes]: one bit for each token, from where `sample` reads it."""
        ...

    def sample(
        self, handle: LaunchHandle, masks: TokenBitmasks | None = None, rows: Sequence[SampledRow] | None = None
    ) -> None:
        """Samples these rows (None: one of each span) behind penalties, masks and end tokens, puts the tokens behind the
        slots' and moves logits processors on."""
        ...

    def is_done(self, handle: LaunchHandle) -> bool:
        """Whether all that was launched for it is."""
        ...

    def collect(self, handle: LaunchHandle) -> StepOutput:
        """Waits until it is done. Rows are those of the last `sample`."""
        ...

    def logits_of(self, spans: Sequence[TokenSpan[Any]]) -> np.ndarray:
        """float32 logits of every row of these spans, without sampling."""
        ...

    def warm_up_steps(self) -> Iterable[DummySteps]: ...
