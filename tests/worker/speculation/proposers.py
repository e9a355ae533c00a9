"""Proposers for tests: an oracle that knows the output, and ones that are wrong in their own ways."""

from collections.abc import Callable, Sequence

import numpy as np

from onward.worker.speculation.proposer import ComputedSpan, DraftRequest, ProposerContext

Guess = Callable[[DraftRequest, list[int]], list[int]]
"""From a wish and the slot's list to drafts."""


class Injected:
    """An opening and its proposer in one, whose guesses are a test's. Remembers what it was told."""

    bytes_per_block = 0
    draft_cost = 0.0

    def __init__(self, guess: Guess) -> None:
        self._guess = guess
        self.told: list[ComputedSpan] = []
        self.outputs: list[np.ndarray] = []
        self.num_drafted = 0

    def create(self, surroundings: ProposerContext) -> "Injected":
        self._tokens = surroundings.tokens
        return self

    def on_assign(self, slot: int, num_tokens: int, num_computed: int) -> None:
        pass

    def propose(self, wishes: Sequence[DraftRequest]) -> list[list[int]]:
        drafts = [self._guess(wish, self._tokens[wish.slot, : wish.num_tokens].tolist()) for wish in wishes]
        self.num_drafted += sum(map(len, drafts))
        return drafts

    def on_computed(self, spans: Sequence[ComputedSpan], outputs: Callable[[], np.ndarray]) -> None:
        self.told += spans
        self.outputs.append(outputs())


def knowing(outputs: dict[int, list[int]]) -> Guess:
    """By slot, what will follow the prompt."""

    def guess(wish: DraftRequest, tokens: list[int]) -> list[int]:
        at = wish.num_tokens - wish.num_prompt
        return outputs[wish.slot][at : at + wish.num_drafts]

    return guess


def right_until(outputs: dict[int, list[int]], depth: int, vocab_size: int) -> Guess:
    """The draft at `depth` is wrong, those before it are right, those behind it are what would follow."""
    know = knowing(outputs)

    def guess(wish: DraftRequest, tokens: list[int]) -> list[int]:
        drafts = know(wish, tokens)
        if depth < len(drafts):
            drafts[depth] = (drafts[depth] + 1) % vocab_size
        return drafts

    return guess
