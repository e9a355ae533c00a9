"""Samples tokens on the device, for rows that need more than the sampling kernel.

Plain rows need two launches for all of them together. A step takes the slower path of this module if it has rows with
biases, bad words, penalties, grammars, reasoning budgets, `min_tokens` or logprobs. Both paths give the same tokens.
"""

from collections.abc import Sequence

import torch

from onward.kernels.ops import Ops, RowTensors, SlotTensors
from onward.worker.cuda.device_logprobs import PendingLogprobs
from onward.worker.cuda.staging_buffer import to_device
from onward.worker.slot_state import SlotState
from onward.worker.token_bitmasks import TokenBitmasks
from onward.worker.token_span import TokenSpan

_Rows = Sequence[tuple[int, TokenSpan[SlotState]]]


def sample_with_processors(
    ops: Ops, logits: torch.Tensor, slots: SlotTensors, rows: RowTensors, spans: Sequence[TokenSpan[SlotState]],
    masks: TokenBitmasks | None, bits: torch.Tensor | None, *, with_cuts: bool,
) -> PendingLogprobs | None:  # fmt: skip
    """Samples a row for each span. `bits` are the bits of the masks, in pinned memory. Returns the logprobs of the rows
    that request them, in their order."""
    logits_f32 = logits.float()  # a copy, unless they are float32 already; the next step overwrites them anyway
    careful = [(row, span) for row, span in enumerate(spans) if span.position < span.slot_state.processed_until]
    asking = [(row, num) for row, span in careful if (num := span.slot_state.sampling.logprobs) is not None]
    asking_rows = to_device([row for row, _ in asking], torch.int64, logits.device) if asking else None
    raw_logits = None if asking_rows is None else logits_f32[asking_rows]
    _apply_processors(logits_f32, slots, careful)
    if masks is not None and bits is not None:
        _apply_masks(ops, logits_f32, masks, bits)
    _forbid_ends(logits_f32, careful)
    ops.sample(logits_f32, rows, with_cuts=with_cuts)
    for row, span in careful:
        if span.slot_state.logits_processor is not None and (masks is None or row not in masks.discarded):
            span.slot_state.logits_processor.advance(rows.sampled[0, row])
    if raw_logits is None:
        return None
    return PendingLogprobs(raw_logits, rows.sampled[0][asking_rows], [num for _, num in asking], ops)


def _apply_processors(logits_f32: torch.Tensor, slots: SlotTensors, careful: _Rows) -> None:
    """Applies penalties and bad words. The order is the same as on the CPU: these first, then masks, then end
    tokens."""
    for row, span in careful:
        if span.slot_state.logits_processor is not None:
            span.slot_state.logits_processor.apply(logits_f32[row], slots.tokens[span.slot], span.end, span.position)


def _apply_masks(ops: Ops, logits_f32: torch.Tensor, masks: TokenBitmasks, bits: torch.Tensor) -> None:
    if not masks.rows:
        return
    on_device = bits[: len(masks.rows)].to(logits_f32.device, non_blocking=True)
    ops.apply_token_bitmask(logits_f32, to_device(masks.rows, torch.int64, logits_f32.device), on_device)
    for row, token in masks.forced:
        logits_f32[row].fill_(-torch.inf)
        logits_f32[row, token] = 0.0


def _forbid_ends(logits_f32: torch.Tensor, careful: _Rows) -> None:
    for row, span in careful:
        sampling = span.slot_state.sampling
        if span.position < sampling.min_tokens and sampling.end_token_ids:
            end_token_ids = [token for token in sampling.end_token_ids if 0 <= token < logits_f32.shape[1]]
            logits_f32[row].index_fill_(0, to_device(end_token_ids, torch.int64, logits_f32.device), -torch.inf)
