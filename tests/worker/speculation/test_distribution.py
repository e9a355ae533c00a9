"""Drafts do not move the distribution: over many seeds, tokens come as often as they are likely, whatever was drafted."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from onward.kernels import numpy_reference
from onward.kernels.cpu.threads import ThreadPool
from onward.proto.sampling_params import SamplingParams
from onward.proto.step import AssignSlot
from onward.worker.device import StepOutput
from onward.worker.draft_verifier import DraftVerifier, verify_drafts
from onward.worker.slot_state import SlotState
from onward.worker.step_sampler import StepSampler
from onward.worker.token_span import TokenSpan

POOL = ThreadPool(1)


def draw(logits: np.ndarray, drafts: list[list[int]], samplings: list[SamplingParams]) -> list[list[int]]:
    """Each slot has rows of its own: the same `logits` [1 + drafts, vocab], which depend on the place alone."""
    vocab, num_rows = logits.shape[1], len(drafts[0]) + 1
    rows = np.tile(logits[:num_rows], (len(drafts), 1)).astype(np.float32)
    spans = [
        _span(slot, sampling, guessed) for slot, (sampling, guessed) in enumerate(zip(samplings, drafts, strict=True))
    ]
    verifiers = [DraftVerifier(span, slot * num_rows) for slot, span in enumerate(spans)]
    sampler = StepSampler(vocab, len(rows), POOL)

    def sample(wanted: Sequence[tuple[DraftVerifier, int]]) -> StepOutput:
        indices = [verifier.first_row + depth for verifier, depth in wanted]
        positions = [verifier.span.position + depth for verifier, depth in wanted]
        return sampler.sample(rows[indices], [verifier.span for verifier, _ in wanted], positions, None)

    verify_drafts(verifiers, sample)
    return [verifier.token_ids for verifier in verifiers]


def _span(index: int, sampling: SamplingParams, drafts: list[int], position: int = 0) -> TokenSpan[SlotState]:
    """Returns the span of a slot with a prompt of two tokens and `position` tokens after it."""
    tokens = [0] * (2 + position)
    assign = AssignSlot(index, 1, "request", tokens, 2, len(tokens) - 1, [0], sampling)
    slot = SlotState.of(assign, 16, None, None, has_processor=False)
    return TokenSpan(index, len(tokens) - 1, len(tokens), True, slot, position, drafts=tuple(drafts))


def likely(logits: np.ndarray, **options: float) -> np.ndarray:
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    return np.array([numpy_reference.filtered_probabilities(row, **full) for row in logits])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["good", "bad", "adversarial"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.8}], ids=str)
def test_tokens_come_as_often_as_they_are_likely(kind: str, options: dict[str, float]) -> None:
    rng, vocab, num_slots, depth = np.random.default_rng(2), 6, 6_000, 3
    logits = rng.standard_normal((depth + 1, vocab)).astype(np.float32)
    chances = likely(logits, **options)
    order = np.argsort(chances[:depth], axis=1)
    # Good: the likeliest. Bad: the unlikeliest. Adversarial: by the seed, as who wants to sway the draw would.
    guess = {"good": lambda s: order[:, -1], "bad": lambda s: order[:, 0], "adversarial": lambda s: order[:, s % vocab]}
    drafts = [guess[kind](seed).tolist() for seed in range(num_slots)]
    samplings = [SamplingParams(seed=seed, **options) for seed in range(num_slots)]  # type: ignore[arg-type]
    outputs = draw(logits, drafts, samplings)
    for place in range(depth + 1):
        # Those that came so far have seen nothing of this place's noise yet, so they are a fair sample of it.
        found = [tokens[place] for tokens in outputs if len(tokens) > place]
        if len(found) > 200:
            assert _chi_square(np.bincount(found, minlength=vocab), chances[place]) < 30, "of at most 5 degrees"


def _chi_square(counts: np.ndarray, chances: np.ndarray) -> float:
    expected = chances * counts.sum()
    assert not counts[chances == 0].any(), "what is cut off is never drawn"
    kept = expected > 0
    return float(((counts - expected)[kept] ** 2 / expected[kept]).sum())


@pytest.mark.parametrize("vocab,depth", [(2, 3), (3, 2)])
def test_every_possible_run_of_drafts_gives_the_tokens_of_plain_drawing(vocab: int, depth: int) -> None:
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((depth + 1, vocab)).astype(np.float32)
    drafts = [list(one) for one in product(range(vocab), repeat=depth)]
    for seed in range(40):
        sampling = SamplingParams(seed=seed, temperature=1.0)
        plainly = [_alone(logits[place], sampling, place) for place in range(depth + 1)]
        for guessed, tokens in zip(drafts, draw(logits, drafts, [sampling] * len(drafts)), strict=True):
            num_right = next((i for i, (g, p) in enumerate(zip(guessed, plainly, strict=False)) if g != p), depth)
            assert tokens == plainly[: num_right + 1]


def _alone(row: np.ndarray, sampling: SamplingParams, place: int) -> int:
    span = _span(0, sampling, [], place)
    return StepSampler(len(row), 1, POOL).sample(row[None].copy(), [span], [place], None).token_ids[0]
