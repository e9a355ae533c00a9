"""The small kernels and products on a CUDA device, against float64."""

from types import ModuleType

import pytest

pytestmark = pytest.mark.gpu


@pytest.fixture
def checks() -> ModuleType:
    from benchmarks.gpu import checks  # Triton is not installed everywhere

    return checks


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("shape", [(16, 8, 128), (9, 3, 64), (10, 2, 96), (20, 1, 256)])
def test_keys_are_turned_and_stored_and_nothing_else_is_touched(checks, shape, normed) -> None:
    assert checks.rotate_and_store_error(checks.Heads(*shape), 16, 77, normed=normed) <= checks.TOLERANCE


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize(("rows", "size"), [(1, 1024), (33, 576), (5, 4096)])
def test_norm_of_the_residual_stream(checks, rows, size, adds) -> None:
    assert checks.norm_error(rows, size, adds=adds) <= checks.TOLERANCE


@pytest.mark.parametrize("chunks", [[300], [1, 99, 200]])
def test_rows_are_added_up_in_their_order(checks, chunks) -> None:
    assert checks.add_rows_differences(300, 1000, chunks) == 0


@pytest.mark.parametrize("vocab_size", [151_936, 4097, 5])
def test_tokens_whose_bit_is_not_set_are_forbidden_and_nothing_else_changes(checks, vocab_size) -> None:
    assert checks.forbid_differences(9, vocab_size, [7, 0, 3]) == 0


def test_silu_gate(checks) -> None:
    assert checks.silu_gate_error(17, 1536) <= checks.TOLERANCE


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize(("normed", "adds", "gates"), [(True, False, True), (True, False, False), (False, True, False)])
def test_one_rows_product_with_what_is_around_it(checks, normed, adds, gates, scaled) -> None:
    found = checks.one_row_error(3072, 999, normed=normed, adds=adds, gates=gates, scaled=scaled)
    assert found <= checks.TOLERANCE


@pytest.mark.parametrize("gates", [True, False])
@pytest.mark.parametrize("rows", [1, 63, 300])
def test_product_of_a_batch(checks, rows, gates) -> None:
    plan = checks.LinearPlan.choose(rows, 1024, gates=gates)
    assert checks.linear_error(rows, 2048, 1024, plan, gates=gates, overlap=True) <= checks.TOLERANCE


@pytest.mark.parametrize("gates", [True, False])
def test_a_products_bits_depend_neither_on_the_batch_nor_on_the_plan(checks, gates) -> None:
    plans = [checks.LinearPlan(128, 64), checks.LinearPlan(64, 32, 128), checks.LinearPlan(64, 64, 64, 4, 5)]
    assert checks.linear_differences(1024, 1024, plans, gates=gates) == 0
