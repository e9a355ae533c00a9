"""A step that was launched, and what it says once the device is done with it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

import torch

from onward.proto.step import SlotAdvanced, SlotEmbedding, SlotEvent, SlotFailed, SlotTokens, TokenLogprobs
from onward.worker.cuda.device_events import DeviceEvent
from onward.worker.cuda.device_logprobs import PendingLogprobs
from onward.worker.cuda.device_slots import DeviceSlotState
from onward.worker.cuda.mask_deferred_sampling import MaskDeferredSampling
from onward.worker.cuda.step_packing import DeviceTokenSpan, PackedStep
from onward.worker.logits_processors.slot_grammar import SlotGrammarError

_slot_of = attrgetter("slot")
_NO_NUMBER = "the model's output for this request is not a number"
_NO_TOKEN = "grammar, bad words, biases and min_tokens together leave no token to draw"


@dataclass(slots=True)
class LaunchedStep:
    number: int
    begun_s: float
    events: list[SlotEvent]
    packed: PackedStep[DeviceSlotState]
    sampled: torch.Tensor
    """In pinned memory: for each span that samples its token, and whether there is one."""
    logprobs: PendingLogprobs | None = None
    reported: PendingLogprobs | None = None
    vectors: dict[int, torch.Tensor] = field(default_factory=dict)
    """By slot, of prompts that are whole."""
    mask_deferred_sampling: MaskDeferredSampling | None = None
    """Its logits are under way; what is drawn from them is not decided yet."""
    rows_without_mask: set[int] = field(default_factory=set)
    """Rows that could not draw."""
    faults: dict[int, str] = field(default_factory=dict)
    """Rows whose grammar cannot go on."""
    done_event: DeviceEvent | None = None
    """Behind all of it."""


def build_events(step: LaunchedStep, free: Callable[[DeviceTokenSpan[DeviceSlotState]], None]) -> list[SlotEvent]:
    """`free` is called for a span whose request has failed."""
    assert step.mask_deferred_sampling is None, "a step is sampled before its events are built"
    packed = step.packed
    reported = iter(step.reported.read() if step.reported is not None else ())
    scores = {span.slot: [next(reported) for _ in span.logprob_positions or ()] for span in packed.reporting}
    events = [_unfinished(span, step, scores, free) for span in packed.not_sampling if not span.slot_state.has_failed]
    logprobs = _logprobs(step)
    is_plain = not (logprobs or scores or step.rows_without_mask or step.faults)
    token_ids, are_valid = step.sampled[:, : len(packed.sampling)].tolist()
    for row, (span, token, is_valid) in enumerate(zip(packed.sampling, token_ids, are_valid, strict=True)):
        slot = span.slot_state
        if slot.has_failed:
            continue
        if is_plain and is_valid and not slot.is_constrained:
            events.append(SlotTokens(span.slot, slot.slot_epoch, span.position, span.end, [token]))
        else:
            logprobs_and_scores = logprobs.get(span.slot), scores.get(span.slot)
            events.append(_sampled(step, row, token if is_valid else None, logprobs_and_scores, free))
    return events


def _logprobs(step: LaunchedStep) -> dict[int, TokenLogprobs]:
    if step.logprobs is None:
        return {}
    requested = [span for span in step.packed.sampling if span.slot_state.sampling.logprobs is not None]
    return dict(zip(map(_slot_of, requested), step.logprobs.read(), strict=True))


def _unfinished(
    span: DeviceTokenSpan[DeviceSlotState],
    step: LaunchedStep,
    scores: dict[int, list[TokenLogprobs]],
    free: Callable[[DeviceTokenSpan[DeviceSlotState]], None],
) -> SlotEvent:
    vector = step.vectors.get(span.slot) if span.is_pooled else None
    if vector is None:
        return SlotAdvanced(span.slot, span.slot_state.slot_epoch, span.end, scores.get(span.slot))
    if not bool(vector.isfinite().all()):
        return _failed(span, "invalid_logits", _NO_NUMBER, free)
    return SlotEmbedding(span.slot, span.slot_state.slot_epoch, span.end, vector.numpy().astype("<f4").tobytes())


def _sampled(
    step: LaunchedStep,
    row: int,
    token: int | None,
    logprobs_and_scores: tuple[TokenLogprobs | None, list[TokenLogprobs] | None],
    free: Callable[[DeviceTokenSpan[DeviceSlotState]], None],
) -> SlotEvent:
    span = step.packed.sampling[row]
    slot = span.slot_state
    logprobs, scores = logprobs_and_scores
    if row in step.rows_without_mask:
        return SlotAdvanced(span.slot, slot.slot_epoch, span.end - 1, scores)
    if row in step.faults:
        return _grammar_failed(span, step.faults[row], free)
    if token is None:
        if slot.grammar is not None:
            return _grammar_failed(span, _NO_TOKEN, free)
        return _failed(span, "invalid_logits", _NO_NUMBER, free)
    try:
        is_done = slot.is_constrained and slot.accept_token(token)
    except SlotGrammarError as fault:
        return _grammar_failed(span, str(fault), free)
    logprob_list = None if logprobs is None else [logprobs]
    return SlotTokens(span.slot, slot.slot_epoch, span.position, span.end, [token], logprob_list, scores, is_done)


def _grammar_failed(
    span: DeviceTokenSpan[DeviceSlotState], message: str, free: Callable[[DeviceTokenSpan[DeviceSlotState]], None]
) -> SlotFailed:
    return _failed(span, "grammar_failed", f"the request's grammar failed: {message}", free)


def _failed(
    span: DeviceTokenSpan[DeviceSlotState],
    code: str,
    message: str,
    free: Callable[[DeviceTokenSpan[DeviceSlotState]], None],
) -> SlotFailed:
    assert not span.slot_state.has_failed, "a request fails once"
    span.slot_state.has_failed = True
    free(span)
    return SlotFailed(span.slot, span.slot_state.slot_epoch, code, message)
