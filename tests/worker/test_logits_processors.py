"""The bits that say what may come next, against a plain reference."""

import random
from dataclasses import dataclass

import numpy as np
import pytest

from onward.grammar.lazy import LazyGrammarCompiler
from onward.proto.reasoning_params import ReasoningParams
from onward.proto.sampling_params import Grammar, SamplingParams
from onward.sim import vocabulary
from onward.sim.oracle import STRUCTURES
from onward.text.reasoning.reasoning_tracker import ReasoningTracker
from onward.worker.logits_processors import constraints
from onward.worker.logits_processors.slot_grammar import SlotGrammar
from tests.worker.spoken import END, AtOnce, sampling

BEGIN, STOP, LEAD = 40, 41, 10
RULES = {
    "none": None,
    "inside": ReasoningParams((BEGIN,), (STOP,), starts_in_reasoning=True, budget=3, forced_prefix_token_ids=(LEAD,)),
    "before": ReasoningParams((BEGIN,), (STOP,), budget=3),
    "free": ReasoningParams((BEGIN,), (STOP,), starts_in_reasoning=True),
}


@dataclass
class Slot:
    sampling: SamplingParams
    grammar: SlotGrammar | None
    thinking: ReasoningTracker | None


def _slot(grammar: Grammar | None, rule: ReasoningParams | None) -> Slot:
    made = None if grammar is None else SlotGrammar(grammar, [], LazyGrammarCompiler(vocabulary.grammars), AtOnce())
    return Slot(sampling(grammar, end_token_ids=(END, 450)), made, None if rule is None else ReasoningTracker(rule))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("grammar", [STRUCTURES["object"].grammar, STRUCTURES["open-regex"].grammar, None])
def test_bits_allow_what_the_rules_allow_one_by_one(name: str, grammar: Grammar | None) -> None:
    generator, size = random.Random(3), len(vocabulary.token_bytes())
    for _ in range(4):
        slot = _slot(grammar, RULES[name])
        for _ in range(12):
            assert _allowed(slot, 61).tolist() == _allowed(slot, size)[:61].tolist()
            assert len(_allowed(slot, 500)) == 500
            choices = [token for token in np.flatnonzero(_allowed(slot, size)).tolist() if token != END]
            if not choices or constraints.advance(slot, generator.choice(choices)):
                break


def _allowed(slot: Slot, vocab_size: int) -> np.ndarray:
    """By the bits, which are compared with the reference."""
    bits = np.full(-(-vocab_size // 8), 0xA5, np.uint8)
    forced = constraints.fill_token_bitmask(slot, bits)
    allowed = np.unpackbits(bits, bitorder="little")[:vocab_size].astype(bool)
    if forced is not None:
        allowed[:] = False
        allowed[forced] = True
    assert allowed.tolist() == [_may_follow(slot, token) for token in range(vocab_size)]
    return allowed


def _may_follow(slot: Slot, token: int) -> bool:
    thinking, is_end = slot.thinking, token in slot.sampling.end_token_ids
    if thinking is not None and thinking.forced_token_id is not None:
        return token == thinking.forced_token_id
    if slot.grammar is None:
        return True
    if thinking is not None and thinking.is_inside:
        return not is_end
    if thinking is not None and token in thinking.begin_token_ids:
        return thinking.is_at_start
    mask = slot.grammar.mask()
    if is_end:
        return mask.may_end
    return token < 8 * len(mask.bits) and bool(mask.bits[token >> 3] >> (token & 7) & 1)
