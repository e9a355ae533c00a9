"""Plans of products: one for every batch and matrix."""

import pytest

from onward.kernels.triton.linear_plan import _GATES, _PLAIN, LinearPlan


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
