"""A runner's slots under grammars, on every device: what they draw, when they end, and which slots wait."""

import re

import numpy as np
import pytest

from onward.grammar.matcher import TokenBitmask
from onward.proto.sampling_params import Grammar
from onward.proto.step import PreemptSlot, RunSlot, SlotAdvanced, SlotFailed, SlotPreempted, SlotTokens, StepPlan
from onward.sim import vocabulary
from onward.sim.oracle import STRUCTURES
from onward.worker.logits_processors.slot_grammar import SlotGrammarError
from tests.worker.cuda.small_model import SPOKEN
from tests.worker.devices import DEVICES, NewDriver, spoken
from tests.worker.devices import new_driver as driver_of
from tests.worker.speculation.proposers import Injected, knowing
from tests.worker.spoken import END, PROMPT, AtOnce, Held, InThreads, resumed, sampling, text_of

OBJECT = STRUCTURES["object"]
OPEN = STRUCTURES["open-regex"]


@pytest.fixture(params=DEVICES)
def new_driver(request: pytest.FixtureRequest) -> NewDriver:
    return driver_of(request.param)


@pytest.mark.parametrize("name", STRUCTURES)
def test_an_output_satisfies_its_grammar_and_says_when_it_is_done(new_driver: NewDriver, name: str) -> None:
    driver, structure = spoken(new_driver, AtOnce()), STRUCTURES[name]
    for seed in range(5):
        tokens, is_done = resumed(driver, sampling(structure.grammar, seed=seed))
        if is_done or tokens[-1] == END:
            assert structure.is_satisfied_by(text_of(tokens))
        assert is_done == (tokens[-1] != END and len(tokens) < 60)


def test_an_end_token_is_sampled_only_where_the_output_is_complete(new_driver: NewDriver) -> None:
    driver = spoken(new_driver, AtOnce())
    ends = [resumed(driver, sampling(OPEN.grammar, seed=seed, logit_bias=((END, 100.0),)))[0] for seed in range(10)]
    assert all(tokens[-1] == END and len(tokens) > 1 for tokens in ends)
    assert all(OPEN.is_satisfied_by(text_of(tokens)) for tokens in ends)


def test_min_tokens_delays_an_end_that_need_not_be_and_no_end_that_must(new_driver: NewDriver) -> None:
    driver, eager = spoken(new_driver, AtOnce()), {"logit_bias": ((END, 100.0),), "min_tokens": 9}
    tokens, _ = resumed(driver, sampling(OPEN.grammar, **eager))
    assert len(tokens) >= 10
    tokens, is_done = resumed(driver, sampling(STRUCTURES["one"].grammar, **eager))
    assert (len(tokens), is_done) == (1, True)


def test_a_stop_token_that_is_text_elsewhere_ends_the_output_and_is_no_part_of_the_grammar(
    new_driver: NewDriver,
) -> None:
    letter = next(i for i, piece in enumerate(vocabulary.token_bytes()) if piece == b"a")
    driver = spoken(new_driver, AtOnce())
    for seed in range(5):
        tokens, is_done = resumed(
            driver,
            sampling(Grammar("regex", "[a-f]{4}b*"), seed=seed, end_token_ids=(letter,), logit_bias=((letter, 9.0),)),
        )
        assert letter not in tokens[:-1]
        ended = tokens[:-1] if tokens[-1] == letter else tokens
        if is_done or tokens[-1] == letter:
            assert re.fullmatch("[a-f]{4}b*", text_of(ended))


def test_a_slot_whose_mask_is_not_ready_skips_the_step_and_nobody_waits_for_it(new_driver: NewDriver) -> None:
    expected, _ = resumed(spoken(new_driver, AtOnce()), sampling(OBJECT.grammar))
    held = Held()
    driver = spoken(new_driver, held)
    slow = driver.assign(0, PROMPT, room=64, sampling=sampling(OBJECT.grammar))
    other = driver.assign(1, PROMPT, room=64, sampling=sampling(None))
    driver.step(assign=[slow, other])
    tokens: list[int] = []
    left = len(PROMPT)
    for step in range(4 * len(expected)):
        if step % 3 == 2:
            held.release()
        events = driver.step(
            run=[RunSlot(0, slow.slot_epoch, left), RunSlot(1, other.slot_epoch, len(PROMPT) if step == 0 else 1)]
        )
        mine, theirs = sorted(events, key=lambda event: event.slot)
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


def test_threads_that_make_masks_change_nothing(new_driver: NewDriver) -> None:
    expected = [resumed(spoken(new_driver, AtOnce()), sampling(OBJECT.grammar, seed=seed)) for seed in range(4)]
    driver = spoken(new_driver, InThreads())
    assert [resumed(driver, sampling(OBJECT.grammar, seed=seed)) for seed in range(4)] == expected


