"""Guesses without a model: where did the newest tokens stand before, in prompt or output, and what followed there?

Each slot has an index from runs of tokens to the place behind their latest occurrence. It grows by a few entries for each
token, however long the list, and is built when it is first asked for: who never may draft pays nothing.
"""

from collections.abc import Callable, Sequence

import numpy as np

from onward.worker.speculation.proposer import ComputedSpan, DraftRequest, ProposerContext

NGRAM_LENGTHS = (6, 3, 2)
"""Of tokens that must agree, tried in this order: the longer, the likelier is what follows."""


class NgramProposerFactory:
    @property
    def bytes_per_block(self) -> int:
        """Its index is as long as the slots' lists, not as the pool."""
        return 0

    @property
    def draft_cost(self) -> float:
        """A few look-ups."""
        return 0.0

    def create(self, surroundings: ProposerContext) -> "NgramProposer":
        return NgramProposer(surroundings.tokens)


class NgramProposer:
    def __init__(self, tokens: np.ndarray) -> None:
        self._tokens = tokens
        self._indexes: dict[int, _NgramIndex] = {}

    def on_assign(self, slot: int, num_tokens: int, num_computed: int) -> None:
        self._indexes.pop(slot, None)

    def propose(self, wishes: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._propose(wish) for wish in wishes]

    def on_computed(self, spans: Sequence[ComputedSpan], outputs: Callable[[], np.ndarray]) -> None:
        """The index reads the tokens themselves, when it is asked."""

    def _propose(self, wish: DraftRequest) -> list[int]:
        index = self._indexes.setdefault(wish.slot, _NgramIndex())
        assert len(index.tokens) <= wish.num_tokens, "the token list of a request only grows"
        index.extend(self._tokens[wish.slot, len(index.tokens) : wish.num_tokens].tolist())
        return index.continuation(wish.num_drafts)


class _NgramIndex:
    """Of one list. Bounded by its length, and so by the longest list that the model allows."""

    __slots__ = ("_places", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}

    def extend(self, new: list[int]) -> None:
        tokens, places = self.tokens, self._places
        for token in new:
            end = len(tokens)
            for length in NGRAM_LENGTHS:
                if end >= length:
                    places[tuple(tokens[end - length :])] = end
            tokens.append(token)

    def continuation(self, count: int) -> list[int]:
        """What stood behind the newest tokens the last time; where that reaches the end, it goes on with itself."""
        tokens = self.tokens
        for length in NGRAM_LENGTHS:
            place = self._places.get(tuple(tokens[-length:])) if len(tokens) >= length else None
            if place is not None:
                count = min(count, self._agreement(place, count + 1) - 1)
                found = tokens[place : place + count]
                period = len(tokens) - place
                assert period > 0, "an indexed place lies before the end of the list"
                while len(found) < count:
                    found.append(found[len(found) - period])
                return found
        return []

    def _agreement(self, place: int, limit: int) -> int:
        """How many tokens before that place are the newest ones. Of what agrees shortly, little will go on to agree: one
        token less is guessed than has agreed."""
        tokens, length = self.tokens, 2
        while length < limit and length < place and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        return length
