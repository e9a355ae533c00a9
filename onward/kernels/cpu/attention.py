"""Attention over paged KV, read in place. One function for prefill, chunk, decode and verification.

    keys    [block, kv head, block_size / 16, head_dim, 16]     sixteen positions side by side
    values  [block, kv head, block_size, head_dim]

A tile is up to `row_tile` consecutive positions of one slot. Its rows share each loaded key, but each (row, head) keeps
its own order: a dot product along head_dim, a softmax over sixteen lanes folded at the end, a sum over positions from
first to last. So a row's bits depend on its own history only, not on the tile, the batch or the thread.
"""

import numpy as np

from onward.kernels.cpu import simd
from onward.kernels.cpu.jit import device, inlined
from onward.kernels.cpu.outer import outer_sum

MAX_SHARED_ROWS = 24
"""(row, head) pairs that share a loaded key in a full tile. More would spill the scratch out of the L2 cache."""


def row_tile(group_size: int) -> int:
    """Rows per tile, when each key serves `group_size` heads."""
    return max(1, min(16, MAX_SHARED_ROWS // group_size))


def scratch_size(group_size: int, head_dim: int, max_model_len: int) -> int:
    """Floats that one thread needs: queries, sums, and the scores of a tile."""
    pairs = row_tile(group_size) * group_size
    return pairs * (2 * head_dim + score_stride(max_model_len)) + 16


@inlined
def _ceil16(n):
    return (n + 15) // 16


def score_stride(num_keys: int) -> int:
    """Padded so that rows of a long context do not fall on the same cache sets."""
    return (num_keys + 15) // 16 * 16 + 16


_score_stride = inlined(score_stride)


@inlined
def _key_scores(pairs, head_dim, q, q_at, keys, key_at, scores, scores_at, stride):
    """scores[j, 0:16] = q[j] . sixteen keys."""
    j = 0
    while j + 8 <= pairs:
        outer_sum(8, 1, False, q, q_at + j * head_dim, head_dim, keys, key_at, 16, head_dim,
                  scores, scores_at + j * stride, stride)  # fmt: skip
        j += 8
    if j + 4 <= pairs:
        outer_sum(4, 1, False, q, q_at + j * head_dim, head_dim, keys, key_at, 16, head_dim,
                  scores, scores_at + j * stride, stride)  # fmt: skip
        j += 4
    if j + 2 <= pairs:
        outer_sum(2, 1, False, q, q_at + j * head_dim, head_dim, keys, key_at, 16, head_dim,
                  scores, scores_at + j * stride, stride)  # fmt: skip
        j += 2
    if j < pairs:
        outer_sum(1, 1, False, q, q_at + j * head_dim, head_dim, keys, key_at, 16, head_dim,
                  scores, scores_at + j * stride, stride)  # fmt: skip


@inlined
def _add_values(pairs, head_dim, scores, scores_at, stride, values, value_at, count, sums, sums_at):
    """sums[j] += sum over `count` positions of scores[j, position] * value[position]."""
    column = 0
    while column + 64 <= head_dim:
        j = 0
        while j + 4 <= pairs:
            outer_sum(4, 4, True, scores, scores_at + j * stride, stride, values, value_at + column, head_dim, count,
                      sums, sums_at + j * head_dim + column, head_dim)  # fmt: skip
            j += 4
        if j + 2 <= pairs:
            outer_sum(2, 4, True, scores, scores_at + j * stride, stride, values, value_at + column, head_dim, count,
                      sums, sums_at + j * head_dim + column, head_dim)  # fmt: skip
            j += 2
        if j < pairs:
            outer_sum(1, 4, True, scores, scores_at + j * stride, stride, values, value_at + column, head_dim, count,
                      sums, sums_at + j * head_dim + column, head_dim)  # fmt: skip
        column += 64
    while column < head_dim:
        for j in range(pairs):
            outer_sum(1, 1, True, scores, scores_at + j * stride, stride, values, value_at + column, head_dim, count,
                      sums, sums_at + j * head_dim + column, head_dim)  # fmt: skip
        column += 16


@inlined
def _softmax(scores, at, num_valid, num_blocks):
    """Turns the first `num_valid` scores into exponentials, the rest into zeros. Returns 1 / their sum."""
    lowest = np.float32(-np.inf)
    full = num_valid // 16
    rest = num_valid - full * 16
    high = simd.splat(lowest)
    for block in range(full):
        high = simd.maximum(high, simd.load(scores, at + block * 16))
    if rest:
        tail = simd.keep_first(simd.load(scores, at + full * 16), rest, lowest)
        simd.store(scores, at + full * 16, tail)
        high = simd.maximum(high, tail)
    top = simd.splat(simd.max_lanes(high))
    total = simd.splat(np.float32(0.0))
    filled = _ceil16(num_valid)
    for block in range(filled):
        weight = simd.exp(simd.load(scores, at + block * 16) - top)
        simd.store(scores, at + block * 16, weight)
        total = total + weight
    for block in range(filled, num_blocks):
        simd.store(scores, at + block * 16, simd.splat(np.float32(0.0)))
    return np.float32(1.0) / simd.sum_lanes(total)


@device
def attend_tile(q, q_stride, keys, values, kv_at, block_table, table_at, block_size, tile, tile_at, kv_head,
                num_kv_heads, group_size, head_dim, scale, scratch, scratch_at, out, out_stride):  # fmt: skip
    """All heads of `kv_head`'s group, for the rows of one tile. `tile` holds (first row, rows, slot, position)."""
    first_row, num_rows, position = tile[tile_at], tile[tile_at + 1], tile[tile_at + 3]
    pairs = num_rows * group_size
    num_keys = position + num_rows
    num_blocks = _ceil16(num_keys)
    stride = _score_stride(num_keys)
    q_at = scratch_at
    sums_at = q_at + pairs * head_dim
    scores_at = sums_at + pairs * head_dim
    for row in range(num_rows):
        source = (first_row + row) * q_stride + kv_head * group_size * head_dim
        target = row * group_size * head_dim
        for i in range(group_size * head_dim):
            scratch[q_at + target + i] = q[source + i] * scale
            scratch[sums_at + target + i] = np.float32(0.0)

    blocks_per_page = block_size // 16
    page_size = block_size * head_dim
    for block in range(num_blocks):
        page = np.int64(block_table[table_at + block // blocks_per_page])
        at = kv_at + (page * num_kv_heads + kv_head) * page_size + (block % blocks_per_page) * 16 * head_dim
        _key_scores(pairs, head_dim, scratch, q_at, keys, at, scratch, scores_at + block * 16, stride)

    for pair in range(pairs):
        inverse = _softmax(scratch, scores_at + pair * stride, position + pair // group_size + 1, num_blocks)
        # The key block's padding has room for one more number.
        scratch[scores_at + pair * stride + num_blocks * 16] = inverse

    for block in range(num_blocks):
        page = np.int64(block_table[table_at + block // blocks_per_page])
        at = kv_at + (page * num_kv_heads + kv_head) * page_size + (block % blocks_per_page) * 16 * head_dim
        count = min(16, num_keys - block * 16)
        _add_values(pairs, head_dim, scratch, scores_at + block * 16, stride, values, at, count, scratch, sums_at)

    for pair in range(pairs):
        inverse = scratch[scores_at + pair * stride + num_blocks * 16]
        row = first_row + pair // group_size
        target = row * out_stride + (kv_head * group_size + pair % group_size) * head_dim
        for i in range(head_dim):
            out[target + i] = scratch[sums_at + pair * head_dim + i] * inverse
