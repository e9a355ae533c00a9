"""Sampling on a CUDA device: the same rule as on the CPU."""

from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.fixture
def checks() -> ModuleType:
    from benchmarks.gpu import checks  # Triton is not installed everywhere

    return checks


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("size", [1000, 49_152, 151_936])
def test_a_row_draws_the_token_in_whose_share_its_number_lies(checks, size, cut) -> None:
    assert checks.sampling_mistakes(24, size, cut=cut) == 0


def test_a_flat_row_is_cut_although_it_has_too_many_candidates(checks) -> None:
    logits = 0.01 * torch.randn(2, 20_000, device="cuda")
    tokens, valid = checks.draw(logits, [1.0, 1.0], [7, 8], [3, 4], ([3, 0], [1.0, 0.0001], [0.0, 0.0]))
    assert valid == [1, 1]
    assert tokens[0] in logits[0].topk(3).indices.tolist()
    assert tokens[1] in logits[1].topk(4).indices.tolist()


def test_the_lowest_id_wins_among_equals_and_a_row_that_is_no_number_is_marked(checks) -> None:
    logits = torch.zeros(5, 9000, device="cuda")
    logits[0, [4999, 77, 8000]] = 5.0
    logits[1, 3] = float("nan")
    logits[2, 3] = float("inf")
    logits[3] = -float("inf")
    logits[4] = -float("inf")
    logits[4, 6001] = -3.0
    tokens, valid = checks.draw(logits, [0.0, 1.0, 1.0, 1.0, 1.0], [1] * 5, [0] * 5)
    assert valid == [1, 0, 0, 0, 1]
    assert tokens == [77, 0, 0, 0, 6001]


def test_a_draw_does_not_depend_on_the_batch(checks) -> None:
    logits = torch.randn(40, 30_000, device="cuda")
    together, _ = checks.draw(logits, [0.9] * 40, list(range(40)), [5] * 40)
    alone = [checks.draw(logits[row : row + 1], [0.9], [row], [5])[0][0] for row in range(0, 40, 3)]
    assert alone == together[::3]


@pytest.mark.parametrize("size", [151_936, 4097, 5])
def test_the_logarithm_of_a_rows_total(checks, size) -> None:
    assert checks.log_totals_error(7, size) <= 1e-12
