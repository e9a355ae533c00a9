"""A runner's slots under grammars: what they draw, when they end, and who waits for whom."""

import re

import numpy as np
import pytest

from onward.proto.sampling_params import Grammar
from onward.proto.step import RunSlot, SlotAdvanced, SlotFailed, SlotTokens
from onward.sim.output_structures import STRUCTURES
from tests.worker import small_int8, spoken
from tests.worker.spoken import END, PROMPT, AtOnce, Held, InThreads, resumed, sampling, text_of

OBJECT = STRUCTURES["object"]
OPEN = STRUCTURES["open-regex"]


@pytest.mark.parametrize("name", STRUCTURES)
def test_an_output_satisfies_its_grammar_and_says_when_it_is_done(name: str) -> None:
    driver, structure = spoken.driver(AtOnce()), STRUCTURES[name]
    for seed in range(5):
        tokens, is_done = resumed(driver, sampling(structure.grammar, seed=seed))
        if is_done or tokens[-1] == END:
            assert structure.is_satisfied_by(text_of(tokens))
        assert is_done == (tokens[-1] != END and len(tokens) < 60)


def test_an_end_token_is_sampled_only_where_the_output_is_complete() -> None:
    driver = spoken.driver(AtOnce())
    ends = [resumed(driver, sampling(OPEN.grammar, seed=seed, logit_bias=((END, 100.0),)))[0] for seed in range(10)]
    assert all(tokens[-1] == END and len(tokens) > 1 for tokens in ends)
    assert all(OPEN.is_satisfied_by(text_of(tokens)) for tokens in ends)


def test_min_tokens_delays_an_end_that_need_not_be_and_no_end_that_must() -> None:
    driver, eager = spoken.driver(AtOnce()), {"logit_bias": ((END, 100.0),), "min_tokens": 9}
    tokens, _ = resumed(driver, sampling(OPEN.grammar, **eager))
    assert len(tokens) >= 10
    tokens, is_done = resumed(driver, sampling(STRUCTURES["one"].grammar, **eager))
    assert (len(tokens), is_done) == (1, True)


def test_a_stop_token_that_is_text_elsewhere_ends_the_output_and_is_no_part_of_the_grammar() -> None:
    letter = next(i for i, piece in enumerate(spoken.vocabulary.token_bytes()) if piece == b"a")
    driver = spoken.driver(AtOnce())
    for seed in range(5):
        tokens, is_done = resumed(
            driver,
            sampling(Grammar("regex", "[a-f]{4}b*"), seed=seed, end_token_ids=(letter,), logit_bias=((letter, 9.0),)),
        )
        assert letter not in tokens[:-1]
        ended = tokens[:-1] if tokens[-1] == letter else tokens
        if is_done or tokens[-1] == letter:
            assert re.fullmatch("[a-f]{4}b*", text_of(ended))


def test_a_slot_whose_mask_is_not_ready_skips_the_step_and_nobody_waits_for_it() -> None:
    expected, _ = resumed(spoken.driver(AtOnce()), sampling(OBJECT.grammar))
    held = Held()
    driver = spoken.driver(held)
    slow = driver.assign(0, PROMPT, room=64, sampling=sampling(OBJECT.grammar))
    other = driver.assign(1, PROMPT, room=64, sampling=sampling(None))
    driver.step(assign=[slow, other])
    tokens: list[int] = []
    left = len(PROMPT)
    for step in range(4 * len(expected)):
        if step % 3 == 2:
            held.release()
        mine, theirs = driver.step(
            run=[RunSlot(0, slow.slot_epoch, left), RunSlot(1, other.slot_epoch, len(PROMPT) if step == 0 else 1)]
        )
        left = 1
        assert isinstance(theirs, SlotTokens)
        if step % 3 == 2:
            assert isinstance(mine, SlotTokens)
            assert mine.position == len(tokens)
            tokens += mine.token_ids
            if mine.grammar_done:
                break
        else:
            # What it has computed, but for its last token: that one's logits are wanted again.
            assert mine == SlotAdvanced(0, slow.slot_epoch, len(PROMPT) + len(tokens) - 1)
    assert tokens == expected


def test_threads_that_make_masks_change_nothing() -> None:
    expected = [resumed(spoken.driver(AtOnce()), sampling(OBJECT.grammar, seed=seed)) for seed in range(4)]
    driver = spoken.driver(InThreads())
    assert [resumed(driver, sampling(OBJECT.grammar, seed=seed)) for seed in range(4)] == expected


def test_a_grammar_that_fails_fails_its_request_and_nobody_else() -> None:
    driver = spoken.driver(AtOnce())
    bad = driver.assign(0, PROMPT, room=8, sampling=sampling(Grammar("regex", "(")))
    lost = driver.assign(1, [*PROMPT, 5], room=8, sampling=sampling(Grammar("regex", "xyz")), num_prompt=len(PROMPT))
    good = driver.assign(2, PROMPT, room=8, sampling=sampling(OBJECT.grammar))
    driver.step(assign=[bad, lost, good])
    events = driver.step(
        run=[RunSlot(0, bad.slot_epoch, 7), RunSlot(1, lost.slot_epoch, 8), RunSlot(2, good.slot_epoch, 7)]
    )
    assert [type(event) for event in events] == [SlotFailed, SlotFailed, SlotTokens]
    assert "unclosed group" in events[0].message  # type: ignore[union-attr]
    assert "position 0" in events[1].message  # type: ignore[union-attr]


def test_bad_words_that_leave_nothing_are_told() -> None:
    driver = spoken.driver(AtOnce())
    words = tuple((token_id,) for token_id in range(spoken.CONFIG.vocab_size))
    request = driver.assign(0, PROMPT, room=8, sampling=sampling(OBJECT.grammar, bad_words=words))
    driver.step(assign=[request])
    [event] = driver.step(run=[RunSlot(0, request.slot_epoch, 7)])
    assert isinstance(event, SlotFailed)
    assert (event.code, "no token to draw" in event.message) == ("grammar_failed", True)


def test_a_model_without_a_tokenizer_has_no_grammars() -> None:
    driver = small_int8.driver()
    [event] = driver.step(assign=[driver.assign(0, PROMPT, sampling=sampling(OBJECT.grammar))])
    assert isinstance(event, SlotFailed)
    assert event.code == "invalid_request"


def test_logprobs_are_the_model_s_own_whatever_the_grammar_allows() -> None:
    driver = spoken.driver(AtOnce())
    tops = []
    for grammar in (OBJECT.grammar, None):
        request = driver.assign(0, PROMPT, room=8, sampling=sampling(grammar, logprobs=5))
        driver.step(assign=[request])
        [event] = driver.step(run=[RunSlot(0, request.slot_epoch, 7)])
        assert isinstance(event, SlotTokens)
        assert event.logprobs is not None
        tops.append(event.logprobs[0].top)
        driver.give_back(request.block_ids)
    assert np.allclose([p for _, p in tops[0]], [p for _, p in tops[1]])
    assert [t for t, _ in tops[0]] == [t for t, _ in tops[1]]


def test_a_grammar_done_by_the_prompt_s_first_token_is_said_in_that_step() -> None:
    driver = spoken.driver(AtOnce())
    request = driver.assign(0, PROMPT, room=8, sampling=sampling(STRUCTURES["one"].grammar))
    driver.step(assign=[request])
    [event] = driver.step(run=[RunSlot(0, request.slot_epoch, 7)])
    assert isinstance(event, SlotTokens)
    assert event.grammar_done
    assert text_of(event.token_ids) in ("a", "b", "c")
