"""Requests that sample in every way there is, and all that their clients are told."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from onward.proto.sampling_params import Grammar, SamplingParams
from onward.proto.step import AssignSlot, RunSlot, SlotEmbedding, SlotTokens, TokenLogprobs
from tests.worker.driver import Driver
from tests.worker.exact_int8 import cut

MAX_STEPS = 400
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
    "allowed": SamplingParams(seed=11, temperature=1.4, allowed_token_ids=tuple(range(3, 60, 4)), logprobs=2),
    "regex": SamplingParams(seed=9, temperature=1.3, top_p=0.9, grammar=Grammar("regex", "[a-f]{40}"), logprobs=3),
    "prompt": SamplingParams(seed=10, top_k=20, logprobs=2, prompt_logprobs=3),
}


@dataclass(slots=True)
class Answer:
    """All that a client is told."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    of_given: list[TokenLogprobs] = field(default_factory=list)
    """Logprobs of the prompt, or of outputs that are scored again."""
    vector: bytes | None = None
    """The vector of an embedding, which has no tokens."""


def run_batch(
    driver: Driver, num_tokens: int, requests: Sequence[AssignSlot], chunks: Sequence[int], stagger: int
) -> list[Answer]:
    """So many tokens of each request, those that it was given included. Request number i begins at step i * stagger.
    Prompts go in `chunks`, beside those that decode already."""
    answers = [Answer() for _ in requests]
    todo = [cut(len(request.token_ids), chunks) for request in requests]
    for step in range(MAX_STEPS):
        begun = [i for i in range(len(requests)) if i * stagger <= step]
        running = [i for i in begun if not _has_ended(requests[i], answers[i], num_tokens)]
        assigned = [requests[i] for i in begun if i * stagger == step]
        runs = [RunSlot(requests[i].slot, requests[i].slot_epoch, todo[i].pop(0) if todo[i] else 1) for i in running]
        by_slot = {event.slot: event for event in driver.step(assign=assigned, run=runs)}
        assert len(by_slot) == len(running)
        for i in running:
            event = by_slot[requests[i].slot]
            answers[i].of_given += getattr(event, "prompt_logprobs", None) or []
            if isinstance(event, SlotEmbedding):
                answers[i].vector = event.vector
            if isinstance(event, SlotTokens):
                answers[i].token_ids += event.token_ids
                answers[i].logprobs += event.logprobs or []
        if len(begun) == len(requests) and not running:
            return answers
    raise AssertionError("it does not end")


def _has_ended(request: AssignSlot, answer: Answer, num_tokens: int) -> bool:
    num_generated = len(request.token_ids) - request.num_prompt + len(answer.token_ids)
    return answer.vector is not None or num_generated >= num_tokens
