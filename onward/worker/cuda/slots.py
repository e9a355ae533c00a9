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
from onward.proto.sampling import Sampling
from onward.proto.step import Assign, Run
from onward.text.reasoning.thinking_tokens import Stage as ThinkingStage
from onward.text.reasoning.thinking_tokens import Thinking
from onward.worker import answer_rules
from onward.worker.cuda.drawing import has_cuts
from onward.worker.cuda.logit_rules import DeviceRules
from onward.worker.cuda.packing import NO_BLOCK, Span
from onward.worker.cuda.pooling import DevicePool
from onward.worker.cuda.staging import Stage, Staged
from onward.worker.mask_making import MaskMaker, MaskMaking
from onward.worker.penalties import LogitRules
from onward.worker.rule_making import grammar_of, grammars_of, thinking_of
from onward.worker.slot_checks import Fault, check_assignment, check_blocks, check_room, reported_rows
from onward.worker.slot_grammar import NUM_THREADS, SlotGrammar

_U64 = (1 << 64) - 1
_MOST_MASK_THREADS = 8


@dataclass(slots=True, eq=False)
class Slot:
    """One request's state, as if every step that was launched were done.

    tokens   |---- prompt ----|---- generated ----|
             0           num_prompt           num_tokens
    KV       |------------------------>| num_computed
    """

    epoch: int
    num_prompt: int
    num_tokens: int
    num_computed: int
    num_blocks: int
    sampling: Sampling
    token_ids: list[int]
    """Those it was assigned with."""
    rules: DeviceRules | None
    score_from: int | None
    is_reported: bool
    """Logprobs of given tokens are asked for."""
    has_cuts: bool
    careful_until: float
    """Before this position of its output it is drawn with care."""
    grammar: SlotGrammar | None
    thinking: Thinking | None
    num_read: int
    """Tokens that grammar and thinking have seen: those that are on the host. The others are `num_tokens` behind."""
    ruled_from: float
    """From this position on, what is drawn depends on tokens that the host has to see first."""
    pool: DevicePool | None
    """Where a vector is wanted, and no tokens."""
    has_failed: bool = False
    """Found out later: what steps after that one drew for it is void."""

    @classmethod
    def of(
        cls,
        assign: Assign,
        rules: DeviceRules | None,
        grammar: SlotGrammar | None,
        thinking: Thinking | None,
        pool: DevicePool | None,
    ) -> "Slot":
        sampling = assign.sampling
        always_careful = rules is not None or sampling.logprobs is not None
        return cls(
            assign.epoch, assign.num_prompt, len(assign.token_ids), assign.num_computed, len(assign.block_ids), sampling,
            assign.token_ids, rules, assign.score_from,
            is_reported=assign.score_from is not None or sampling.prompt_logprobs is not None,
            has_cuts=has_cuts(sampling),
            careful_until=math.inf if always_careful else sampling.min_tokens if sampling.end_token_ids else 0,
            grammar=grammar,
            thinking=thinking,
            num_read=len(assign.token_ids),
            ruled_from=_ruled_from(sampling),
            pool=pool,
        )  # fmt: skip

    @property
    def has_rules(self) -> bool:
        """Grammar or thinking follow what it says."""
        return self.grammar is not None or self.thinking is not None

    def read(self, token_id: int) -> bool:
        """Tells its rules what was drawn. Whether nothing can follow. Raises `GrammarFault`."""
        self.num_read += 1
        is_done = answer_rules.advance(self, token_id)
        if self.grammar is None and self.thinking is not None and self.thinking.stage is ThinkingStage.BEHIND:
            self.ruled_from = math.inf
        return is_done

    def take_back(self) -> None:
        """A token that was to be drawn was not: its logits are wanted again."""
        self.num_tokens -= 1
        self.num_computed -= 1


def _ruled_from(sampling: Sampling) -> float:
    """A budget forces nothing before so many tokens were drawn."""
    if sampling.grammar is not None:
        return 0
    budget = None if sampling.thinking is None else sampling.thinking.budget
    return math.inf if budget is None else budget


@dataclass(frozen=True, slots=True)
class _Upload:
    target: torch.Tensor
    staged: Staged


