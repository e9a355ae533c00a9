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
    ops: Ops, logits: torch.Tensor, slots: SlotTensors, rows: RowTensors, draws: Sequence[DeviceSamplingRow],
    masks: StepBitmasks | None, *, with_cuts: bool,
) -> PendingLogprobs | None:  # fmt: skip
    """Draws for all rows; `draws` are those with rules or wishes of their own. Returns the logprobs of those that asked for
    them, in their order."""
    wide = logits.float()  # a copy, unless they are float32 already, which the next step overwrites anyway
    asking = [draw for draw in draws if draw.sampling.logprobs is not None]
    asked = to_device([draw.row for draw in asking], torch.int64, logits.device) if asking else None
    raw = None if asked is None else wide[asked]
    _apply_rules(ops, wide, slots, draws, masks)
    ops.sample(wide, rows, with_cuts=with_cuts)
    for draw in draws:
        if draw.logits_processor is not None and not draw.is_discarded:
            draw.logits_processor.advance(rows.sampled[0, draw.row])
    if raw is None:
        return None
    return PendingLogprobs(raw, rows.sampled[0][asked], [draw.sampling.logprobs or 0 for draw in asking], ops)


def _apply_rules(
    ops: Ops, wide: torch.Tensor, slots: SlotTensors, draws: Sequence[DeviceSamplingRow], masks: StepBitmasks | None
) -> None:
    """In the order of the CPU's: penalties and words, what the answer must look like, ends."""
    for draw in draws:
        if draw.logits_processor is not None:
            draw.logits_processor.apply(wide[draw.row], slots.tokens[draw.slot], draw.num_known, draw.num_output)
    if masks is not None:
        masks.apply(wide, ops)
    for draw in draws:
        if draw.forbids_ends:
            ends = [token for token in draw.sampling.end_token_ids if 0 <= token < wide.shape[1]]
            wide[draw.row].index_fill_(0, to_device(ends, torch.int64, wide.device), -torch.inf)
