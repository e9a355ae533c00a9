"""Draws drafts as the served model would draw: the same noise at each position, the same cuts, biases and penalties.

So a model that thinks alike says alike, also at a high temperature. Grammars and thinking are not asked: what they forbid
is drafted, and not accepted.
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
    """A slot's rules, as they are behind the first `num_tokens` of its list."""

    rules: LogitsProcessor
    num_tokens: int


class DraftSampler:
    def __init__(self, vocab_size: int, max_slots: int, threads: ThreadPool) -> None:
        self._vocab_size = vocab_size
        self._sampler = Sampler(vocab_size, max_slots, threads)
        self._known: dict[int, _SlotProcessor] = {}
        self._drafted: dict[int, LogitsProcessor] = {}

    def on_assign(self, slot: int) -> None:
        self._known.pop(slot, None)

    def begin(self, wishes: Sequence[DraftRequest], tokens: np.ndarray) -> None:
        """Of one round of drafts. `tokens` is a table like the worker's, with no token outside of the vocabulary."""
        self._drafted = {
            wish.slot: self._rules_of(wish, tokens[wish.slot]).copy()
            for wish in wishes
            if LogitsProcessor.is_needed(wish.sampling)
        }

    def sample(self, logits: np.ndarray, wishes: Sequence[DraftRequest], depths: Sequence[int]) -> list[int | None]:
        """One token for each row, which follows as many drafts of its wish as `depths` says. None: no number."""
        for row, wish in enumerate(wishes):
            if (rules := self._drafted.get(wish.slot)) is not None:
                rules.apply(logits[row, : self._vocab_size])
        draws = [
            SamplingRow(wish.sampling, wish.num_tokens - wish.num_prompt + depth)
            for wish, depth in zip(wishes, depths, strict=True)
        ]
        drawn = self._sampler.sample(logits, draws)
        for wish, token in zip(wishes, drawn, strict=True):
            if token is not None and (rules := self._drafted.get(wish.slot)) is not None:
                rules.advance(token)
        return drawn

    def _rules_of(self, wish: DraftRequest, tokens: np.ndarray) -> LogitsProcessor:
        """Those of the list, brought up to its length: it only ever grows while a slot has one request."""
        known = self._known.get(wish.slot)
        if known is None:
            prompt, output = tokens[: wish.num_prompt], tokens[wish.num_prompt : wish.num_tokens]
            rules = LogitsProcessor(wish.sampling, prompt, output, self._vocab_size)
            known = self._known[wish.slot] = _SlotProcessor(rules, wish.num_tokens)
        assert known.num_tokens <= wish.num_tokens, "the token list of a request only grows"
        for token in tokens[known.num_tokens : wish.num_tokens].tolist():
            known.rules.advance(token)
        known.num_tokens = wish.num_tokens
        return known.rules
