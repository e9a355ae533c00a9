"""The draw of a step whose grammars and budgets have to see its rows' last tokens on the host first.

Its logits are computed meanwhile: the device knows the tokens. Masks are made by other threads, and are waited for as long
as the device computes. Who has none by then does not draw, and needs its logits again in a later step; nobody else waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from onward.worker.answer_rules import grammar_in_force
from onward.worker.cuda.marks import Mark
from onward.worker.cuda.packing import Span
from onward.worker.cuda.slots import Slot
from onward.worker.slot_grammar import SlotGrammar

_LOOK_AGAIN_S = 0.0002


@dataclass(slots=True)
class Undrawn:
    logits: torch.Tensor
    """Of all rows that sample."""
    with_cuts: bool
    ruled: Sequence[tuple[int, Span[Slot]]]
    """Row and span of those under rules."""
    forward: Mark
    """Behind the logits."""

    @property
    def is_ready(self) -> bool:
        return all(can_draw(span) for _, span in self.ruled)

    def wait(self) -> None:
        """While the device computes; then, if nobody could draw, a little longer for one of them."""
        while (late := self._late()) and not self.forward.is_passed():
            SlotGrammar.wait_for_one(late, _LOOK_AGAIN_S)
        if late and not any(can_draw(span) for _, span in self.ruled) and len(self.ruled) == len(self.logits):
            SlotGrammar.wait_for_one(late)

    def _late(self) -> list[SlotGrammar]:
        """Whose mask is being made. That of a slot whose last token is still on the device is not."""
        known = [span.owner for _, span in self.ruled if has_seen_all(span)]
        needed = [grammar for owner in known if (grammar := grammar_in_force(owner)) is not None]
        return [grammar for grammar in needed if not grammar.is_ready]


def has_seen_all(span: Span[Slot]) -> bool:
    """Whether its rules know every token before the one that is drawn."""
    return span.owner.num_read == span.end and not span.owner.has_failed


def can_draw(span: Span[Slot]) -> bool:
    if not has_seen_all(span):
        return False
    grammar = grammar_in_force(span.owner)
    return grammar is None or grammar.is_ready
