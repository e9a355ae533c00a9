import pytest

from onward.models.thinned import all_but_every_nth


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 10])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 6, 7, 30])
def test_a_thinned_model_keeps_the_first_and_the_last_layer(num_layers: int, n: int) -> None:
    kept = all_but_every_nth(num_layers, n)
    assert (kept[0], kept[-1]) == (0, num_layers - 1)
    assert kept == sorted(set(kept))


def test_one_layer_of_each_n_is_left_out() -> None:
    assert all_but_every_nth(10, 5) == [0, 1, 3, 4, 5, 6, 8, 9]
    assert all_but_every_nth(6, 10) == [0, 1, 2, 3, 4, 5]
    assert all_but_every_nth(4, 2) == [0, 2, 3]
