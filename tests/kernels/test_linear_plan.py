"""Plans of products: one for every batch and matrix."""

import pytest

from onward.kernels.triton.invariant_linear_plan import _GATES, _PLAIN, LinearPlan, library_rows


@pytest.mark.parametrize("num_outputs", [64, 1024, 3072, 4096, 6144, 8960, 12_288, 151_936])
def test_a_tile_of_gates_never_reaches_into_the_ups(num_outputs: int) -> None:
    for num_rows in (1, 16, 17, 64, 65, 128, 129, 511, 512, 16_384):
        assert num_outputs % LinearPlan.choose(num_rows, num_outputs, gates=True).outputs == 0


def test_tables_are_in_the_order_in_which_they_are_looked_up() -> None:
    for table in (_PLAIN, _GATES):
        assert list(table) == sorted(table)
        for plans in table.values():
            least = [num_outputs for num_outputs, _ in plans]
            assert least == sorted(least, reverse=True) and least[-1] == 0


SMALL, LARGE = (3072, 1024), (4096, 2048)  # 3.1 and 8.4 million weights


@pytest.mark.parametrize(
    ("num_rows", "matrix", "expected"),
    [
        (1, LARGE, None), (16, LARGE, None), (17, LARGE, 32), (32, LARGE, 32), (33, LARGE, 64), (511, LARGE, 512),
        (17, SMALL, None), (511, SMALL, None), (512, SMALL, 512), (513, SMALL, 768), (513, LARGE, 768),
        (16_384, LARGE, 16_384),
    ],
)  # fmt: skip
def test_the_library_computes_many_rows_and_large_matrices(
    num_rows: int, matrix: tuple[int, int], expected: int | None
) -> None:
    assert library_rows(num_rows, *matrix) == expected


def test_the_library_sees_few_sizes_none_of_them_too_small() -> None:
    sizes = {num_rows: library_rows(num_rows, *LARGE) for num_rows in range(17, 4097)}
    assert all(size is not None and num_rows <= size < num_rows + 256 for num_rows, size in sizes.items())
    assert len(set(sizes.values())) == 16 + 14
