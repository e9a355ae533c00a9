"""Which bytes go where, and how blocks are told apart."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from onward.pd.transfer.backend import MemoryCopy
from onward.pd.transfer.page_geometry import PageGeometry, block_checksum, plan_copies

OURS, THEIRS = PageGeometry(3, 20, 8), PageGeometry(3, 50, 8)


@given(st.integers(0, 2), st.permutations(range(20)), st.permutations(range(50)), st.integers(1, 20))
def test_copies_move_every_block_to_its_place(layer: int, sources: list[int], targets: list[int], count: int) -> None:
    sources, targets = sorted(sources[:count]), targets[:count]
    ours = np.arange(OURS.num_bytes, dtype=np.int32)
    theirs = np.full(THEIRS.num_bytes, -1, np.int32)
    for source_at, target_at, size in plan_copies(OURS, THEIRS, layer, sources, targets):
        theirs[target_at : target_at + size] = ours[source_at : source_at + size]
    pages = theirs.reshape(3, 50, 8)
    for source, target in zip(sources, targets, strict=True):
        np.testing.assert_array_equal(pages[layer, target], ours.reshape(3, 20, 8)[layer, source])
    assert (theirs >= 0).sum() == count * 8


def test_what_is_consecutive_on_both_sides_is_one_copy() -> None:
    assert plan_copies(OURS, THEIRS, 1, [3, 4, 5, 9, 10], [7, 8, 20, 21, 22]) == [
        MemoryCopy((20 + 3) * 8, (50 + 7) * 8, 16),
        MemoryCopy((20 + 5) * 8, (50 + 20) * 8, 8),
        MemoryCopy((20 + 9) * 8, (50 + 21) * 8, 16),
    ]


def test_places_are_pages() -> None:
    layers, blocks = OURS.pages_in([(OURS.page_offset(0, 19), 16), (OURS.page_offset(2, 5), 8)])
    assert list(zip(layers.tolist(), blocks.tolist(), strict=True)) == [(0, 19), (1, 0), (2, 5)]


def test_exchanged_layers_have_another_checksum() -> None:
    pool = np.random.default_rng(0).integers(0, 256, OURS.num_bytes, np.uint8)
    before = block_checksum(pool.data, OURS, 4)
    pages = pool.reshape(3, 20, 8)
    pages[[0, 1], 4] = pages[[1, 0], 4]
    assert block_checksum(pool.data, OURS, 4) != before
    pages[[0, 1], 4] = pages[[1, 0], 4]
    assert block_checksum(pool.data, OURS, 4) == before
