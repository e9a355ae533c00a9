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

    def create(self, context: ProposerContext) -> "Injected":
        self._tokens = context.tokens
        return self

    def on_assign(self, slot: int, num_tokens: int, num_computed: int) -> None:
        pass

    def propose(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        drafts = [
            self._guess(draft_request, self._tokens[draft_request.slot, : draft_request.num_tokens].tolist())
            for draft_request in draft_requests
        ]
        self.num_drafted += sum(map(len, drafts))
        return drafts

    def on_computed(self, spans: Sequence[ComputedSpan], outputs: Callable[[], np.ndarray]) -> None:
        self.told += spans
        self.outputs.append(outputs())


def knowing(outputs: dict[int, list[int]]) -> Guess:
    """By slot, what will follow the prompt."""

    def guess(draft_request: DraftRequest, tokens: list[int]) -> list[int]:
        at = draft_request.num_tokens - draft_request.num_prompt
        return outputs[draft_request.slot][at : at + draft_request.num_drafts]

    return guess


def right_until(outputs: dict[int, list[int]], depth: int, vocab_size: int) -> Guess:
    """The draft at `depth` is wrong, those before it are right, those behind it are what would follow."""
    know = knowing(outputs)

    def guess(draft_request: DraftRequest, tokens: list[int]) -> list[int]:
        drafts = know(draft_request, tokens)
        if depth < len(drafts):
            drafts[depth] = (drafts[depth] + 1) % vocab_size
        return drafts

    return guess
