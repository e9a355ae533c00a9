"""Checks that every runner makes before a slot computes, on any device. An error concerns one request only."""

from collections.abc import Sequence
from typing import Protocol

from onward.proto.sampling_params import SamplingParams
from onward.proto.step import AssignSlot


class SlotError(Exception):
    """One request cannot go on."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class LogprobSlot(Protocol):
    num_prompt: int
    num_tokens: int
    sampling: SamplingParams
    score_from: int | None


def check_assignment(assign: AssignSlot, max_model_len: int, vocab_size: int) -> None:
    count = len(assign.token_ids)
    if not 0 < count <= max_model_len:
        raise SlotError("invalid_request", f"{count} tokens do not fit into a context of {max_model_len}")
    low, high = min(assign.token_ids), max(assign.token_ids)
    if low < 0 or high >= vocab_size:
        raise SlotError("invalid_request", f"token {low if low < 0 else high} is not in the model's vocabulary")
    if not 0 <= assign.num_computed < count:
        raise SlotError("internal_error", f"{assign.num_computed} of {count} tokens cannot be computed already")


def check_blocks(block_ids: Sequence[int], num_blocks: int) -> None:
    if block_ids and not 0 <= min(block_ids) <= max(block_ids) < num_blocks:
        raise SlotError("internal_error", f"the plan names a block outside the pool of {num_blocks}")


def check_slot_blocks(end: int, num_slot_blocks: int, block_size: int, max_model_len: int) -> None:
    num_slot_tokens = num_slot_blocks * block_size
    if end > min(num_slot_tokens, max_model_len):
        raise SlotError(
            "internal_error", f"token {end} is beyond the {num_slot_tokens} tokens that the slot has blocks for"
        )


def logprob_positions(slot: LogprobSlot, start: int, end: int) -> range | None:
    """Returns the rows of [start, end) whose next tokens' logprobs are requested.

    tokens   |---- prompt ----|---- generated ----|              row i has the logits of token i + 1
             0           num_prompt  score_from   num_tokens
    """
    assert start < end, "a span has at least one token"
    if slot.score_from is not None:
        rows = range(max(start, slot.score_from - 1), min(end, slot.num_tokens - 1))
        return rows if rows else None
    if slot.sampling.prompt_logprobs is not None and slot.num_tokens == slot.num_prompt:
        return range(start, min(end, slot.num_prompt - 1))
    return None
