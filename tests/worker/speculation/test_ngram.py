"""The proposer without a model: it finds what stood behind the newest tokens before, quickly and within bounds."""

import random

import numpy as np
import pytest

from onward.proto.sampling_params import SamplingParams
from onward.worker.speculation.ngram_proposer import NGRAM_LENGTHS, NgramProposer
from onward.worker.speculation.proposer import DraftRequest

SAMPLING = SamplingParams(seed=0)


def propose(tokens: list[int], count: int = 4, cuts: list[int] | None = None) -> list[int]:
    """What is proposed behind the list; it was asked before at each of the cuts."""
    table = np.zeros((2, 64), np.int32)
    table[1, : len(tokens)] = tokens
    proposer = NgramProposer(table)
    proposer.on_assign(1, len(tokens), 0)
    [found] = [proposer.propose([DraftRequest(1, count, end, 1, SAMPLING)])[0] for end in [*(cuts or []), len(tokens)]][
        -1:
    ]
    return found


def test_it_proposes_what_followed_the_newest_tokens_before() -> None:
    assert propose([0, 1, 2, 3, 4, 5, 6, 9, 0, 1, 2]) == [3, 4]


@pytest.mark.parametrize("agreeing", [2, 3, 4, 5, 6, 9])
def test_one_token_less_is_proposed_than_has_agreed(agreeing: int) -> None:
    newest = list(range(20, 20 + agreeing))
    assert propose([1, *newest, 40, 41, 42, 43, 44, 2, *newest]) == [40, 41, 42, 43][: agreeing - 1]


def test_the_longest_agreement_wins_over_the_latest() -> None:
    assert propose([1, 2, 3, 7, 7, 8, 2, 3, 5, 5, 1, 2, 3], 2) == [7, 7]


def test_of_equal_agreements_the_latest_wins() -> None:
    assert propose([4, 5, 1, 1, 4, 5, 2, 2, 4, 5], 2) == [2]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4, 5, 6]])
def test_without_an_agreement_nothing_is_proposed(tokens: list[int]) -> None:
    assert propose([7, *tokens]) == []


def test_what_repeats_itself_is_taken_to_go_on() -> None:
    assert propose([8, 9] * 4, 5) == [8, 9, 8, 9, 8]


def test_no_more_than_asked_for() -> None:
    assert propose([1, 2, 3, 4, 5, 6, 9, 1, 2, 3, 4], 1) == [5]


def test_asked_again_and_again_it_answers_as_one_that_reads_all_at_once() -> None:
    rng = random.Random(5)
    for _ in range(50):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(8, 60))]
        cuts = sorted(rng.sample(range(1, len(tokens)), 5))
        assert propose(tokens, 4, cuts) == propose(tokens, 4) == _slowly(tokens, 4)


def test_a_new_request_in_a_slot_knows_nothing_of_the_one_before() -> None:
    table = np.zeros((1, 16), np.int32)
    table[0, :9] = [1, 2, 3, 4, 5, 6, 9, 1, 2]
    proposer = NgramProposer(table)
    proposer.on_assign(0, 9, 0)
    assert proposer.propose([DraftRequest(0, 2, 9, 1, SAMPLING)]) == [[3]]
    table[0, :3] = [1, 2, 9]
    proposer.on_assign(0, 2, 0)
    assert proposer.propose([DraftRequest(0, 2, 2, 1, SAMPLING)]) == [[]]


def _slowly(tokens: list[int], count: int) -> list[int]:
    for length in NGRAM_LENGTHS:
        newest = tokens[-length:]
        for end in range(len(tokens) - 1, length - 1, -1):
            if len(tokens) > length and tokens[end - length : end] == newest:
                agreeing = next((n for n in range(end) if tokens[end - 1 - n] != tokens[-1 - n]), end)
                found = tokens[end:]
                while len(found) < count:
                    found = found + found
                return found[: min(count, agreeing - 1)]
    return []
