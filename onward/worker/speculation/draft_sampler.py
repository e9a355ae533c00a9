"""Samples drafts as the served model's tokens are sampled: with the same noise at each position, and the same
filtering, biases and penalties.

So a draft model with similar logits gives the same tokens, also at a high temperature. Grammars and reasoning budgets
do not apply here: a token that they forbid is drafted, but not accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onward.kernels.cpu.threads import ThreadPool
from onward.worker.logits_processors.penalties import LogitsProcessor
from onward.worker.sampler import Sampler, SamplingRow
from onward.worker.speculation.proposer import DraftRequest


@dataclass(slots=True)
class _SlotProcessor:
    """A slot's logits processor, advanced over the first `num_tokens` of its list."""

    processor: LogitsProcessor
    num_tokens: int


class DraftSampler:
    def __init__(self, vocab_size: int, max_slots: int, threads: ThreadPool) -> None:
        self._vocab_size = vocab_size
        self._sampler = Sampler(vocab_size, max_slots, threads)
        self._processors: dict[int, _SlotProcessor] = {}
        self._round_processors: dict[int, LogitsProcessor] = {}

    def on_assign(self, slot: int) -> None:
        self._processors.pop(slot, None)

    def begin(self, draft_requests: Sequence[DraftRequest], tokens: np.ndarray) -> None:
        """Begins a round of drafts. `tokens` is a table like the worker's, with no token outside of the vocabulary."""
        self._round_processors = {
            draft_request.slot: self._processor_of(draft_request, tokens[draft_request.slot]).copy()
            for draft_request in draft_requests
            if LogitsProcessor.is_needed(draft_request.sampling)
        }

    def sample(
        self, logits: np.ndarray, draft_requests: Sequence[DraftRequest], depths: Sequence[int]
    ) -> list[int | None]:
        """Returns one token for each row, or None where the logits are not numbers. `depths` is the number of drafts
        before each row."""
        for row, draft_request in enumerate(draft_requests):
            if (processor := self._round_processors.get(draft_request.slot)) is not None:
                processor.apply(logits[row, : self._vocab_size])
        rows = [
            SamplingRow(draft_request.sampling, draft_request.num_tokens - draft_request.num_prompt + depth)
            for draft_request, depth in zip(draft_requests, depths, strict=True)
        ]
        sampled = self._sampler.sample(logits, rows)
        for draft_request, token in zip(draft_requests, sampled, strict=True):
            if token is not None and (processor := self._round_processors.get(draft_request.slot)) is not None:
                processor.advance(token)
        return sampled

    def _processor_of(self, draft_request: DraftRequest, tokens: np.ndarray) -> LogitsProcessor:
        """Returns the slot's processor, advanced to the length of the list, which only grows while a slot has one
        request."""
        slot_processor = self._processors.get(draft_request.slot)
        if slot_processor is None:
            prompt, output = (
                tokens[: draft_request.num_prompt],
                tokens[draft_request.num_prompt : draft_request.num_tokens],
            )
            processor = LogitsProcessor(draft_request.sampling, prompt, output, self._vocab_size)
            slot_processor = self._processors[draft_request.slot] = _SlotProcessor(processor, draft_request.num_tokens)
        assert slot_processor.num_tokens <= draft_request.num_tokens, "the token list of a request only grows"
        for token in tokens[slot_processor.num_tokens : draft_request.num_tokens].tolist():
            slot_processor.processor.advance(token)
        slot_processor.num_tokens = draft_request.num_tokens
        return slot_processor.processor
