"""Every slot's state, on the host as far as plans need it, and on the device as far as kernels do.

The host knows how many tokens a slot has, the device also which: a step is launched before the last one's tokens are here.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from onward.kernels.ops import SlotTensors
from onward.proto.model import PreparedModel
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import AssignSlot, RunSlot
from onward.text.reasoning.reasoning_tracker import ReasoningPhase as ThinkingStage
from onward.text.reasoning.reasoning_tracker import ReasoningTracker
from onward.worker.cuda.device_embedding_pooler import DeviceEmbeddingPooler
from onward.worker.cuda.device_penalties import DeviceLogitsProcessor
from onward.worker.cuda.device_sampler import uses_filtering
from onward.worker.cuda.staging_buffer import StagedArray, StagingBuffer
from onward.worker.cuda.step_packing import NO_BLOCK, DeviceTokenSpan
from onward.worker.logits_processors import constraints
from onward.worker.logits_processors.constraint_factory import (
    create_grammar_compiler,
    create_slot_grammar,
    create_thinking,
)
from onward.worker.logits_processors.mask_executor import MaskExecutor, ThreadedMaskExecutor
from onward.worker.logits_processors.penalties import LogitsProcessor
from onward.worker.logits_processors.slot_grammar import NUM_MASK_THREADS, SlotGrammar
from onward.worker.slot_checks import SlotError, check_assignment, check_blocks, check_slot_blocks, logprob_positions

_U64 = (1 << 64) - 1
_MOST_MASK_THREADS = 8


@dataclass(slots=True, eq=False)
class DeviceSlotState:
    """One request's state, as if every step that was launched were done.

    tokens   |---- prompt ----|---- generated ----|
             0           num_prompt           num_tokens
    KV       |------------------------>| num_computed
    """

    slot_epoch: int
    num_prompt: int
    num_tokens: int
    num_computed: int
    num_blocks: int
    sampling: SamplingParams
    token_ids: list[int]
    """Those it was assigned with."""
    logits_processor: DeviceLogitsProcessor | None
    score_from: int | None
    wants_given_logprobs: bool
    """Logprobs of given tokens are asked for."""
    uses_filtering: bool
    processed_until: float
    """Before this position of its output it is drawn with care."""
    grammar: SlotGrammar | None
    thinking: ReasoningTracker | None
    num_tokens_on_host: int
    """Tokens that grammar and thinking have seen: those that are on the host. The others are `num_tokens` behind."""
    constrained_from: float
    """From this position on, what is drawn depends on tokens that the host has to see first."""
    pooler: DeviceEmbeddingPooler | None
    """Where a vector is wanted, and no tokens."""
    has_failed: bool = False
    """Found out later: what steps after that one drew for it is void."""

    def __post_init__(self) -> None:
        assert self.num_prompt <= self.num_tokens, "the prompt is the beginning of the slot's tokens"
        assert self.num_computed < self.num_tokens, "a new slot has at least one token to compute"

    @classmethod
    def of(
        cls,
        assign: AssignSlot,
        logits_processor: DeviceLogitsProcessor | None,
        grammar: SlotGrammar | None,
        thinking: ReasoningTracker | None,
        pooler: DeviceEmbeddingPooler | None,
    ) -> "DeviceSlotState":
        sampling = assign.sampling_params
        always_careful = logits_processor is not None or sampling.logprobs is not None
        return cls(
            assign.slot_epoch,
            assign.num_prompt,
            len(assign.token_ids),
            assign.num_computed,
            len(assign.block_ids),
            sampling,
            assign.token_ids,
            logits_processor,
            assign.rescore_from,
            wants_given_logprobs=assign.rescore_from is not None or sampling.prompt_logprobs is not None,
            uses_filtering=uses_filtering(sampling),
            processed_until=math.inf if always_careful else sampling.min_tokens if sampling.end_token_ids else 0,
            grammar=grammar,
            thinking=thinking,
            num_tokens_on_host=len(assign.token_ids),
            constrained_from=_constrained_from(sampling),
            pooler=pooler,
        )

    @property
    def is_constrained(self) -> bool:
        """Grammar or thinking follow what it says."""
        return self.grammar is not None or self.thinking is not None

    def accept_token(self, token_id: int) -> bool:
        """Advances grammar and reasoning by a sampled token. Returns whether nothing can follow. Raises
        `SlotGrammarError`."""
        assert self.num_tokens_on_host < self.num_tokens, "only tokens of launched steps reach the host"
        self.num_tokens_on_host += 1
        is_done = constraints.advance(self, token_id)
        if self.grammar is None and self.thinking is not None and self.thinking.phase is ThinkingStage.BEHIND:
            self.constrained_from = math.inf
        return is_done

    def undo_sample(self) -> None:
        """A token that was to be drawn was not: its logits are wanted again."""
        assert self.num_computed == self.num_tokens - 1, "only the newest sample is undone"
        self.num_tokens -= 1
        self.num_computed -= 1


def _constrained_from(sampling: SamplingParams) -> float:
    """A budget forces nothing before so many tokens were drawn."""
    if sampling.grammar is not None:
        return 0
    budget = None if sampling.reasoning is None else sampling.reasoning.budget
    return math.inf if budget is None else budget


@dataclass(frozen=True, slots=True)
class _PendingUpload:
    target: torch.Tensor
    staged: StagedArray


def _num_mask_threads() -> int:
    """A device has more streams than a CPU, and needs the host's cores less."""
    return max(NUM_MASK_THREADS, min(_MOST_MASK_THREADS, len(os.sched_getaffinity(0)) // 2))


class DeviceSlots:
    def __init__(
        self,
        model: PreparedModel,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        device: str,
        masks: MaskExecutor | None = None,
    ) -> None:
        self.padding_slot = max_num_seqs
        """The slot of rows that only fill a batch up. Its table names a block that is in nobody's hands."""
        self._max_model_len, self._block_size = max_model_len, block_size
        self._num_blocks, self._device = num_blocks, device
        self._model, self._vocab_size = model, model.config.vocab_size
        self.grammars = create_grammar_compiler(model)
        self._mask_executor = masks or ThreadedMaskExecutor(_num_mask_threads())
        self._max_blocks = -(-max_model_len // block_size)
        self.tensors = SlotTensors.allocate(max_num_seqs + 1, max_model_len + 1, self._max_blocks, device)
        self.tensors.tables[self.padding_slot] = num_blocks
        self._slots: list[DeviceSlotState | None] = [None] * max_num_seqs
        self._int_params = np.zeros((3, max_num_seqs + 1), np.int64)
        self._float_params = np.zeros((4, max_num_seqs + 1), np.float32)
        self._uploads: list[_PendingUpload] = []
        self._params_changed = False

    def __getitem__(self, slot: int) -> DeviceSlotState | None:
        return self._slots[slot]

    def free(self, slot: int) -> None:
        self._slots[slot] = None

    def assign(self, assign: AssignSlot, stage: StagingBuffer) -> None:
        """Puts what must be uploaded into the staging buffer; `upload` sends it."""
        check_assignment(assign, self._max_model_len, self._vocab_size)
        if assign.push is not None:
            raise SlotError("internal_error", "this worker cannot push KV to a peer")
        self._check_table(assign.block_ids, 0)
        thinking = create_thinking(assign)
        grammar = create_slot_grammar(assign, thinking, self._model, self.grammars, self._mask_executor)
        pooler = self._create_pooler(assign)
        slot, token_ids = assign.slot, assign.token_ids
        self._upload(self.tensors.tokens[slot, : len(token_ids)], np.array(token_ids, np.int32), stage)
        if assign.block_ids:
            self._upload_blocks(slot, 0, assign.block_ids, stage)
        self._set_sampling(slot, assign.sampling_params, assign.num_prompt)
        self._slots[slot] = DeviceSlotState.of(assign, self._create_logits_processor(assign), grammar, thinking, pooler)

    def add_span(self, run: RunSlot, stage: StagingBuffer) -> DeviceTokenSpan[DeviceSlotState] | None:
        """What the slot computes now, and on the host has computed from here on; nothing if it belongs to another epoch or
        has nothing to compute."""
        slot = self._slots[run.slot]
        if slot is None or slot.slot_epoch != run.slot_epoch:
            return None
        start, num_tokens = slot.num_computed, slot.num_tokens
        assert start <= num_tokens, "only known tokens are computed"
        end = min(start + run.num_tokens, num_tokens)
        decodes = start + 1 == num_tokens and not slot.wants_given_logprobs and slot.pooler is None
        new_block = self._take_blocks(run, slot, stage, start if decodes else None) if run.new_block_ids else NO_BLOCK
        if end <= start:
            return None
        if end > slot.num_blocks * self._block_size:
            check_slot_blocks(end, slot.num_blocks, self._block_size, self._max_model_len)
        positions = logprob_positions(slot, start, end) if slot.wants_given_logprobs else None
        slot.num_computed = end
        if slot.pooler is not None:
            return DeviceTokenSpan(run.slot, start, end, False, slot, is_pooled=True)
        slot.num_tokens = num_tokens + (end == num_tokens)
        return DeviceTokenSpan(
            run.slot, start, end, end == num_tokens, slot, num_tokens - slot.num_prompt, new_block, positions
        )

    def upload(self, stage: StagingBuffer) -> None:
        """Brings everything on the stage to the device, and what concerns slots to its place there."""
        if self._params_changed:
            self._upload(self.tensors.int_params, self._int_params, stage)
            self._upload(self.tensors.float_params, self._float_params, stage)
            self._params_changed = False
        stage.send()
        for upload in self._uploads:
            upload.target.copy_(upload.staged.tensor())
        self._uploads.clear()

    def _take_blocks(self, run: RunSlot, slot: DeviceSlotState, stage: StagingBuffer, position: int | None) -> int:
        """A single block for the token of a row that decodes, at this position, goes with the row; others are uploaded."""
        block_ids, first = run.new_block_ids, slot.num_blocks
        self._check_table(block_ids, first)
        slot.num_blocks += len(block_ids)
        if position is not None and len(block_ids) == 1 and first == position // self._block_size:
            return block_ids[0]
        self._upload_blocks(run.slot, first, block_ids, stage)
        return NO_BLOCK

    def _check_table(self, block_ids: Sequence[int], first: int) -> None:
        check_blocks(block_ids, self._num_blocks)
        if first + len(block_ids) > self._max_blocks:
            raise SlotError(
                "internal_error",
                f"{first + len(block_ids)} blocks are more than the {self._max_blocks} that the longest request needs",
            )

    def _upload_blocks(self, slot: int, first: int, block_ids: Sequence[int], stage: StagingBuffer) -> None:
        table = self.tensors.tables[slot, first : first + len(block_ids)]
        self._upload(table, np.array(block_ids, np.int32), stage)

    def _upload(self, target: torch.Tensor, array: np.ndarray, stage: StagingBuffer) -> None:
        self._uploads.append(_PendingUpload(target, stage.put(array)))

    def _set_sampling(self, slot: int, sampling: SamplingParams, num_prompt: int) -> None:
        seed, choice = (np.uint64(x & _U64).astype(np.int64) for x in (sampling.seed, sampling.choice_index))
        self._int_params[:, slot] = seed, choice, num_prompt
        top_k = sampling.top_k if sampling.top_k < self._vocab_size else 0
        self._float_params[:, slot] = sampling.temperature, sampling.top_p, sampling.min_p, top_k
        self._params_changed = True

    def _create_pooler(self, assign: AssignSlot) -> DeviceEmbeddingPooler | None:
        kind = assign.sampling_params.pooling
        if kind is None:
            return None
        if kind == "mean" and assign.num_computed:
            raise SlotError("internal_error", "a mean needs every row, and a part of them came from the cache")
        return DeviceEmbeddingPooler(kind, self._model.config.hidden_size, self._device)

    def _create_logits_processor(self, assign: AssignSlot) -> DeviceLogitsProcessor | None:
        if not LogitsProcessor.is_needed(assign.sampling_params):
            return None
        tokens = np.array(assign.token_ids, np.int64)
        prompt, output = tokens[: assign.num_prompt], tokens[assign.num_prompt :]
        return DeviceLogitsProcessor(assign.sampling_params, prompt, output, self._vocab_size, self._device)
