"""Combines the constraints of a request's grammar and of its reasoning on the next token.

The grammar does not apply to reasoning. Reasoning may come first, or may begin in the prompt, and no output ends inside
it. With a grammar, reasoning begins with the first token or not at all, so that the grammar always reads the output
from some token on.
"""

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from onward.proto.sampling_params import SamplingParams
from onward.text.reasoning.reasoning_tracker import ReasoningTracker
from onward.worker.logits_processors.slot_grammar import SlotGrammar


class ConstrainedSlot(Protocol):
    sampling: SamplingParams
    grammar: SlotGrammar | None
    thinking: ReasoningTracker | None


def active_grammar(slot: ConstrainedSlot) -> SlotGrammar | None:
    """Returns the grammar for the next token; None inside reasoning or without a grammar. Where reasoning may begin,
    its first token is allowed too."""
    return None if slot.thinking is not None and slot.thinking.is_inside else slot.grammar


def fill_token_bitmask(slot: ConstrainedSlot, bits: np.ndarray) -> int | None:
    """Sets the bits (uint8, one bit for each token, lowest first) of the tokens that may come next. With a grammar, an
    end token may come only where the output is complete, whatever its text is. Returns the forced token, if there is
    one; it overrides the bits."""
    thinking, grammar = slot.thinking, active_grammar(slot)
    if grammar is not None:
        mask = grammar.mask()
        known = memoryview(mask.bits)[: len(bits)]
        bits[len(known) :] = 0
        bit_bytes = bits.data  # numpy takes ten times as long for single bytes
        bit_bytes[: len(known)] = known
        _set_bits(bit_bytes, slot.sampling.end_token_ids, mask.may_end)
        if thinking is not None:
            _set_bits(bit_bytes, thinking.begin_token_ids, thinking.is_at_start)
    else:
        bits[:] = 0xFF
        if slot.grammar is not None:
            _set_bits(bits.data, slot.sampling.end_token_ids, False)
    return None if thinking is None else thinking.forced_token_id


def _set_bits(bit_bytes: memoryview, token_ids: Iterable[int], value: bool) -> None:
    for token_id in token_ids:
        if token_id < 8 * len(bit_bytes):
            bit = 1 << (token_id & 7)
            bit_bytes[token_id >> 3] = bit_bytes[token_id >> 3] & ~bit | bit * value


def advance(slot: ConstrainedSlot, token_id: int) -> bool:
    """Advances reasoning tracker and grammar by a token. Returns whether nothing can follow."""
    grammar, thinking = active_grammar(slot), slot.thinking
    if thinking is not None:
        thinking.advance(token_id)
        if thinking.is_inside:
            return False
    if grammar is None or token_id in slot.sampling.end_token_ids:
        return False
    return grammar.advance(token_id)
