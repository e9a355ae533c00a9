"""Batches that get graphs: few, and none much larger than what it is for."""

import pytest

from onward.kernels.batch_sizes import padded_batch_size
from onward.worker.cuda.cuda_graphs import batch_sizes_up_to, warmup_batch_sizes


def test_small_batches_are_hardly_padded_and_large_ones_in_steps() -> None:
    assert [padded_batch_size(n) for n in (1, 2, 3, 5, 8, 9, 255, 256, 257, 300)] == [
        1,
        2,
        4,
        8,
        8,
        16,
        256,
        256,
        288,
        320,
    ]


@pytest.mark.parametrize("most", [1, 3, 7, 64, 256, 300])
def test_every_number_of_rows_has_its_batch(most: int) -> None:
    sizes = batch_sizes_up_to(most)
    assert sizes == sorted(set(sizes))
    assert all(padded_batch_size(n) in sizes and padded_batch_size(n) >= n for n in range(1, most + 1))
    assert padded_batch_size(sizes[-1]) == sizes[-1]


@pytest.mark.parametrize("most", [1, 2, 5, 64, 256])
def test_graphs_made_at_start_are_few_and_include_one_row_and_all(most: int) -> None:
    sizes = warmup_batch_sizes(most)
    assert {1, padded_batch_size(most)} <= set(sizes) <= set(batch_sizes_up_to(most))
    assert len(sizes) <= 10
