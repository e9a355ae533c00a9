"""What grammars and budgets allow in one step: one bit for each token, made into logits by the device."""

from collections.abc import Sequence, Set

import numpy as np

from onward.worker.logits_processors import constraints
from onward.worker.logits_processors.slot_grammar import SlotGrammarError
from onward.worker.slot_state import SlotState


class TokenBitmasks:
    """Constraints are asked when it is made; what is left for all rows at once is copies."""

    def __init__(
        self, constrained: Sequence[tuple[int, SlotState]], bits: np.ndarray, rows_without_mask: Set[int] = frozenset()
    ) -> None:
        """(row that is sampled, its slot): slots whose masks are ready. `bits`: room for one row of each of them."""
        self.faults: dict[int, str] = {}
        """By row: its grammar cannot go on."""
        self.rows: list[int] = []
        self.forced: list[tuple[int, int]] = []
        """(row, the only token that may come)."""
        self.bits = bits
        for row, slot in constrained:
            self._fill_row(row, slot, bits[len(self.rows)])
        self.bits = bits[: len(self.rows)]
        self.discarded = rows_without_mask | self.faults.keys()
        """Rows of which nothing that is drawn counts."""

    def _fill_row(self, row: int, slot: SlotState, bits: np.ndarray) -> None:
        try:
            if slot.error is not None:
                raise SlotGrammarError(slot.error)
            forced = constraints.fill_token_bitmask(slot, bits)
        except SlotGrammarError as fault:
            self.faults[row] = str(fault)
            return
        self.rows.append(row)
        if forced is not None:
            self.forced.append((row, forced))
