"""The two forms in which the rules of an answer are said: as a row of logits, and as bits."""

import numpy as np
import pytest

from onward.proto.sampling import Grammar
from onward.proto.thinking import ThinkingRule
from onward.sim import vocabulary
from onward.sim.structures import STRUCTURES
from onward.worker import answer_rules
from onward.worker.penalties import FORBIDDEN
from tests.worker import spoken
from tests.worker.spoken import END, Inline, resumed, sampling

BEGIN, STOP, LEAD = 40, 41, 10
RULES = {
    "none": None,
    "inside": ThinkingRule((BEGIN,), (STOP,), begins_inside=True, budget=3, lead_token_ids=(LEAD,)),
    "before": ThinkingRule((BEGIN,), (STOP,), budget=3),
    "free": ThinkingRule((BEGIN,), (STOP,), begins_inside=True),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("grammar", [STRUCTURES["object"].grammar, STRUCTURES["open-regex"].grammar, None])
@pytest.mark.parametrize("vocab_size", [len(vocabulary.pieces()), 61, 500])
def test_bits_allow_what_a_row_of_logits_leaves(name: str, grammar: Grammar | None, vocab_size: int) -> None:
    driver = spoken.driver(Inline())
    made = sampling(grammar, thinking=RULES[name], logit_bias=((BEGIN, 9.0),), end_token_ids=(END, 450))
    tokens, _ = resumed(driver, made)
    request = driver.assign(0, spoken.PROMPT, sampling=made)
    driver.step(assign=[request])
    slot = driver.runner._slots[0]
    for token in tokens[:-1]:
        row = np.linspace(-1, 1, vocab_size, dtype=np.float32)
        answer_rules.forbid(slot, row)
        bits = np.full(-(-vocab_size // 8), 0xA5, np.uint8)
        forced = answer_rules.allow(slot, bits)
        allowed = np.unpackbits(bits, bitorder="little")[:vocab_size].astype(bool)
        if forced is None:
            assert np.array_equal(allowed, row != FORBIDDEN)
        else:
            assert np.flatnonzero(row != FORBIDDEN).tolist() == [forced]
        answer_rules.advance(slot, token)
