"""Drafts without a model: finds where the newest tokens occurred before, in prompt or output, and proposes what followed.

Each slot has an index from n-grams to the position after their latest occurrence. It grows by a few entries for each
token, however long the list is. It is built on first use, so requests without drafts have no cost.
"""

from collections.abc import Callable, Sequence

import numpy as np

from onward.worker.speculation.proposer import ComputedSpan, DraftRequest, ProposerContext

NGRAM_LENGTHS = (6, 3, 2)
"""Numbers of tokens that must match, tried in this order: after a longer match, the drafts are more likely right."""


class NgramProposerFactory:
    @property
    def bytes_per_block(self) -> int:
        """Zero: the size of the index depends on the slots' lists, not on the pool."""
        return 0

    @property
    def draft_cost(self) -> float:
        """Zero: a draft takes a few look-ups."""
        return 0.0

    def create(self, context: ProposerContext) -> "NgramProposer":
        return NgramProposer(context.tokens)


class NgramProposer:
    def __init__(self, tokens: np.ndarray) -> None:
        self._tokens = tokens
        self._indexes: dict[int, _NgramIndex] = {}

    def on_assign(self, slot: int, num_tokens: int, num_computed: int) -> None:
        self._indexes.pop(slot, None)

    def propose(self, draft_requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._propose(draft_request) for draft_request in draft_requests]

    def on_computed(self, spans: Sequence[ComputedSpan], outputs: Callable[[], np.ndarray]) -> None:
        """Does nothing: `propose` reads the tokens from the token table."""

    def _propose(self, draft_request: DraftRequest) -> list[int]:
        index = self._indexes.setdefault(draft_request.slot, _NgramIndex())
        assert len(index.tokens) <= draft_request.num_tokens, "the token list of a request only grows"
        index.extend(self._tokens[draft_request.slot, len(index.tokens) : draft_request.num_tokens].tolist())
        return index.continuation(draft_request.num_drafts)


class _NgramIndex:
    """The index of one list. Its size is bounded by the list's length, and so by the longest list that the model
    allows."""

    __slots__ = ("_positions", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._positions: dict[tuple[int, ...], int] = {}

    def extend(self, new_tokens: list[int]) -> None:
        tokens, positions = self.tokens, self._positions
        for token in new_tokens:
            end = len(tokens)
            for length in NGRAM_LENGTHS:
                if end >= length:
                    positions[tuple(tokens[end - length :])] = end
            tokens.append(token)

    def continuation(self, count: int) -> list[int]:
        """Returns the tokens that followed the latest earlier occurrence of the newest tokens. If they reach the end of
        the list, the continuation repeats itself."""
        tokens = self.tokens
        for length in NGRAM_LENGTHS:
            position = self._positions.get(tuple(tokens[-length:])) if len(tokens) >= length else None
            if position is not None:
                count = min(count, self._agreement(position, count + 1) - 1)
                continuation = tokens[position : position + count]
                period = len(tokens) - position
                assert period > 0, "an indexed position lies before the end of the list"
                while len(continuation) < count:
                    continuation.append(continuation[len(continuation) - period])
                return continuation
        return []

    def _agreement(self, position: int, limit: int) -> int:
        """Returns how many tokens before `position` equal the newest ones, up to `limit`. Short matches seldom
        continue, so one token less is drafted than has matched."""
        tokens, length = self.tokens, 2
        while length < limit and length < position and tokens[position - 1 - length] == tokens[-1 - length]:
            length += 1
        return length
