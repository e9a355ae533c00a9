"""Attention's two phases over a batch: rope with the KV write for every row, then every (tile, KV head)."""

import numpy as np
from numba import carray

from onward.kernels.cpu import simd
from onward.kernels.cpu.attention import attend_tile
from onward.kernels.cpu.jit import Kernel, device
from onward.kernels.cpu.phases import await_all, draw, finish
from onward.kernels.cpu.rope import rotate_and_store
from onward.kernels.cpu.rows_context import ROWS_FIELDS

CONTEXT = np.dtype(
    [*ROWS_FIELDS, ("kv_at", np.int64), ("q_norm", np.int64), ("k_norm", np.int64)], align=True
)
NUM_PHASES = 2


@device
def rotate_rows(c, phase, kv, kv_at, q_norm, k_norm):
    work, qkv = simd.int64s(c.work), simd.floats(c.qkv)
    positions, pages = simd.int32s(c.positions), simd.int32s(c.pages)
    width = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    row = draw(work, phase, 1)
    while row < c.num_rows:
        rotate_and_store(qkv, row * width, np.int64(positions[row]), np.int64(pages[row]), c.block_size, c.num_heads,
                         c.num_kv_heads, c.head_dim, simd.floats(c.cos), simd.floats(c.sin), q_norm, k_norm, c.eps,
                         kv, kv_at)  # fmt: skip
        finish(work, phase, 1)
        row = draw(work, phase, 1)
    await_all(work, phase, c.num_rows)


@device
def attend_item(c, item, kv, kv_at, scratch_at):
    """One (tile, KV head). The longest histories tend to come last, so the last tiles come first."""
    tile_at = (c.num_tiles - 1 - item // c.num_kv_heads) * 4
    heads_width = c.num_heads * c.head_dim
    tiles = simd.int32s(c.tiles)
    attend_tile(simd.floats(c.qkv), heads_width + 2 * c.num_kv_heads * c.head_dim, kv, kv_at,
                simd.int32s(c.block_tables), np.int64(tiles[tile_at + 2]) * c.table_stride, c.block_size, tiles, tile_at,
                item % c.num_kv_heads, c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim,
                simd.floats(c.scratch), scratch_at, simd.floats(c.attended), heads_width)  # fmt: skip


def _rotate_and_attend(thread, context):
    c = carray(context, 1)[0]
    work, kv = simd.int64s(c.work), simd.floats(c.kv)
    rotate_rows(c, 0, kv, c.kv_at, c.q_norm, c.k_norm)
    num_items = c.num_tiles * c.num_kv_heads
    item = draw(work, 1, 1)
    while item < num_items:
        attend_item(c, item, kv, c.kv_at, thread * c.scratch_stride)
        finish(work, 1, 1)
        item = draw(work, 1, 1)
    await_all(work, 1, num_items)


rotate_and_attend = Kernel(_rotate_and_attend, CONTEXT)
"""For the float path, with float32 KV. int8 has these phases inside its own kernel."""
