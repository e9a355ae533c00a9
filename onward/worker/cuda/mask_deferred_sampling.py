"""The draw of a step whose grammars and budgets have to see its rows' last tokens on the host first.

Its logits are computed meanwhile: the device knows the tokens. Masks are made by other threads, and are waited for as long
as the device computes. Who has none by then does not draw, and needs its logits again in a later step; nobody else waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from onward.worker.cuda.device_events import DeviceEvent
from onward.worker.cuda.device_slots import DeviceSlotState
from onward.worker.cuda.step_packing import DeviceTokenSpan
from onward.worker.logits_processors.constraints import active_grammar
from onward.worker.logits_processors.slot_grammar import SlotGrammar

_LOOK_AGAIN_S = 0.0002


@dataclass(slots=True)
class MaskDeferredSampling:
    logits: torch.Tensor
    """Of all rows that sample."""
    with_cuts: bool
    constrained: Sequence[tuple[int, DeviceTokenSpan[DeviceSlotState]]]
    """Row and span of those under rules."""
    forward_event: DeviceEvent
    """Behind the logits."""

    def __post_init__(self) -> None:
        assert self.constrained, "only a step with constrained rows defers its sampling"
        assert len(self.constrained) <= len(self.logits), "every constrained row has logits"

    @property
    def is_ready(self) -> bool:
        return all(can_sample(span) for _, span in self.constrained)

    def wait(self) -> None:
        """While the device computes; then, if nobody could draw, a little longer for one of them."""
        while (pending := self._pending_grammars()) and not self.forward_event.is_done():
            SlotGrammar.wait_for_one(pending, _LOOK_AGAIN_S)
        if (
            pending
            and not any(can_sample(span) for _, span in self.constrained)
            and len(self.constrained) == len(self.logits)
        ):
            SlotGrammar.wait_for_one(pending)

    def _pending_grammars(self) -> list[SlotGrammar]:
        """Whose mask is being made. That of a slot whose last token is still on the device is not."""
        slots = [span.slot_state for _, span in self.constrained if has_all_tokens(span)]
        needed = [grammar for slot in slots if (grammar := active_grammar(slot)) is not None]
        return [grammar for grammar in needed if not grammar.is_ready]


def has_all_tokens(span: DeviceTokenSpan[DeviceSlotState]) -> bool:
    """Whether its rules know every token before the one that is drawn."""
    return span.slot_state.num_tokens_on_host == span.end and not span.slot_state.has_failed


def can_sample(span: DeviceTokenSpan[DeviceSlotState]) -> bool:
    if not has_all_tokens(span):
        return False
    grammar = active_grammar(span.slot_state)
    return grammar is None or grammar.is_ready
