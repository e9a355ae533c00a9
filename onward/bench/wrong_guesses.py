"""A proposer that is never right: every guess costs its row and gives nothing, so a step's cost can be told by its rows."""

from collections.abc import Callable, Sequence

import numpy as np

from onward.worker.speculation.proposer import ComputedSpan, DraftRequest, ProposerContext


class WrongDraftProposer:
    """An opening and its proposer in one."""

    bytes_per_block = 0
    draft_cost = 0.0

    def create(self, surroundings: ProposerContext) -> "WrongDraftProposer":
        self._tokens, self._vocab_size = surroundings.tokens, surroundings.model.config.vocab_size
        return self

    def on_assign(self, slot: int, num_tokens: int, num_computed: int) -> None:
        pass

    def propose(self, wishes: Sequence[DraftRequest]) -> list[list[int]]:
        """Greedy streams soon repeat themselves; what stands far from the newest token is hardly ever next."""
        newest = [int(self._tokens[wish.slot, wish.num_tokens - 1]) for wish in wishes]
        far = [(token + self._vocab_size // 2) % self._vocab_size for token in newest]
        return [[token] * wish.num_drafts for token, wish in zip(far, wishes, strict=True)]

    def on_computed(self, spans: Sequence[ComputedSpan], outputs: Callable[[], np.ndarray]) -> None:
        pass