def _num_mask_threads() -> int:
    """A device has more streams than a CPU, and needs the host's cores less."""
    return max(NUM_THREADS, min(_MOST_MASK_THREADS, len(os.sched_getaffinity(0)) // 2))


class Slots:
    def __init__(
        self, model: PreparedModel, max_num_seqs: int, max_model_len: int, block_size: int, num_blocks: int, device: str,
        masks: MaskMaking | None = None,
    ) -> None:  # fmt: skip
        self.nobody = max_num_seqs
        """The slot of rows that only fill a batch up. Its table names a block that is in nobody's hands."""
        self._max_model_len, self._block_size = max_model_len, block_size
        self._num_blocks, self._device = num_blocks, device
        self._model, self._vocab_size = model, model.config.vocab_size
        self.grammars = grammars_of(model)
        self._masks = masks or MaskMaker(_num_mask_threads())
        self._max_blocks = -(-max_model_len // block_size)
        self.tensors = SlotTensors.allocate(max_num_seqs + 1, max_model_len + 1, self._max_blocks, device)
        self.tensors.tables[self.nobody] = num_blocks
        self._slots: list[Slot | None] = [None] * max_num_seqs
        self._numbers = np.zeros((3, max_num_seqs + 1), np.int64)
        self._measures = np.zeros((4, max_num_seqs + 1), np.float32)
        self._uploads: list[_Upload] = []
        self._are_settings_new = False

    def __getitem__(self, slot: int) -> Slot | None:
        return self._slots[slot]

    def free(self, slot: int) -> None:
        self._slots[slot] = None

    def assign(self, assign: Assign, stage: Stage) -> None:
        """What must be uploaded for it goes to the stage; `send` says when."""
        check_assignment(assign, self._max_model_len, self._vocab_size)
        if assign.push is not None:
            raise Fault("internal_error", "this worker cannot push KV to a peer")
        self._check_table(assign.block_ids, 0)
        thinking = thinking_of(assign)
        grammar = grammar_of(assign, thinking, self._model, self.grammars, self._masks)
        pool = self._new_pool(assign)
        number, token_ids = assign.slot, assign.token_ids
        self._upload(self.tensors.tokens[number, : len(token_ids)], np.array(token_ids, np.int32), stage)
        if assign.block_ids:
            self._upload_blocks(number, 0, assign.block_ids, stage)
        self._set(number, assign.sampling, assign.num_prompt)
        self._slots[number] = Slot.of(assign, self._rules(assign), grammar, thinking, pool)

    def permit(self, run: Run, stage: Stage) -> Span[Slot] | None:
        """What the slot computes now, and on the host has computed from here on; nothing if it belongs to another epoch or
        has nothing to compute."""
        slot = self._slots[run.slot]
        if slot is None or slot.epoch != run.epoch:
            return None
        start, known = slot.num_computed, slot.num_tokens
        end = min(start + run.num_tokens, known)
        is_one = start + 1 == known and not slot.is_reported and slot.pool is None
        new_block = self._take_blocks(run, slot, stage, start if is_one else None) if run.new_block_ids else NO_BLOCK
        if end <= start:
            return None
        if end > slot.num_blocks * self._block_size:
            check_room(end, slot.num_blocks, self._block_size, self._max_model_len)
        reported = reported_rows(slot, start, end) if slot.is_reported else None
        slot.num_computed = end
        if slot.pool is not None:
            return Span(run.slot, start, end, False, slot, is_pooled=True)
        slot.num_tokens = known + (end == known)
        return Span(run.slot, start, end, end == known, slot, known - slot.num_prompt, new_block, reported)

    def send(self, stage: Stage) -> None:
        """Brings everything on the stage to the device, and what concerns slots to its place there."""
        if self._are_settings_new:
            self._upload(self.tensors.numbers, self._numbers, stage)
            self._upload(self.tensors.measures, self._measures, stage)
            self._are_settings_new = False
        stage.send()
        for upload in self._uploads:
            upload.target.copy_(upload.staged.tensor())
        self._uploads.clear()

    def _take_blocks(self, run: Run, slot: Slot, stage: Stage, position: int | None) -> int:
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
            raise Fault(
                "internal_error",
                f"{first + len(block_ids)} blocks are more than the {self._max_blocks} that the longest request needs",
            )

    def _upload_blocks(self, slot: int, first: int, block_ids: Sequence[int], stage: Stage) -> None:
        place = self.tensors.tables[slot, first : first + len(block_ids)]
        self._upload(place, np.array(block_ids, np.int32), stage)

    def _upload(self, target: torch.Tensor, array: np.ndarray, stage: Stage) -> None:
        self._uploads.append(_Upload(target, stage.put(array)))

    def _set(self, slot: int, sampling: Sampling, num_prompt: int) -> None:
        seed, choice = (np.uint64(x & _U64).astype(np.int64) for x in (sampling.seed, sampling.choice))
        self._numbers[:, slot] = seed, choice, num_prompt
        top_k = sampling.top_k if sampling.top_k < self._vocab_size else 0
        self._measures[:, slot] = sampling.temperature, sampling.top_p, sampling.min_p, top_k
        self._are_settings_new = True

    def _new_pool(self, assign: Assign) -> DevicePool | None:
        kind = assign.sampling.pooling
        if kind is None:
            return None
        if kind == "mean" and assign.num_computed:
            raise Fault("internal_error", "a mean needs every row, and a part of them came from the cache")
        return DevicePool(kind, self._model.config.hidden_size, self._device)

    def _rules(self, assign: Assign) -> DeviceRules | None:
        if not LogitRules.needed(assign.sampling):
            return None
        tokens = np.array(assign.token_ids, np.int64)
        prompt, output = tokens[: assign.num_prompt], tokens[assign.num_prompt :]
        return DeviceRules(assign.sampling, prompt, output, self._vocab_size, self._device)
