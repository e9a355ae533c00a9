"""Tokens and logprobs of a request are the same, to the last bit, in any company, chunking and after any resume.

The requests sample in every way there is: greedy, with cuts, penalties, biases, bad words and under a grammar.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from onward.proto.sampling_params import Grammar, SamplingParams
from onward.proto.step import AssignSlot, RunSlot, SlotTokens, TokenLogprobs
from onward.worker.token_logprobs import token_logprobs
from tests.worker import spoken
from tests.worker.driver import Driver
from tests.worker.exact_int8 import cut

NUM_TOKENS = 24
MAX_STEPS = 200
KINDS = {
    "greedy": SamplingParams(seed=1, temperature=0.0, logprobs=3),
    "plain": SamplingParams(seed=2, logprobs=0),
    "top-p": SamplingParams(seed=3, temperature=1.7, top_p=0.8, logprobs=5),
    "top-k": SamplingParams(seed=4, temperature=2.0, top_k=9, logprobs=5),
    "min-p": SamplingParams(seed=5, temperature=1.5, min_p=0.2, logprobs=2),
    "all cuts": SamplingParams(seed=6, choice_index=3, temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, logprobs=4),
    "penalties": SamplingParams(
        seed=7, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.3, top_p=0.95, logprobs=5
    ),
    "biases": SamplingParams(
        seed=8, logit_bias=((5, 2.5), (9, -4.0)), bad_words=((7,), (5, 9)), min_tokens=4, logprobs=1
    ),
    "regex": SamplingParams(seed=9, temperature=1.3, top_p=0.9, grammar=Grammar("regex", "[a-f]{40}"), logprobs=3),
    "prompt": SamplingParams(seed=10, top_k=20, logprobs=2, prompt_logprobs=3),
}


@dataclass(slots=True)
class Answer:
    """All that a client is told."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    of_given: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt, or of outputs that are scored again."""


def _prompt(kind: str) -> list[int]:
    place = list(KINDS).index(kind)
    return [(11 * place + 7 * i + i * i) % spoken.CONFIG.vocab_size for i in range(5 + 6 * place)]


def _new_driver() -> Driver:
    return spoken.driver(spoken.AtOnce(), num_kv_blocks=96, max_num_seqs=16, max_num_batched_tokens=1024)


def _run(driver: Driver, requests: Sequence[AssignSlot], chunks: Sequence[int], stagger: int) -> list[Answer]:
    """Request number i begins at step i * stagger. Prompts go in `chunks`, beside those that decode already."""
    answers = [Answer() for _ in requests]
    todo = [cut(len(request.token_ids), chunks) for request in requests]
    for step in range(MAX_STEPS):
        begun = [i for i in range(len(requests)) if i * stagger <= step]
        running = [i for i in begun if _num_generated(requests[i], answers[i]) < NUM_TOKENS]
        assigned = [requests[i] for i in begun if i * stagger == step]
        runs = [RunSlot(requests[i].slot, requests[i].slot_epoch, todo[i].pop(0) if todo[i] else 1) for i in running]
        by_slot = {event.slot: event for event in driver.step(assign=assigned, run=runs)}
        assert len(by_slot) == len(running)
        for i in running:
            event = by_slot[requests[i].slot]
            answers[i].of_given += getattr(event, "prompt_logprobs", None) or []
            if isinstance(event, SlotTokens):
                answers[i].token_ids += event.token_ids
                answers[i].logprobs += event.logprobs or []
        if len(begun) == len(requests) and not running:
            return answers
    raise AssertionError("it does not end")


def _num_generated(request: AssignSlot, answer: Answer) -> int:
    return len(request.token_ids) - request.num_prompt + len(answer.token_ids)


def _request(driver: Driver, slot: int, kind: str, given: Sequence[int] = ()) -> AssignSlot:
    prompt = _prompt(kind)
    return driver.assign(slot, [*prompt, *given], room=NUM_TOKENS, sampling=KINDS[kind], num_prompt=len(prompt))


def _alone(kind: str) -> Answer:
    driver = _new_driver()
    [answer] = _run(driver, [_request(driver, 0, kind)], [64], 0)
    assert len(answer.token_ids) == len(answer.logprobs) == NUM_TOKENS
    return answer


@pytest.mark.parametrize(("chunks", "stagger"), [([64], 0), ([5, 1, 3], 1), ([2], 3)], ids=str)
def test_a_batch_of_every_kind_of_sampling_gives_each_request_what_it_gets_alone(
    chunks: list[int], stagger: int
) -> None:
    driver = _new_driver()
    kinds = [*KINDS][::-1]  # in other slots and rows than alone
    requests = [_request(driver, 15 - slot, kind) for slot, kind in enumerate(kinds)]
    together = dict(zip(kinds, _run(driver, requests, chunks, stagger), strict=True))
    assert together == {kind: _alone(kind) for kind in kinds}


@pytest.mark.parametrize("num_given", [1, 10, 23])
def test_requests_that_are_resumed_in_a_batch_go_on_with_the_same_tokens_and_logprobs(num_given: int) -> None:
    whole = {kind: _alone(kind) for kind in KINDS}
    driver = _new_driver()
    requests = [_request(driver, slot, kind, whole[kind].token_ids[:num_given]) for slot, kind in enumerate(KINDS)]
    for kind, rest in zip(KINDS, _run(driver, requests, [64], 0), strict=True):
        assert rest.token_ids == whole[kind].token_ids[num_given:], kind
        assert rest.logprobs == whole[kind].logprobs[num_given:], kind


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_that_is_scored_again_has_the_logprobs_that_were_told_with_its_tokens(kind: str) -> None:
    whole, driver = _alone(kind), _new_driver()
    request = _request(driver, 3, kind, whole.token_ids[:-1])
    scored = msgspec.structs.replace(request, rescore_from=request.num_prompt)
    other = _request(driver, 5, "top-p")
    answer, _ = _run(driver, [scored, other], [9, 4], 0)
    assert answer.of_given == whole.logprobs[:-1]
    assert (answer.token_ids, answer.logprobs) == (whole.token_ids[-1:], whole.logprobs[-1:])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logprobs_of_a_row_without_numbers_are_no_numbers(bad: float) -> None:
    logits = np.full(40, -np.inf, np.float32)
    logits[7] = bad
    assert math.isnan(token_logprobs(logits, 3, 0).logprob)
