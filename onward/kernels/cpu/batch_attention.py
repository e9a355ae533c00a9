"""Attention's two phases over a batch: rope with the KV write for every row, then every (tile, KV head)."""

import numpy as np
from numba.np.numpy_support import carray

from onward.kernels.cpu import simd
from onward.kernels.cpu.attention import attend_tile
from onward.kernels.cpu.batch_fields import BATCH_FIELDS, AttentionOptions
from onward.kernels.cpu.int8_attention import attend_tile_int8
from onward.kernels.cpu.jit import Kernel, kernel_function
from onward.kernels.cpu.phases import claim_items, mark_finished, partition_start, wait_for_phase
from onward.kernels.cpu.rope import rotate_and_store

CONTEXT = np.dtype(
    [
        *BATCH_FIELDS,
        ("kv_at", np.int64),
        ("q_norm", np.int64),
        ("k_norm", np.int64),
        ("window", np.int64),
        ("sinks", np.int64),
    ],
    align=True,
)
NUM_PHASES = 2


@kernel_function
def rotate_rows(c, phase, thread, kv, kv_at, q_norm, k_norm, options):
    work, qkv = simd.int64s(c.work), simd.floats(c.qkv)
    positions, pages = simd.int32s(c.positions), simd.int32s(c.pages)
    width = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    for turn in range(c.num_lots):
        lot = (thread + turn) % c.num_lots
        start, end = partition_start(c.num_rows, lot, c.num_lots), partition_start(c.num_rows, lot + 1, c.num_lots)
        row = start + claim_items(work, phase, lot, 1)
        while row < end:
            rotate_and_store(qkv, row * width, np.int64(positions[row]), np.int64(pages[row]), c.block_size,
                             c.num_heads, c.num_kv_heads, c.head_dim, simd.floats(c.cos), simd.floats(c.sin),
                             q_norm, k_norm, c.eps, kv, kv_at, options)  # fmt: skip
            mark_finished(work, phase, 1)
            row = start + claim_items(work, phase, lot, 1)
    wait_for_phase(work, phase, c.num_rows)


@kernel_function
def attend_item(c, item, kv, kv_at, scratch_at, options):
    """Computes one (tile, KV head). `options` are `AttentionOptions`, or None."""
    tile_at = item // c.num_kv_heads * 4
    heads_width = c.num_heads * c.head_dim
    q_stride = heads_width + 2 * c.num_kv_heads * c.head_dim
    group_size, kv_head = c.num_heads // c.num_kv_heads, item % c.num_kv_heads
    tiles, tables = simd.int32s(c.tiles), simd.int32s(c.block_tables)
    table_at = np.int64(tiles[tile_at + 2]) * c.table_stride
    q, scratch, out = simd.floats(c.qkv), simd.floats(c.scratch), simd.floats(c.attended)
    if simd.itemsize(kv) == 1:
        attend_tile_int8(q, q_stride, c.kv + kv_at, tables, table_at, c.block_size, tiles, tile_at, kv_head,
                         c.num_kv_heads, group_size, c.head_dim, scratch, scratch_at, out, heads_width,
                         options)  # fmt: skip
    else:
        attend_tile(q, q_stride, simd.floats(c.kv), kv_at, tables, table_at, c.block_size, tiles, tile_at, kv_head,
                    c.num_kv_heads, group_size, c.head_dim, scratch, scratch_at, out, heads_width,
                    options)  # fmt: skip


@kernel_function
def _rotate_and_attend(thread, c, options):
    work, kv = simd.int64s(c.work), simd.floats(c.kv)
    rotate_rows(c, 0, thread, kv, c.kv_at, c.q_norm, c.k_norm, options)
    num_items = c.num_tiles * c.num_kv_heads
    for turn in range(c.num_lots):
        lot = (thread + turn) % c.num_lots
        start, end = partition_start(num_items, lot, c.num_lots), partition_start(num_items, lot + 1, c.num_lots)
        item = start + claim_items(work, 1, lot, 1)
        while item < end:
            attend_item(c, item, kv, c.kv_at, thread * c.scratch_stride, options)
            mark_finished(work, 1, 1)
            item = start + claim_items(work, 1, lot, 1)
    wait_for_phase(work, 1, num_items)


def _plain(thread, context):
    _rotate_and_attend(thread, carray(context, 1)[0], None)


def _with_options(thread, context):
    c = carray(context, 1)[0]
    options = AttentionOptions(c.window, c.sinks, c.cos, c.sin, c.rotary_half, c.true_head_dim, c.norm_is_whole,
                               c.query_factor, c.softcap)  # fmt: skip
    _rotate_and_attend(thread, c, options)


rotate_and_attend = Kernel(_plain, CONTEXT)
"""For the float path, with float32 KV. The int8 kernel contains these phases."""
rotate_and_attend_with_options = Kernel(_with_options, CONTEXT)
"""`rotate_and_attend` for models whose attention differs from a Llama's."""
