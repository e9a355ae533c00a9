"""Tokens and logprobs of a request are the same, to the last bit, in any company, chunking and after any resume.

The requests sample in every way there is: greedy, with cuts, penalties, biases, bad words and under a grammar.
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from onward.proto.step import AssignSlot
from onward.worker.token_logprobs import token_logprobs
from tests.worker import spoken
from tests.worker.batch_answers import KINDS, Answer, run_batch
from tests.worker.driver import Driver

NUM_TOKENS = 24


def _prompt(kind: str) -> list[int]:
    place = list(KINDS).index(kind)
    return [(11 * place + 7 * i + i * i) % spoken.CONFIG.vocab_size for i in range(5 + 6 * place)]


def _new_driver() -> Driver:
    return spoken.driver(spoken.AtOnce(), num_kv_blocks=96, max_num_seqs=16, max_num_batched_tokens=1024)


def _request(driver: Driver, slot: int, kind: str, given: Sequence[int] = ()) -> AssignSlot:
    prompt = _prompt(kind)
    return driver.assign(slot, [*prompt, *given], room=NUM_TOKENS, sampling=KINDS[kind], num_prompt=len(prompt))


def _alone(kind: str) -> Answer:
    driver = _new_driver()
    [answer] = run_batch(driver, NUM_TOKENS, [_request(driver, 0, kind)], [64], 0)
    assert len(answer.token_ids) == len(answer.logprobs) == NUM_TOKENS
    return answer


@pytest.mark.parametrize(("chunks", "stagger"), [([64], 0), ([5, 1, 3], 1), ([2], 3)], ids=str)
def test_a_batch_of_every_kind_of_sampling_gives_each_request_what_it_gets_alone(
    chunks: list[int], stagger: int
) -> None:
    driver = _new_driver()
    kinds = [*KINDS][::-1]  # in other slots and rows than alone
    requests = [_request(driver, 15 - slot, kind) for slot, kind in enumerate(kinds)]
    together = dict(zip(kinds, run_batch(driver, NUM_TOKENS, requests, chunks, stagger), strict=True))
    assert together == {kind: _alone(kind) for kind in kinds}


@pytest.mark.parametrize("num_given", [1, 10, 23])
def test_requests_that_are_resumed_in_a_batch_go_on_with_the_same_tokens_and_logprobs(num_given: int) -> None:
    whole = {kind: _alone(kind) for kind in KINDS}
    driver = _new_driver()
    requests = [_request(driver, slot, kind, whole[kind].token_ids[:num_given]) for slot, kind in enumerate(KINDS)]
    for kind, rest in zip(KINDS, run_batch(driver, NUM_TOKENS, requests, [64], 0), strict=True):
        assert rest.token_ids == whole[kind].token_ids[num_given:], kind
        assert rest.logprobs == whole[kind].logprobs[num_given:], kind


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_that_is_scored_again_has_the_logprobs_that_were_told_with_its_tokens(kind: str) -> None:
    whole, driver = _alone(kind), _new_driver()
    request = _request(driver, 3, kind, whole.token_ids[:-1])
    scored = msgspec.structs.replace(request, rescore_from=request.num_prompt)
    other = _request(driver, 5, "top-p")
    answer, _ = run_batch(driver, NUM_TOKENS, [scored, other], [9, 4], 0)
    assert answer.of_given == whole.logprobs[:-1]
    assert (answer.token_ids, answer.logprobs) == (whole.token_ids[-1:], whole.logprobs[-1:])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logprobs_of_a_row_without_numbers_are_no_numbers(bad: float) -> None:
    logits = np.full(40, -np.inf, np.float32)
    logits[7] = bad
    assert math.isnan(token_logprobs(logits, 3, 0).logprob)
