"""Spans of slots become rows, pages and tiles."""

import numpy as np

from onward.kernels.cpu.attention_tiles import row_tile
from onward.worker.batch_builder import BatchBuilder
from onward.worker.kv_pool import BlockTables
from onward.worker.token_span import unowned_span
from tests.worker.small_int8 import CONFIG

HEIGHT = row_tile(CONFIG.num_heads // CONFIG.num_kv_heads)


def _builder() -> BatchBuilder:
    tokens = np.arange(300, dtype=np.int32).reshape(3, 100)
    tables = BlockTables(3, 7)
    tables.replace(0, [4, 9])
    tables.replace(2, [1, 8, 3])
    return BatchBuilder(CONFIG, tokens, tables, 16, 64)


def test_rows_of_slots_follow_each_other() -> None:
    rows = _builder().build([unowned_span(2, 30, 4, is_sampled=True), unowned_span(0, 5, 1, is_sampled=False)])
    assert rows.num_rows == 5
    assert rows.token_ids.tolist() == [230, 231, 232, 233, 5]
    assert rows.positions.tolist() == [30, 31, 32, 33, 5]
    assert rows.kv_block_ids.tolist() == [8, 8, 3, 3, 4]
    assert rows.logits_indices.tolist() == [3]


def test_tiles_cover_each_span_and_never_two_slots() -> None:
    rows = _builder().build([unowned_span(0, 0, 1, is_sampled=True), unowned_span(2, 3, HEIGHT + 2, is_sampled=True)])
    assert rows.tiles.tolist() == [[0, 1, 0, 0], [1, HEIGHT, 2, 3], [1 + HEIGHT, 2, 2, 3 + HEIGHT]]


def test_tables_can_be_replaced_and_extended_to_their_end() -> None:
    tables = BlockTables(2, 3)
    tables.replace(1, [5])
    tables.extend(1, [6, 7])
    assert tables.ids[1].tolist() == [5, 6, 7]
    tables.replace(1, [8])
    assert (tables.ids[1, 0], tables.lengths[1]) == (8, 1)
    try:
        tables.extend(1, [1, 2, 3])
    except ValueError as error:
        assert "4 blocks" in str(error)
    else:
        raise AssertionError("a table took more blocks than it has places")
