"""What grammars and budgets allow, on its way to the device: one bit for each token, made into logits there."""

from collections.abc import Sequence

import numpy as np
import torch

from onward.kernels.ops import Ops
from onward.worker.cuda.staging_buffer import to_device
from onward.worker.logits_processors import constraints
from onward.worker.logits_processors.constraints import ConstrainedSlot
from onward.worker.logits_processors.slot_grammar import SlotGrammarError


class StepBitmasks:
    """Of one step. Its rules are asked when it is made, and for all rows at once nothing but copies is left."""

    def __init__(self, constrained: Sequence[tuple[int, ConstrainedSlot]], vocab_size: int, device: str) -> None:
        """(row of the logits, its slot): slots whose masks are ready."""
        self.faults: dict[int, str] = {}
        """By row: its grammar cannot go on."""
        self._device = device
        is_pinned = device != "cpu"
        self._bits = torch.empty((len(constrained), -(-vocab_size // 8)), dtype=torch.uint8, pin_memory=is_pinned)
        self._rows: list[int] = []
        self._forced: list[tuple[int, int]] = []
        bits = self._bits.numpy()
        for row, slot in constrained:
            self._fill_row(row, slot, bits[len(self._rows)])

    def _fill_row(self, row: int, slot: ConstrainedSlot, bits: np.ndarray) -> None:
        try:
            forced = constraints.fill_token_bitmask(slot, bits)
        except SlotGrammarError as fault:
            self.faults[row] = str(fault)
            return
        self._rows.append(row)
        if forced is not None:
            self._forced.append((row, forced))

    def apply(self, logits: torch.Tensor, ops: Ops) -> None:
        """Changes its rows of the step's logits (float32) in place."""
        assert logits.dtype == torch.float32, "masks are applied to float32 logits"
        if not self._rows:
            return
        bits = self._bits[: len(self._rows)].to(self._device, non_blocking=True)
        ops.apply_token_bitmask(logits, to_device(self._rows, torch.int64, self._device), bits)
        for row, token in self._forced:
            logits[row].fill_(-torch.inf)
            logits[row, token] = 0.0
