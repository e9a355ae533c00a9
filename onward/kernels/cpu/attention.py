"""Attention over paged float32 KV, read in place. One function serves prefill, chunk, decode and verification.

A tile is up to `row_tile` consecutive positions of one slot. Its rows share each loaded key, but each (row, head) keeps
its own order: a dot product along head_dim, a softmax over sixteen lanes folded at the end, a sum over positions from
first to last. So a row's bits depend on its own history only, not on the tile, the batch or the thread.
"""

import numpy as np

from onward.kernels.cpu import simd
from onward.kernels.cpu.activations import soft_cap
from onward.kernels.cpu.attention_tiles import score_stride
from onward.kernels.cpu.jit import inlined_kernel_function, kernel_function, out_of_line
from onward.kernels.cpu.kv_layout import POSITIONS_PER_RECORD, record_at, record_size_of, values_offset_of
from onward.kernels.cpu.outer_product import outer_sum

_score_stride = inlined_kernel_function(score_stride)


@inlined_kernel_function
def _key_scores(pairs, head_dim, q, q_at, keys, key_at, scores, scores_at, stride):
    """Computes scores[j, 0:16] = q[j] . sixteen keys."""
    j = 0
    while j < pairs:
        qj, sj, rest = q_at + j * head_dim, scores_at + j * stride, pairs - j
        if rest >= 8:
            outer_sum(8, 1, False, q, qj, head_dim, keys, key_at, 16, head_dim, scores, sj, stride)
            j += 8
        elif rest >= 4:
            outer_sum(4, 1, False, q, qj, head_dim, keys, key_at, 16, head_dim, scores, sj, stride)
            j += 4
        elif rest == 3:
            outer_sum(3, 1, False, q, qj, head_dim, keys, key_at, 16, head_dim, scores, sj, stride)
            j += 3
        elif rest == 2:
            outer_sum(2, 1, False, q, qj, head_dim, keys, key_at, 16, head_dim, scores, sj, stride)
            j += 2
        else:
            outer_sum(1, 1, False, q, qj, head_dim, keys, key_at, 16, head_dim, scores, sj, stride)
            j += 1


@inlined_kernel_function
def _add_values(pairs, head_dim, scores, scores_at, stride, values, value_at, count, sums, sums_at):
    """Adds the weighted values: sums[j] += sum over `count` positions of scores[j, position] * value[position]."""
    column = 0
    while column + 64 <= head_dim:
        v, j = value_at + column, 0
        while j < pairs:
            pj, sj, rest = scores_at + j * stride, sums_at + j * head_dim + column, pairs - j
            if rest >= 4:
                outer_sum(4, 4, True, scores, pj, stride, values, v, head_dim, count, sums, sj, head_dim)
                j += 4
            elif rest == 3:
                outer_sum(3, 4, True, scores, pj, stride, values, v, head_dim, count, sums, sj, head_dim)
                j += 3
            elif rest == 2:
                outer_sum(2, 4, True, scores, pj, stride, values, v, head_dim, count, sums, sj, head_dim)
                j += 2
            else:
                outer_sum(1, 4, True, scores, pj, stride, values, v, head_dim, count, sums, sj, head_dim)
                j += 1
        column += 64
    while column < head_dim:
        for j in range(pairs):
            pj, sj = scores_at + j * stride, sums_at + j * head_dim + column
            outer_sum(1, 1, True, scores, pj, stride, values, value_at + column, head_dim, count, sums, sj, head_dim)
        column += 16


@inlined_kernel_function
def _softmax(scores, at, num_valid, num_blocks):
    """Turns the first `num_valid` scores into exponentials, the rest into zeros. Returns 1 / their sum."""
    lowest, zero = np.float32(-np.inf), np.float32(0.0)
    full = num_valid // 16
    filled = (num_valid + 15) // 16
    if filled > full:
        tail = simd.keep_first(simd.load(scores, at + full * 16), num_valid - full * 16, lowest)
        simd.store(scores, at + full * 16, tail)
    high = simd.splat(lowest)
    for block in range(filled):
        high = simd.maximum(high, simd.load(scores, at + block * 16))
    top = simd.splat(simd.max_lanes(high))
    total = simd.splat(zero)
    for block in range(filled):
        weight = simd.exp(simd.load(scores, at + block * 16) - top)
        simd.store(scores, at + block * 16, weight)
        total = total + weight
    for block in range(filled, num_blocks):
        simd.store(scores, at + block * 16, simd.splat(zero))
    return np.float32(1.0) / simd.sum_lanes(total)


@inlined_kernel_function
def first_visible(position, window):
    """Returns the first position that a row attends to."""
    return max(0, position - window + 1) if window > 0 else 0


