"""Drafts under grammars and thinking: each token of a chain is drawn under the mask of its own position."""

import pytest

from onward.proto.reasoning_params import ReasoningParams
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import RunSlot, SlotTokens
from onward.sim.oracle import STRUCTURES
from onward.worker.logits_processors.mask_executor import MaskExecutor
from tests.worker import spoken
from tests.worker.speculation.proposers import Injected, knowing, right_until
from tests.worker.spoken import PROMPT, AtOnce, Held, InThreads, resumed, sampling

THINKING = ReasoningParams((40,), (41,), starts_in_reasoning=True, budget=4, forced_prefix_token_ids=(10,))
OBJECT = STRUCTURES["object"]


def check(made: SamplingParams, wrong_at: int, masks: MaskExecutor | None = None) -> None:
    expected = resumed(spoken.driver(AtOnce()), made)
    drafter = Injected(right_until({0: expected[0]}, wrong_at, spoken.CONFIG.vocab_size))
    driver = spoken.driver(drafter=drafter, masks=masks or AtOnce())
    assert resumed(driver, made, num_drafts=4) == expected
    assert drafter.num_drafted


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("wrong_at", [1, 99])
def test_an_output_under_a_grammar_is_the_same_with_drafts(name: str, wrong_at: int) -> None:
    check(sampling(STRUCTURES[name].grammar), wrong_at)


@pytest.mark.parametrize("wrong_at", [0, 2, 99])
def test_thinking_within_a_budget_is_the_same_with_drafts(wrong_at: int) -> None:
    check(sampling(OBJECT.grammar, reasoning=THINKING, bad_words=((41,),)), wrong_at)
    check(sampling(None, reasoning=THINKING, bad_words=((41,),)), wrong_at)


def test_threads_that_make_masks_change_nothing() -> None:
    for seed in range(3):
        check(sampling(OBJECT.grammar, seed=seed), 99, masks=InThreads())


def test_a_chain_stops_where_the_next_mask_is_not_ready_and_goes_on_in_the_next_step() -> None:
    expected, _ = resumed(spoken.driver(AtOnce()), sampling(OBJECT.grammar))
    held = Held()
    driver = spoken.driver(held, drafter=Injected(knowing({0: expected})))
    request = driver.assign(0, PROMPT, room=64, sampling=sampling(OBJECT.grammar))
    driver.step(assign=[request])
    tokens: list[int] = []
    while len(tokens) < len(expected):
        held.release()
        [event] = driver.step(run=[RunSlot(0, request.slot_epoch, len(PROMPT), [], 4)])
        assert isinstance(event, SlotTokens)
        assert len(event.token_ids) == 1, "no mask is made while the step runs"
        assert event.num_computed == len(PROMPT) + len(tokens)
        tokens += event.token_ids
    assert tokens == expected


def test_a_chain_ends_with_the_token_that_completes_the_grammar() -> None:
    expected, is_done = resumed(spoken.driver(AtOnce()), sampling(OBJECT.grammar))
    assert is_done
    guess = knowing({0: [*expected, 1, 2, 3, 4]})
    driver = spoken.driver(AtOnce(), drafter=Injected(guess))
    assert resumed(driver, sampling(OBJECT.grammar), num_drafts=4) == (expected, True)
