"""What a request draws is a function of its logits, its sampling options and its position."""

import numpy as np
import pytest

from onward.kernels import numpy_reference
from onward.kernels.cpu.threads import ThreadPool
from onward.proto.sampling_params import SamplingParams
from onward.worker.sampler import Sampler, SamplingRow

VOCAB = 6_000
POOL = ThreadPool(2)


def _sample(logits: np.ndarray, draws: list[SamplingRow]) -> list[int | None]:
    padded = np.full((len(draws), VOCAB + 12), 1e6, np.float32)  # the padding must not be looked at
    padded[:, :VOCAB] = logits
    return Sampler(VOCAB, len(draws), POOL).sample(padded, draws)


def _logits(seed: int = 0) -> np.ndarray:
    return 3 * np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32)


def _many(logits: np.ndarray, count: int, **options: float) -> np.ndarray:
    draws = [SamplingRow(SamplingParams(seed=9, **options), position) for position in range(count)]  # type: ignore[arg-type]
    return np.array(_sample(np.broadcast_to(logits, (count, VOCAB)), draws))


def test_greedy_takes_the_lowest_id_among_the_likeliest() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[700, 41, 5_999]] = 5
    assert _sample(logits, [SamplingRow(SamplingParams(seed=0, temperature=0.0), 0)]) == [41]


def test_the_least_temperature_that_is_not_greedy_draws_the_likeliest_token() -> None:
    logits = _logits()
    assert {*_many(logits, 20, temperature=1e-5).tolist()} == {int(logits.argmax())}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0}, {"temperature": 0.5}, {"top_k": 5}, {"top_k": 40, "temperature": 2.0}, {"top_p": 0.5},
        {"min_p": 0.1}, {"top_k": 30, "top_p": 0.8, "min_p": 0.05, "temperature": 1.5},
    ],
    ids=str,
)  # fmt: skip
def test_tokens_are_sampled_as_often_as_they_are_likely(options: dict[str, float]) -> None:
    logits, count = _logits(), 4_000
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    expected = numpy_reference.filtered_probabilities(logits, **full)  # type: ignore[arg-type]
    drawn = _many(logits, count, **options)
    assert (expected[drawn] > 0).all()
    likely = expected > 0.01
    frequency = np.bincount(drawn, minlength=VOCAB) / count
    deviation = np.abs(frequency - expected)[likely] / np.sqrt(expected[likely] / count)
    assert likely.any() and deviation.max() < 5


@pytest.mark.parametrize("options", [{"top_p": 0.5}, {"top_k": 5_000}, {"min_p": 0.5}, {"top_k": 4_500, "top_p": 0.3}])
def test_cuts_are_right_where_nearly_all_tokens_are_nearly_as_likely(options: dict[str, float]) -> None:
    logits = np.linspace(0, 1, VOCAB).astype(np.float32)[np.random.default_rng(1).permutation(VOCAB)]
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    expected = numpy_reference.filtered_probabilities(logits, **full)  # type: ignore[arg-type]
    drawn = _many(logits, 3_000, **options)
    edge = np.sort(logits[expected > 0])[1]  # rounding may decide the last one either way
    assert (logits[drawn] >= edge).mean() > 0.998
    assert logits[drawn].min() < edge + 0.01


@pytest.mark.parametrize("top_k", [1, 2, 17])
def test_top_k_keeps_exactly_the_k_likeliest(top_k: int) -> None:
    logits = np.linspace(0, 1, VOCAB).astype(np.float32)[np.random.default_rng(1).permutation(VOCAB)]
    allowed = set(np.argsort(logits)[-top_k:].tolist())
    assert set(_many(logits, 400, top_k=top_k).tolist()) == allowed


def test_equally_likely_tokens_are_cut_together() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[:10] = 4
    assert set(_many(logits, 300, top_k=3).tolist()) == set(range(10))


def test_a_top_p_that_the_likeliest_token_reaches_alone_is_greedy() -> None:
    logits = _logits()
    logits[123] = 30
    assert set(_many(logits, 50, top_p=0.3).tolist()) == {123}


def test_a_draw_does_not_depend_on_batch_slot_or_other_rows() -> None:
    logits = np.stack([_logits(seed) for seed in range(9)])
    draws = [SamplingRow(SamplingParams(seed=2**64 - 1 - i, choice_index=i % 3, top_p=0.9), 10 * i) for i in range(9)]
    together = _sample(logits, draws)
    backwards = _sample(logits[::-1], draws[::-1])
    alone = [_sample(logits[i], [draws[i]])[0] for i in range(9)]
    assert together == alone == backwards[::-1]


@pytest.mark.parametrize("other", [SamplingParams(seed=6), SamplingParams(seed=5, choice_index=1)])
def test_seed_choice_and_position_each_change_what_is_sampled(other: SamplingParams) -> None:
    logits = np.broadcast_to(np.zeros(VOCAB, np.float32), (30, VOCAB))
    base = _sample(logits, [SamplingRow(SamplingParams(seed=5), position) for position in range(30)])
    assert len(set(base)) > 25
    assert base != _sample(logits, [SamplingRow(other, position) for position in range(30)])


def test_end_tokens_are_out_of_reach_before_min_tokens() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[7, 8]] = 50
    logits[99] = 20
    sampling = SamplingParams(seed=0, temperature=0.0, min_tokens=3, end_token_ids=(7, 8, 10**6))
    assert _sample(logits, [SamplingRow(sampling, 2)]) == [99]
    assert _sample(logits, [SamplingRow(sampling, 3)]) == [7]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_give_no_token_to_their_row_only(bad: float, temperature: float) -> None:
    logits = np.stack([_logits(), _logits()])
    logits[0, 777] = bad
    tokens = _sample(logits, [SamplingRow(SamplingParams(seed=0, temperature=temperature), 0)] * 2)
    assert tokens[0] is None
    assert tokens[1] is not None


def test_minus_infinity_forbids_a_token_and_all_of_them_give_none() -> None:
    logits = np.full(VOCAB, -np.inf, np.float32)
    assert _sample(logits, [SamplingRow(SamplingParams(seed=0), 0)]) == [None]
    logits[5] = -3
    assert _sample(logits, [SamplingRow(SamplingParams(seed=0), 0)]) == [5]
