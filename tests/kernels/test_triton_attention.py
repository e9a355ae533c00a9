"""Paged attention on a CUDA device against float64. `benchmarks/gpu/kernels.py` checks more shapes, and
`test_triton_exactness.py` bits."""

from types import ModuleType

import pytest

pytestmark = pytest.mark.gpu
LENGTHS = [1, 2, 16, 17, 33, 64, 65, 128, 129, 257, 1000, 2048, 2049, 2561, 2999]
CHUNKS = [(0, 1), (0, 17), (100, 1), (513, 129), (0, 300), (31, 1), (2000, 64), (2047, 2)]
# Each head size with every plan, each group size with few: most of the time goes into compiling.
head_sizes = pytest.mark.parametrize(
    ("shape", "block_size", "normed"),
    [
        ((9, 3, 64), 64, False),
        ((10, 2, 96), 16, True),
        ((16, 8, 128), 16, True),
        ((32, 8, 128), 64, True),
        ((4, 2, 256), 16, False),
    ],
)
group_sizes = pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 20])


@pytest.fixture
def checks() -> ModuleType:
    from benchmarks.gpu import checks  # Triton is not installed everywhere

    return checks


@head_sizes
def test_decode_attention_writes_the_new_key_and_attends_to_it_and_to_the_history(
    checks, shape, block_size, normed
) -> None:
    for plan in checks.DECODE_PLANS:
        found = checks.decode_error(checks.Heads(*shape), block_size, [0, *LENGTHS], plan, normed=normed, overlap=True)
        assert found <= checks.TOLERANCE, plan


@group_sizes
def test_decode_attention_serves_groups_of_heads(checks, group) -> None:
    heads, block_size = checks.Heads(2 * group, 2, 64), 16 if group % 2 else 64
    for plan in (checks.DecodePlan(checks.WHOLE), checks.DecodePlan(checks.FIXED_SPLITS, 8, 4)):
        assert checks.decode_error(heads, block_size, LENGTHS, plan, normed=True) <= checks.TOLERANCE, plan


@pytest.mark.parametrize("fixed_order", [True, False])
@pytest.mark.parametrize("lengths", [[32768], [1 + 37 * i % 700 for i in range(256)]])
def test_decode_attention_serves_a_long_history_and_a_large_batch(checks, lengths, fixed_order) -> None:
    heads = checks.Heads(16, 8, 128)
    plan = checks.DecodePlan.choose(len(lengths), heads.num_kv_heads, heads.dim, max(lengths), fixed_order=fixed_order)
    assert checks.decode_error(heads, 16, lengths, plan, normed=True, overlap=True) <= checks.TOLERANCE


@pytest.mark.parametrize("fixed_order", [True, False])
@head_sizes
def test_chunk_attention_serves_chunks_with_different_histories(checks, shape, block_size, normed, fixed_order) -> None:
    plan = checks.ChunkPlan.choose(shape[2], fixed_order=fixed_order)
    assert checks.chunk_error(checks.Heads(*shape), block_size, CHUNKS, plan) <= checks.TOLERANCE


@group_sizes
def test_chunk_attention_serves_groups_of_heads(checks, group) -> None:
    plan = checks.ChunkPlan.choose(64, fixed_order=True)
    block_size = 16 if group % 2 else 64
    assert checks.chunk_error(checks.Heads(2 * group, 2, 64), block_size, CHUNKS, plan) <= checks.TOLERANCE
