"""From logits to tokens, on the device. Most rows need two launches for all of them; rows with rules of their own (biases,
bad words, penalties, grammars, budgets, ends that are out of reach) or with logprobs take a slower way, which gives the
same tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from onward.kernels.ops import Ops, RowTensors, SlotTensors
from onward.proto.sampling_params import SamplingParams
from onward.worker.cuda.device_logprobs import PendingLogprobs
from onward.worker.cuda.device_penalties import DeviceLogitsProcessor
from onward.worker.cuda.staging_buffer import to_device
from onward.worker.cuda.step_bitmasks import StepBitmasks


@dataclass(frozen=True, slots=True)
class DeviceSamplingRow:
    """A row that samples and needs care."""

    row: int
    slot: int
    sampling: SamplingParams
    num_known: int
    num_output: int
    logits_processor: DeviceLogitsProcessor | None
    is_discarded: bool = False
    """Nothing that is drawn for it counts."""

    @property
    def forbids_ends(self) -> bool:
        return self.num_output < self.sampling.min_tokens and bool(self.sampling.end_token_ids)


def uses_filtering(sampling: SamplingParams) -> bool:
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)


def sample_with_processors(
    ops: Ops, logits: torch.Tensor, slots: SlotTensors, rows: RowTensors, sampling_rows: Sequence[DeviceSamplingRow],
    masks: StepBitmasks | None, *, with_cuts: bool,
) -> PendingLogprobs | None:  # fmt: skip
    """Samples all rows; `sampling_rows` are those with logits processors or logprobs. Returns the logprobs of the rows
    that request them, in their order."""
    logits_f32 = logits.float()  # a copy, unless they are float32 already, which the next step overwrites anyway
    logprob_rows = [sampling_row for sampling_row in sampling_rows if sampling_row.sampling.logprobs is not None]
    logprob_indices = (
        to_device([sampling_row.row for sampling_row in logprob_rows], torch.int64, logits.device)
        if logprob_rows
        else None
    )
    raw_logits = None if logprob_indices is None else logits_f32[logprob_indices]
    _apply_processors(ops, logits_f32, slots, sampling_rows, masks)
    ops.sample(logits_f32, rows, with_cuts=with_cuts)
    for sampling_row in sampling_rows:
        if sampling_row.logits_processor is not None and not sampling_row.is_discarded:
            sampling_row.logits_processor.advance(rows.sampled[0, sampling_row.row])
    if raw_logits is None:
        return None
    return PendingLogprobs(
        raw_logits,
        rows.sampled[0][logprob_indices],
        [sampling_row.sampling.logprobs or 0 for sampling_row in logprob_rows],
        ops,
    )


def _apply_processors(
    ops: Ops,
    logits_f32: torch.Tensor,
    slots: SlotTensors,
    sampling_rows: Sequence[DeviceSamplingRow],
    masks: StepBitmasks | None,
) -> None:
    """The same order as on the CPU: penalties and bad words, grammars and budgets, end tokens."""
    for sampling_row in sampling_rows:
        if sampling_row.logits_processor is not None:
            sampling_row.logits_processor.apply(
                logits_f32[sampling_row.row],
                slots.tokens[sampling_row.slot],
                sampling_row.num_known,
                sampling_row.num_output,
            )
    if masks is not None:
        masks.apply(logits_f32, ops)
    for sampling_row in sampling_rows:
        if sampling_row.forbids_ends:
            end_token_ids = [token for token in sampling_row.sampling.end_token_ids if 0 <= token < logits_f32.shape[1]]
            logits_f32[sampling_row.row].index_fill_(
                0, to_device(end_token_ids, torch.int64, logits_f32.device), -torch.inf
            )
