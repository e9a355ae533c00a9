"""Deferred sampling of a step: its grammars and reasoning budgets have to see its rows' last tokens on the host first.

The device has these tokens and computes the logits meanwhile. Other threads compute the masks, and the runner waits for
them as long as the device computes. A slot whose mask is not ready by then does not sample, and its logits are computed
again in a later step. The other slots do not wait for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onward.worker.logits_processors.constraints import active_grammar
from onward.worker.logits_processors.slot_grammar import SlotGrammar
from onward.worker.slot_state import SlotState
from onward.worker.token_span import TokenSpan

_LOOK_AGAIN_S = 0.0002


@dataclass(slots=True)
class MaskDeferredSampling:
    """The sampling of one launched step that waits for token bitmasks."""

    constrained: Sequence[tuple[int, TokenSpan[SlotState]]]
    """Row and span of each constrained slot."""
    sampling: Sequence[TokenSpan[SlotState]]
    """All spans of the step that sample, constrained or not."""
    is_computed: Callable[[], bool]
    """Returns whether the step's logits are computed."""

    def __post_init__(self) -> None:
        assert self.constrained, "only a step with constrained rows defers its sampling"
        assert len(self.constrained) <= len(self.sampling), "every constrained row samples"

    @property
    def is_ready(self) -> bool:
        return all(can_sample(span) for _, span in self.constrained)

    def wait(self) -> None:
        """Waits until all masks are ready or the device has computed the logits, whichever is first. If masks are
        still pending then, calls `wait_for_masks`. A slot whose mask is not ready after that does not sample in this
        step."""
        spans = [span for _, span in self.constrained]
        while (pending := _pending_grammars(spans)) and not self.is_computed():
            SlotGrammar.wait_for_one(pending, _LOOK_AGAIN_S)
        if pending:
            wait_for_masks(self.sampling)


def wait_for_masks(spans: Sequence[TokenSpan[SlotState]]) -> None:
    """Waits for masks of a step whose logits are computed. If none of its spans could sample, waits a short time for
    one mask. Waits without limit for the mask of a slot that pushes, because blocks that go to a peer are not computed
    twice."""
    for span in spans:
        if span.slot_state.push is not None and (grammar := _pending_grammar(span)) is not None:
            grammar.wait()
    if any(span.position < span.slot_state.constrained_from or can_sample(span) for span in spans):
        return
    if pending := _pending_grammars(spans):
        SlotGrammar.wait_for_one(pending)


def _pending_grammars(spans: Sequence[TokenSpan[SlotState]]) -> list[SlotGrammar]:
    return [grammar for span in spans if (grammar := _pending_grammar(span)) is not None]


def _pending_grammar(span: TokenSpan[SlotState]) -> SlotGrammar | None:
    """Returns the grammar of the span if its mask is being computed, else None. No mask is computed while the slot's
    last token is still on the device."""
    grammar = active_grammar(span.slot_state) if has_all_tokens(span) else None
    return None if grammar is None or grammar.is_ready else grammar


def has_all_tokens(span: TokenSpan[SlotState]) -> bool:
    """Returns whether the slot's constraints have seen every token before the one to be sampled."""
    return span.slot_state.num_tokens_on_host == span.end and not span.slot_state.has_failed


def can_sample(span: TokenSpan[SlotState]) -> bool:
    if not has_all_tokens(span):
        return False
    grammar = active_grammar(span.slot_state)
    return grammar is None or grammar.is_ready
