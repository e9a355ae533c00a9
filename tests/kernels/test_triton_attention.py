"""Paged attention on a CUDA device against float64. `benchmarks/gpu/kernels.py` checks many more shapes."""

from types import ModuleType

import pytest

pytestmark = pytest.mark.gpu
SHAPES = [(16, 8, 128), (32, 8, 128), (9, 3, 64)]
LENGTHS = [1, 2, 16, 17, 64, 65, 257, 1000, 2999]
CHUNKS = [(0, 1), (0, 17), (100, 1), (513, 129), (0, 300), (31, 1), (2000, 64)]


@pytest.fixture
def checks() -> ModuleType:
    from benchmarks.gpu import checks  # Triton is not installed everywhere

    return checks


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_size", [16, 64])
def test_decode_attention_reads_each_history_through_its_table(checks, shape, block_size) -> None:
    assert checks.decode_error(checks.Heads(*shape), block_size, LENGTHS) <= checks.TOLERANCE


def test_decode_attention_adds_up_the_splits_of_a_long_history(checks) -> None:
    assert checks.decode_error(checks.Heads(32, 8, 128), 16, [32768]) <= checks.TOLERANCE


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_fused_decode_writes_the_new_key_and_attends_to_it(checks, shape, overlap, normed) -> None:
    found = checks.fused_decode_error(checks.Heads(*shape), 16, LENGTHS, normed=normed, overlap=overlap)
    assert found <= checks.TOLERANCE


def test_fused_decode_serves_a_large_batch_without_splits(checks) -> None:
    lengths = [1 + 37 * i % 700 for i in range(256)]
    assert checks.fused_decode_error(checks.Heads(16, 8, 128), 16, lengths, normed=True) <= checks.TOLERANCE


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block_size", [16, 64])
def test_prefill_attention_serves_chunks_with_different_histories(checks, shape, block_size) -> None:
    assert checks.prefill_error(checks.Heads(*shape), block_size, CHUNKS) <= checks.TOLERANCE