@inlined_kernel_function
def prepare_scores(scores, at, first_block, first, num_valid, options):
    """Caps a row's scores, and sets scores before `first` and from `num_valid` on to minus infinity."""
    lowest = np.float32(-np.inf)
    filled = (num_valid + 15) // 16
    if options.softcap > np.float32(0.0):
        for block in range(first_block, filled):
            simd.store(scores, at + block * 16, soft_cap(simd.load(scores, at + block * 16), options.softcap))
    for i in range(first_block * 16, first):
        scores[at + i] = lowest
    for i in range(num_valid, filled * 16):
        scores[at + i] = lowest


@inlined_kernel_function
def highest_score(scores, at, first_block, num_valid, head, options):
    """Returns the maximum of a row's scores after `prepare_scores`, the head's sink included."""
    high = simd.splat(np.float32(-np.inf))
    for block in range(first_block, (num_valid + 15) // 16):
        high = simd.maximum(high, simd.load(scores, at + block * 16))
    top = simd.max_lanes(high)
    if options.sinks != 0:
        top = max(top, simd.floats(options.sinks)[head])
    return top


@inlined_kernel_function
def sink_weight(top, head, options):
    if options.sinks == 0:
        return np.float32(0.0)
    return simd.max_lanes(simd.exp(simd.splat(simd.floats(options.sinks)[head] - top)))


@inlined_kernel_function
def _softmax_with(options, scores, at, first_block, first, num_valid, num_blocks, head):
    """Does the same as `_softmax` over the positions from `first` on, which lies in `first_block`."""
    prepare_scores(scores, at, first_block, first, num_valid, options)
    highest = highest_score(scores, at, first_block, num_valid, head, options)
    top, total = simd.splat(highest), simd.splat(np.float32(0.0))
    filled = (num_valid + 15) // 16
    for block in range(first_block, filled):
        weight = simd.exp(simd.load(scores, at + block * 16) - top)
        simd.store(scores, at + block * 16, weight)
        total = total + weight
    for block in range(filled, num_blocks):
        simd.store(scores, at + block * 16, simd.splat(np.float32(0.0)))
    return np.float32(1.0) / (simd.sum_lanes(total) + sink_weight(highest, head, options))


@kernel_function
def attend_tile(q, q_stride, kv, kv_at, block_table, table_at, block_size, tile, tile_at, kv_head,
                num_kv_heads, group_size, head_dim, scratch, q_at, out, out_stride, options):  # fmt: skip
    """Computes all heads of `kv_head`'s group, for the rows of one tile. `tile` has (first row, rows, slot,
    position)."""
    out_of_line()
    first_row, num_rows = np.int64(tile[tile_at]), np.int64(tile[tile_at + 1])
    position = np.int64(tile[tile_at + 3])
    pairs = num_rows * group_size
    num_keys = position + num_rows
    num_blocks = (num_keys + 15) // 16
    parts = block_size // POSITIONS_PER_RECORD
    record = record_size_of(head_dim, 4)
    values_at = values_offset_of(head_dim, 4)
    stride = _score_stride(num_keys)
    scale = np.float32(1.0) / np.sqrt(np.float32(head_dim))
    first_block = 0
    if options is not None:
        first_block = first_visible(position, options.window) // 16
    sums_at = q_at + pairs * head_dim
    scores_at = sums_at + pairs * head_dim
    for row in range(num_rows):
        source = (first_row + row) * q_stride + kv_head * group_size * head_dim
        target = row * group_size * head_dim
        for i in range(group_size * head_dim):
            scratch[q_at + target + i] = q[source + i] * scale
            scratch[sums_at + target + i] = np.float32(0.0)

    for block in range(first_block, num_blocks):
        page = np.int64(block_table[table_at + block // parts])
        at = kv_at + record_at(page, kv_head, block % parts, num_kv_heads, parts, record)
        to = scores_at + block * 16
        _key_scores(pairs, head_dim, scratch, q_at, kv, at, scratch, to, stride)

    for pair in range(pairs):
        row_position, at = position + pair // group_size, scores_at + pair * stride
        if options is None:
            inverse = _softmax(scratch, at, row_position + 1, num_blocks)
        else:
            inverse = _softmax_with(options, scratch, at, first_block, first_visible(row_position, options.window),
                                    row_position + 1, num_blocks, kv_head * group_size + pair % group_size)  # fmt: skip
        scratch[scores_at + pair * stride + num_blocks * 16] = inverse  # the padding has room for one more number

    for block in range(first_block, num_blocks):
        page = np.int64(block_table[table_at + block // parts])
        at = kv_at + record_at(page, kv_head, block % parts, num_kv_heads, parts, record) + values_at
        weights = scores_at + block * 16
        count = min(16, num_keys - block * 16)
        _add_values(pairs, head_dim, scratch, weights, stride, kv, at, count, scratch, sums_at)

    for pair in range(pairs):
        inverse = scratch[scores_at + pair * stride + num_blocks * 16]
        row = first_row + pair // group_size
        target = row * out_stride + (kv_head * group_size + pair % group_size) * head_dim
        for i in range(head_dim):
            out[target + i] = scratch[sums_at + pair * head_dim + i] * inverse
