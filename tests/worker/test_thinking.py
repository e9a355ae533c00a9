"""A runner's slots that think before they answer: budgets that are kept, and grammars that wait for the answer."""

import pytest

from onward.proto.reasoning_params import ReasoningParams
from onward.proto.step import SlotFailed
from onward.sim.oracle import STRUCTURES
from tests.worker import spoken
from tests.worker.spoken import END, PROMPT, AtOnce, resumed, sampling, text_of

BEGIN, STOP, LEAD = 40, 41, 10
OPEN = ReasoningParams((BEGIN,), (STOP,), starts_in_reasoning=True, budget=4, forced_prefix_token_ids=(LEAD,))
CLOSED = ReasoningParams((BEGIN,), (STOP,), budget=4, forced_prefix_token_ids=(LEAD,))
OBJECT = STRUCTURES["object"]
NEVER_BY_ITSELF = {"bad_words": ((STOP,),)}


def test_thinking_ends_within_its_budget_whatever_else_is_forbidden() -> None:
    tokens, _ = resumed(spoken.driver(AtOnce()), sampling(None, reasoning=OPEN, **NEVER_BY_ITSELF))
    assert tokens[4:6] == [LEAD, STOP]
    assert STOP not in tokens[:5]


def test_a_budget_of_nothing_leaves_nothing() -> None:
    rule = ReasoningParams((BEGIN,), (STOP,), starts_in_reasoning=True, budget=0)
    tokens, _ = resumed(spoken.driver(AtOnce()), sampling(None, reasoning=rule))
    assert tokens[0] == STOP


STOPS_AT_TAG = {"end_token_ids": (END, STOP), "bad_words": ((STOP,),)}


@pytest.mark.parametrize("min_tokens", [6, 40])
def test_an_end_tag_that_min_tokens_forbids_is_a_fault_of_the_request_and_not_of_the_model(min_tokens: int) -> None:
    driver = spoken.driver(AtOnce())
    made = sampling(None, reasoning=OPEN, min_tokens=min_tokens, **STOPS_AT_TAG)
    [event] = driver.step(assign=[driver.assign(0, PROMPT, room=64, sampling=made)])
    assert isinstance(event, SlotFailed) and event.code == "invalid_request"
    assert "min_tokens" in event.message and "41" in event.message


@pytest.mark.parametrize("min_tokens", [0, 4, 5])
def test_an_end_tag_that_also_ends_the_output_is_the_last_token(min_tokens: int) -> None:
    tokens, _ = resumed(spoken.driver(AtOnce()), sampling(None, reasoning=OPEN, min_tokens=min_tokens, **STOPS_AT_TAG))
    assert tokens[4:] == [LEAD, STOP]


@pytest.mark.parametrize("seed", range(4))
def test_a_grammar_is_about_what_comes_behind_the_thinking(seed: int) -> None:
    made = sampling(OBJECT.grammar, reasoning=OPEN, seed=seed, **NEVER_BY_ITSELF)
    tokens, is_done = resumed(spoken.driver(AtOnce()), made)
    assert is_done
    assert tokens[4:6] == [LEAD, STOP]
    assert OBJECT.is_satisfied_by(text_of(tokens[6:]))


def test_no_output_ends_inside_its_thinking_if_a_grammar_waits() -> None:
    eager = {"logit_bias": ((END, 100.0),)} | NEVER_BY_ITSELF
    tokens, _ = resumed(spoken.driver(AtOnce()), sampling(OBJECT.grammar, reasoning=OPEN, **eager))
    assert END not in tokens[:6]
    tokens, _ = resumed(spoken.driver(AtOnce()), sampling(None, reasoning=OPEN, **eager))
    assert tokens == [END]


def test_thinking_may_come_first_where_a_grammar_is_asked_for_and_not_later() -> None:
    eager = {"logit_bias": ((BEGIN, 100.0),)} | NEVER_BY_ITSELF
    tokens, is_done = resumed(spoken.driver(AtOnce()), sampling(OBJECT.grammar, reasoning=CLOSED, **eager))
    assert (tokens[0], is_done) == (BEGIN, True)
    end = tokens.index(STOP)
    assert OBJECT.is_satisfied_by(text_of(tokens[end + 1 :]))


@pytest.mark.parametrize("rule", [OPEN, CLOSED], ids=["opened by the prompt", "opened by the model"])
def test_an_output_that_is_gone_on_with_anywhere_is_the_same(rule: ReasoningParams) -> None:
    driver = spoken.driver(AtOnce())
    made = sampling(OBJECT.grammar, reasoning=rule, logit_bias=((BEGIN, 20.0),), **NEVER_BY_ITSELF)
    whole = resumed(driver, made)
    for position in range(len(whole[0])):
        assert resumed(driver, made, whole[0][:position]) == whole