def test_a_grammar_that_fails_fails_its_request_and_nobody_else(new_driver: NewDriver) -> None:
    driver = spoken(new_driver, AtOnce())
    bad = driver.assign(0, PROMPT, room=8, sampling=sampling(Grammar("regex", "(")))
    lost = driver.assign(1, [*PROMPT, 5], room=8, sampling=sampling(Grammar("regex", "xyz")), num_prompt=len(PROMPT))
    good = driver.assign(2, PROMPT, room=8, sampling=sampling(OBJECT.grammar))
    driver.step(assign=[bad, lost, good])
    runs = [RunSlot(0, bad.slot_epoch, 7), RunSlot(1, lost.slot_epoch, 8), RunSlot(2, good.slot_epoch, 7)]
    events = sorted(driver.step(run=runs), key=lambda event: event.slot)
    assert [type(event) for event in events] == [SlotFailed, SlotFailed, SlotTokens]
    assert "unclosed group" in events[0].message  # type: ignore[union-attr]
    assert "position 0" in events[1].message  # type: ignore[union-attr]


def test_bad_words_that_leave_nothing_are_told(new_driver: NewDriver) -> None:
    driver = spoken(new_driver, AtOnce())
    words = tuple((token_id,) for token_id in range(SPOKEN.vocab_size))
    request = driver.assign(0, PROMPT, room=8, sampling=sampling(OBJECT.grammar, bad_words=words))
    driver.step(assign=[request])
    [event] = driver.step(run=[RunSlot(0, request.slot_epoch, 7)])
    assert isinstance(event, SlotFailed)
    assert (event.code, "no token to sample" in event.message) == ("grammar_failed", True)


def test_a_model_without_a_tokenizer_has_no_grammars(new_driver: NewDriver) -> None:
    driver = new_driver()
    [event] = driver.step(assign=[driver.assign(0, PROMPT, sampling=sampling(OBJECT.grammar))])
    assert isinstance(event, SlotFailed)
    assert event.code == "invalid_request"


def test_logprobs_are_the_model_s_own_whatever_the_grammar_allows(new_driver: NewDriver) -> None:
    driver = spoken(new_driver, AtOnce())
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


def test_a_grammar_done_by_the_prompt_s_first_token_is_said_in_that_step(new_driver: NewDriver) -> None:
    driver = spoken(new_driver, AtOnce())
    request = driver.assign(0, PROMPT, room=8, sampling=sampling(STRUCTURES["one"].grammar))
    driver.step(assign=[request])
    [event] = driver.step(run=[RunSlot(0, request.slot_epoch, 7)])
    assert isinstance(event, SlotTokens)
    assert event.grammar_done
    assert text_of(event.token_ids) in ("a", "b", "c")


def test_a_preempt_behind_a_draw_that_had_to_wait_tells_the_length_without_it(new_driver: NewDriver) -> None:
    driver = spoken(new_driver, Held())
    request = driver.assign(0, PROMPT, room=9, sampling=sampling(OBJECT.grammar))
    other = driver.assign(1, PROMPT, room=9, sampling=sampling(None))
    plans = [
        StepPlan(1, assign=[request, other], run=[RunSlot(0, request.slot_epoch, 7), RunSlot(1, other.slot_epoch, 7)])
    ]
    plans.append(StepPlan(2, preempt=[PreemptSlot(0, request.slot_epoch)], run=[RunSlot(1, other.slot_epoch, 1)]))
    first, second = driver.overlapped(plans, depth=2)
    assert SlotAdvanced(0, request.slot_epoch, 6) in first.events
    assert SlotPreempted(0, request.slot_epoch, 7) in second.events


class GivesUp:
    """A grammar that allows every token, and refuses the one behind so many, but only once."""

    is_ready = True

    def __init__(self, num_tokens: int) -> None:
        self._num_left = num_tokens

    def mask(self) -> TokenBitmask:
        return TokenBitmask(b"\xff" * -(-SPOKEN.vocab_size // 8), may_end=True)

    def advance(self, token_id: int) -> bool:
        self._num_left -= 1
        if self._num_left == -1:
            raise SlotGrammarError("too deep")
        return False


def test_a_grammar_that_gives_up_behind_a_draft_fails_its_request_in_the_next_step() -> None:
    plain = spoken(driver_of("int8"), AtOnce())
    expected, _ = resumed(plain, sampling(None))
    driver = spoken(driver_of("int8"), AtOnce(), drafter=Injected(knowing({0: expected})))
    request = driver.assign(0, PROMPT, room=64, sampling=sampling(OBJECT.grammar))
    driver.step(assign=[request])
    slot = driver.runner._slots[0]
    assert slot is not None
    slot.grammar = GivesUp(2)  # type: ignore[assignment]
    [event] = driver.step(run=[RunSlot(0, request.slot_epoch, len(PROMPT), [], 4)])
    assert isinstance(event, SlotTokens)
    assert (event.token_ids, event.num_computed) == (expected[:2], len(PROMPT) + 1)
    [event] = driver.step(run=[RunSlot(0, request.slot_epoch, 1, [], 4)])
    assert isinstance(event, SlotFailed)
    assert (event.code, "too deep" in event.message) == ("grammar_failed", True)
