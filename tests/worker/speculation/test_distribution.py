"""Drafts do not move the distribution: over many seeds, tokens come as often as they are likely, whatever was drafted."""

from itertools import product

import numpy as np
import pytest

from onward.kernels import numpy_reference
from onward.kernels.cpu.threads import ThreadPool
from onward.proto.sampling_params import SamplingParams
from onward.worker.batch_builder import TokenSpan
from onward.worker.step_sampler import StepSampler
from tests.worker.speculation.little_slot import LittleSlot

POOL = ThreadPool(1)


def draw(logits: np.ndarray, drafts: list[list[int]], samplings: list[SamplingParams]) -> list[list[int]]:
    """Each slot has rows of its own: the same `logits` [1 + drafts, vocab], which depend on the place alone."""
    vocab, num_rows = logits.shape[1], len(drafts[0]) + 1
    rows = np.tile(logits[:num_rows], (len(drafts), 1)).astype(np.float32)
    spans = [TokenSpan(slot, 1, 1, True, None, tuple(guessed)) for slot, guessed in enumerate(drafts)]
    slots = [LittleSlot(2, 2, sampling) for sampling in samplings]
    drawn = StepSampler(vocab, len(rows), POOL).sample(rows, spans, slots, np.zeros((len(drafts), 4), np.int32))
    return [one.token_ids for one in drawn]


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
    slot = LittleSlot(2, 2 + place, sampling)
    drawing = StepSampler(len(row), 1, POOL)
    [drawn] = drawing.sample(row[None].copy(), [TokenSpan(0, 1, 1, True)], [slot], np.zeros((1, 4), np.int32))
    return drawn.token_ids[0]
