"""How spans become rows: each token once, decoding rows first and longest first, offsets that point where they should."""

import numpy as np
import pytest

from onward.worker.cuda.step_packing import PackingSizes, fill_inputs, pack
from onward.worker.token_span import NO_BLOCK, TokenSpan

GEOMETRY = PackingSizes(block_size=16, tokens_stride=257, tables_stride=16, group=2, tile_rows=16)


def span(slot: int, start: int, end: int, *, samples: bool = True, reported: range | None = None) -> TokenSpan[str]:
    new_block = slot + 100 if slot % 2 else NO_BLOCK
    return TokenSpan(slot, start, end, samples, f"owner of {slot}", new_block=new_block, logprob_positions=reported)


def test_a_step_that_only_decodes_has_its_longest_histories_first() -> None:
    packed = pack([span(0, 9, 10), span(4, 99, 100), span(2, 49, 50)], GEOMETRY)
    assert [one.slot for one in packed.sampling] == [4, 2, 0]
    assert packed.num_decoding == 3
    assert packed.chunks is None


def test_chunks_come_behind_the_rows_that_decode() -> None:
    spans = [span(0, 0, 5), span(1, 30, 31), span(2, 16, 20, samples=False), span(3, 7, 8)]
    packed = pack(spans, GEOMETRY)
    assert [one.slot for one in packed.sampling] == [1, 3, 0]
    assert packed.num_decoding == 2
    assert [one.slot for one in packed.not_sampling] == [2]
    assert packed.chunks is not None and packed.logits_indices is not None
    assert packed.chunks.positions.tolist() == [0, 1, 2, 3, 4, 16, 17, 18, 19]
    assert packed.chunks.token_indices.tolist() == [*range(5), *range(2 * 257 + 16, 2 * 257 + 20)]
    assert packed.chunks.table_indices.tolist() == [0] * 5 + [2 * 16 + 1] * 4
    assert packed.logits_indices.tolist() == [0, 1, 2 + 4]


def test_one_token_that_does_not_reach_the_end_is_a_chunk() -> None:
    packed = pack([span(5, 3, 4, samples=False)], GEOMETRY)
    assert (packed.num_decoding, packed.sampling) == (0, [])
    assert packed.logits_indices is not None and packed.logits_indices.tolist() == []


def test_reported_rows_are_wanted_behind_those_that_sample() -> None:
    spans = [span(1, 30, 31), span(2, 10, 15, reported=range(11, 14)), span(3, 0, 2, samples=False, reported=range(2))]
    packed = pack(spans, GEOMETRY)
    assert packed.logits_indices is not None
    #                                 row 0 decodes; rows 1 to 5 are slot 2's; rows 6 and 7 slot 3's
    assert packed.logits_indices.tolist() == [0, 5, 2, 3, 4, 6, 7]
    assert [one.slot for one in packed.reporting] == [2, 3]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 40])
def test_tiles_cover_a_chunks_rows_once(count: int) -> None:
    packed = pack([span(0, 5, 5 + count, samples=False), span(2, 0, 3)], GEOMETRY)
    assert packed.chunks is not None
    rows = sorted(row for first, n, _, _ in packed.chunks.tiles.tolist() for row in range(first, first + n))
    assert rows == list(range(count + 3))
    assert all(n <= GEOMETRY.tile_rows // GEOMETRY.group for _, n, _, _ in packed.chunks.tiles.tolist())


def test_inputs_of_rows_that_fill_a_batch_up_are_nobodys() -> None:
    inputs = np.full((3, 4), 77, np.int32)
    fill_inputs(inputs, [span(1, 19, 20), span(0, 9, 10)], padding_slot=8)
    assert inputs.tolist() == [[1, 0, 8, 8], [20, 10, 0, 0], [101, NO_BLOCK, NO_BLOCK, NO_BLOCK]]
