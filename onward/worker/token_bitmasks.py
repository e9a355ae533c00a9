"""The tokens that grammars and reasoning budgets allow in one step: one bit for each token. The device applies the bits
to the logits.
"""

from collections.abc import Sequence, Set

import numpy as np

from onward.worker.logits_processors import constraints
from onward.worker.logits_processors.slot_grammar import SlotGrammarError
from onward.worker.slot_state import SlotState


class TokenBitmasks:
    """The token bitmasks of a step's constrained rows. Constraints are evaluated on creation; after that the device
    only copies the bits, for all rows at once."""

    def __init__(
        self, constrained: Sequence[tuple[int, SlotState]], bits: np.ndarray, rows_without_mask: Set[int] = frozenset()
    ) -> None:
        """`constrained` has sampled rows with their slots, whose masks are ready. `bits` has room for the mask of each
        row."""
        self.faults: dict[int, str] = {}
        """By row: why its grammar has failed."""
        self.rows: list[int] = []
        self.forced: list[tuple[int, int]] = []
        """(row, the only token that may come)."""
        self.bits = bits
        for row, slot in constrained:
            self._fill_row(row, slot, bits[len(self.rows)])
        self.bits = bits[: len(self.rows)]
        self.discarded = rows_without_mask | self.faults.keys()
        """Rows whose sampled token is discarded."""

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
