"""The model runner's record of a step in flight, and the events it becomes once the device has computed it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from onward.proto.step import (
    GRAMMAR_FAILED,
    NO_TOKEN_ALLOWED,
    SlotAdvanced,
    SlotEmbedding,
    SlotEvent,
    SlotFailed,
    SlotTokens,
    StepPlan,
    TokenLogprobs,
)
from onward.worker.device import LaunchHandle, StepOutput
from onward.worker.draft_verifier import DraftVerifier
from onward.worker.logits_processors.slot_grammar import SlotGrammarError
from onward.worker.mask_deferred_sampling import MaskDeferredSampling
from onward.worker.slot_state import SlotState
from onward.worker.token_span import TokenSpan

_NO_NUMBER = "the model's output for this request is not a number"
_NO_TOKEN = "grammar, allowed_token_ids, bad_words, logit_bias and min_tokens together leave no token to sample"

Free = Callable[[TokenSpan[SlotState]], None]
GivenLogprobs = dict[int, list[TokenLogprobs]]


@dataclass(slots=True)
class LaunchedStep:
    plan: StepPlan
    begun_s: float
    events: list[SlotEvent]
    """Events that are known at the launch."""
    spans: Sequence[TokenSpan[SlotState]]
    """In the plan's order."""
    handle: LaunchHandle
    mask_deferred_sampling: MaskDeferredSampling | None = None
    """Set while the step's sampling is deferred."""
    rows_without_mask: set[int] = field(default_factory=set)
    """Rows that could not sample because their mask was not ready."""
    faults: dict[int, str] = field(default_factory=dict)
    """By row: why its grammar has failed."""
    verifiers: list[DraftVerifier] | None = None
    """For a step with drafts: one for each span that samples."""


def build_events(step: LaunchedStep, output: StepOutput, free: Free) -> list[SlotEvent]:
    """Returns the events of a step that is computed and sampled. Calls `free` for each span whose request has
    failed."""
    assert step.mask_deferred_sampling is None, "a step is sampled before its events are built"
    handle = step.handle
    reported = iter(output.given_logprobs)
    given = {span.slot: [next(reported) for _ in span.logprob_positions or ()] for span in handle.reporting}
    events = [_unfinished(span, output, given, free) for span in handle.not_sampling if not span.slot_state.has_failed]
    if step.verifiers is not None:
        return events + [_verified(step, row, given, free) for row in range(len(handle.sampling))]
    is_plain = not (output.logprobs or given or step.rows_without_mask or step.faults)
    for row, (span, token, is_valid) in enumerate(
        zip(handle.sampling, output.token_ids, output.are_valid, strict=True)
    ):
        slot = span.slot_state
        if slot.has_failed:
            continue
        if is_plain and is_valid and not slot.is_constrained:
            events.append(SlotTokens(span.slot, slot.slot_epoch, span.position, span.end, [token]))
        else:
            logprobs = output.logprobs.get(row)
            events.append(_sampled(step, row, token if is_valid else None, logprobs, given, free))
    return events


def _unfinished(span: TokenSpan[SlotState], output: StepOutput, given: GivenLogprobs, free: Free) -> SlotEvent:
    vector = output.vectors.get(span.slot) if span.is_pooled else None
    if vector is None:
        return SlotAdvanced(span.slot, span.slot_state.slot_epoch, span.end, given.get(span.slot))
    if not np.isfinite(np.frombuffer(vector, "<f4")).all():
        return _failed(span, "invalid_logits", _NO_NUMBER, free)
    return SlotEmbedding(span.slot, span.slot_state.slot_epoch, span.end, vector)


def _sampled(
    step: LaunchedStep, row: int, token: int | None, logprobs: TokenLogprobs | None, given: GivenLogprobs, free: Free
) -> SlotEvent:
    span = step.handle.sampling[row]
    slot, scores = span.slot_state, given.get(span.slot)
    if row in step.rows_without_mask:
        return SlotAdvanced(span.slot, slot.slot_epoch, span.end - 1, scores)
    if row in step.faults:
        return _grammar_failed(span, step.faults[row], free)
    if token is None:
        return _no_token(span, free)
    try:
        is_done = slot.is_constrained and slot.accept_token(token)
    except SlotGrammarError as fault:
        return _grammar_failed(span, str(fault), free)
    logprob_list = None if logprobs is None else [logprobs]
    return SlotTokens(span.slot, slot.slot_epoch, span.position, span.end, [token], logprob_list, scores, is_done)


def _verified(step: LaunchedStep, row: int, given: GivenLogprobs, free: Free) -> SlotEvent:
    assert step.verifiers is not None, "a step with drafts has verifiers"
    span, verifier = step.handle.sampling[row], step.verifiers[row]
    slot, scores = span.slot_state, given.get(span.slot)
    if row in step.rows_without_mask:
        return SlotAdvanced(span.slot, slot.slot_epoch, span.end - 1, scores)
    if verifier.error is not None:
        return _grammar_failed(span, verifier.error, free)
    if not verifier.token_ids:
        return _no_token(span, free)
    logprobs = None if slot.sampling.logprobs is None else verifier.logprobs
    assert logprobs is None or len(logprobs) == len(verifier.token_ids), "every sampled token has its logprobs"
    num_computed = span.end + len(verifier.token_ids) - 1
    return SlotTokens(
        span.slot, slot.slot_epoch, span.position, num_computed, verifier.token_ids, logprobs, scores,
        verifier.grammar_done, len(span.drafts),
    )  # fmt: skip


def _no_token(span: TokenSpan[SlotState], free: Free) -> SlotFailed:
    if span.slot_state.grammar is not None:
        return _grammar_failed(span, _NO_TOKEN, free)
    sampling = span.slot_state.sampling
    if sampling.allowed_token_ids or sampling.bad_words:
        return _failed(span, NO_TOKEN_ALLOWED, _NO_TOKEN.removeprefix("grammar, "), free)
    return _failed(span, "invalid_logits", _NO_NUMBER, free)


def _grammar_failed(span: TokenSpan[SlotState], message: str, free: Free) -> SlotFailed:
    return _failed(span, GRAMMAR_FAILED, f"the request's grammar failed: {message}", free)


def _failed(span: TokenSpan[SlotState], code: str, message: str, free: Free) -> SlotFailed:
    assert not span.slot_state.has_failed, "a request fails once"
    span.slot_state.has_failed = True
    free(span)
    return SlotFailed(span.slot, span.slot_state.slot_epoch, code, message)
