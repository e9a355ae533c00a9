"""Attention over int8 KV: the same steps in the same order as `attention`, with integer products.

Queries are int8 with a scale per (row, head). Attention weights, times the scales of their values, are bytes with a
scale per (row, head) and 64 positions, counted from the first. So each row's rounding, like all of its sums, depends on
its own history only. The integer sums are exact.

A thread's scratch:  record addresses | value scales | queries | their scales, corrections, 1 / sums | weight scales
                     | sums | scores, which become the weights
"""

import numpy as np

from onward.kernels.cpu import simd
from onward.kernels.cpu.attention import first_visible, highest_score, prepare_scores, sink_weight
from onward.kernels.cpu.attention_tiles import score_stride
from onward.kernels.cpu.dot_instruction import best_level
from onward.kernels.cpu.int8_attention_loops import int8_scores, int8_values
from onward.kernels.cpu.jit import inlined_kernel_function, kernel_function, out_of_line
from onward.kernels.cpu.kv_layout import POSITIONS_PER_RECORD, record_at, record_size_of, values_offset_of

_LEVEL = best_level()
_GROUP = 64
"""Positions that share a weight scale."""

_score_stride = inlined_kernel_function(score_stride)


@inlined_kernel_function
def _quantize_query(q, q_at, head_dim, scale, out, out_at, scales, corrections, pair):
    """Quantizes a query to int8, and stores its scale, which includes `scale`, and its correction."""
    largest = simd.splat(np.float32(0.0))
    for i in range(0, head_dim, 16):
        largest = simd.larger_magnitude(largest, simd.load(q, q_at + i))
    most = simd.max_magnitude(largest)
    factor = simd.splat(np.float32(127.0) / most if most > np.float32(0.0) else np.float32(0.0))
    total = simd.splat_i32(np.int32(0))
    for i in range(0, head_dim, 32):
        low = simd.to_i32(simd.round_even(simd.load(q, q_at + i) * factor))
        high = simd.to_i32(simd.round_even(simd.load(q, q_at + i + 16) * factor))
        simd.store_i8_pair(out, out_at + i, low, high)
        total = total + low + high
    scales[pair] = most / np.float32(127.0) * scale
    corrections[pair] = np.int32(-128) * simd.sum_lanes_i32(total)


@inlined_kernel_function
def _score(pairs, record, head_dim, q, scales, corrections, scores, scores_at, stride):
    """Computes sixteen scores of every pair."""
    j = 0
    while j < pairs:
        at, to, rest = j * head_dim, scores_at + j * stride, pairs - j
        if rest >= 8:
            int8_scores(_LEVEL, 8, record, head_dim, q, at, scales, corrections, j, scores, to, stride)
            j += 8
        elif rest >= 4:
            int8_scores(_LEVEL, 4, record, head_dim, q, at, scales, corrections, j, scores, to, stride)
            j += 4
        elif rest == 3:
            int8_scores(_LEVEL, 3, record, head_dim, q, at, scales, corrections, j, scores, to, stride)
            j += 3
        elif rest == 2:
            int8_scores(_LEVEL, 2, record, head_dim, q, at, scales, corrections, j, scores, to, stride)
            j += 2
        else:
            int8_scores(_LEVEL, 1, record, head_dim, q, at, scales, corrections, j, scores, to, stride)
            j += 1


@inlined_kernel_function
def _weigh_group(scores, at, top, value_scales, value_at, weights, weights_at, total):
    """Turns sixty-four scores into bytes. Returns their scale, and `total` with the weights added before they are
    rounded."""
    e0 = simd.exp(simd.load(scores, at) - top)
    e1 = simd.exp(simd.load(scores, at + 16) - top)
    e2 = simd.exp(simd.load(scores, at + 32) - top)
    e3 = simd.exp(simd.load(scores, at + 48) - top)
    total = total + e0 + e1 + e2 + e3
    w0 = e0 * simd.load(value_scales, value_at)
    w1 = e1 * simd.load(value_scales, value_at + 16)
    w2 = e2 * simd.load(value_scales, value_at + 32)
    w3 = e3 * simd.load(value_scales, value_at + 48)
    most = simd.max_magnitude(simd.larger_magnitude(simd.larger_magnitude(w0, w1), simd.larger_magnitude(w2, w3)))
    factor = simd.splat(np.float32(255.0) / most if most > np.float32(0.0) else np.float32(0.0))
    simd.store_i8_pair(weights, weights_at, simd.to_i32(simd.round_even(w0 * factor)),
                       simd.to_i32(simd.round_even(w1 * factor)))  # fmt: skip
    simd.store_i8_pair(weights, weights_at + 32, simd.to_i32(simd.round_even(w2 * factor)),
                       simd.to_i32(simd.round_even(w3 * factor)))  # fmt: skip
    return most / np.float32(255.0), total


@inlined_kernel_function
def _softmax(scores, at, num_valid, num_groups, value_scales, scales, scales_at):
    """Turns the first `num_valid` scores into weights, bytes in the place of the floats, and the rest into zeros.
    Returns 1 / the sum of the weights."""
    lowest, zero = np.float32(-np.inf), np.float32(0.0)
    filled, groups = (num_valid + 15) // 16, (num_valid + _GROUP - 1) // _GROUP
    tail = at + (filled - 1) * 16
    simd.store(scores, tail, simd.keep_first(simd.load(scores, tail), num_valid - (filled - 1) * 16, lowest))
    high = simd.splat(lowest)
    for block in range(filled):
        high = simd.maximum(high, simd.load(scores, at + block * 16))
    for block in range(filled, groups * 4):
        simd.store(scores, at + block * 16, simd.splat(lowest))
    top = simd.splat(simd.max_lanes(high))
    total = simd.splat(zero)
    weights = simd.as_bytes(scores, at)
    for group in range(groups):
        # A group's bytes end before the next group's floats begin, so they overwrite only floats that were read.
        scale, total = _weigh_group(scores, at + group * _GROUP, top, value_scales, group * _GROUP,
                                    weights, group * _GROUP, total)  # fmt: skip
        scales[scales_at + group] = scale
    for group in range(groups, num_groups):
        scales[scales_at + group] = zero
        for i in range(_GROUP):
            weights[group * _GROUP + i] = 0
    return np.float32(1.0) / simd.sum_lanes(total)


@inlined_kernel_function
def _softmax_with(
    options, scores, at, first_block, first, num_valid, num_groups, value_scales, scales, scales_at, head
):
    """Does the same as `_softmax` over the positions from `first` on, which lies in `first_block`. Groups of 64 still
    begin at multiples of 64."""
    lowest, zero = np.float32(-np.inf), np.float32(0.0)
    filled, groups, first_group = (num_valid + 15) // 16, (num_valid + _GROUP - 1) // _GROUP, first_block // 4
    prepare_scores(scores, at, first_block, first, num_valid, options)
    highest = highest_score(scores, at, first_block, num_valid, head, options)
    for block in range(first_group * 4, first_block):
        simd.store(scores, at + block * 16, simd.splat(lowest))
    for block in range(filled, groups * 4):
        simd.store(scores, at + block * 16, simd.splat(lowest))
    top, total, weights = simd.splat(highest), simd.splat(zero), simd.as_bytes(scores, at)
    for group in range(first_group, groups):
        scale, total = _weigh_group(scores, at + group * _GROUP, top, value_scales, group * _GROUP,
                                    weights, group * _GROUP, total)  # fmt: skip
        scales[scales_at + group] = scale
    for group in range(groups, num_groups):
        scales[scales_at + group] = zero
        for i in range(_GROUP):
            weights[group * _GROUP + i] = 0
    return np.float32(1.0) / (simd.sum_lanes(total) + sink_weight(highest, head, options))


@inlined_kernel_function
def _add_values(pairs, records, first, count, values_at, head_dim, weights, weights_at, step, scales, scales_at,
                scales_step, sums):  # fmt: skip
    """Adds the values of up to sixty-four positions to the sums of every pair."""
    column = 0
    while column < head_dim:
        j = 0
        while j < pairs:
            w, s, to, rest = weights_at + j * step, scales_at + j * scales_step, j * head_dim, pairs - j
            if head_dim - column < 64:
                int8_values(_LEVEL, 1, 2, records, first, count, values_at, column, head_dim, weights, w, step,
                            scales, s, scales_step, sums, to)  # fmt: skip
                j += 1
            elif rest >= 4:
                int8_values(_LEVEL, 4, 4, records, first, count, values_at, column, head_dim, weights, w, step,
                            scales, s, scales_step, sums, to)  # fmt: skip
                j += 4
            elif rest == 3:
                int8_values(_LEVEL, 3, 4, records, first, count, values_at, column, head_dim, weights, w, step,
                            scales, s, scales_step, sums, to)  # fmt: skip
                j += 3
            elif rest == 2:
                int8_values(_LEVEL, 2, 4, records, first, count, values_at, column, head_dim, weights, w, step,
                            scales, s, scales_step, sums, to)  # fmt: skip
                j += 2
            else:
                int8_values(_LEVEL, 1, 4, records, first, count, values_at, column, head_dim, weights, w, step,
                            scales, s, scales_step, sums, to)  # fmt: skip
                j += 1
        column += 32 if head_dim - column < 64 else 64


@kernel_function
def attend_tile_int8(q, q_stride, kv_address, block_table, table_at, block_size, tile, tile_at, kv_head, num_kv_heads,
                     group_size, head_dim, scratch, scratch_at, out, out_stride, options):  # fmt: skip
    """Computes all heads of `kv_head`'s group, for the rows of one tile. `tile` has (first row, rows, slot,
    position)."""
    out_of_line()
    first_row, num_rows = np.int64(tile[tile_at]), np.int64(tile[tile_at + 1])
    position = np.int64(tile[tile_at + 3])
    pairs, num_keys = num_rows * group_size, position + num_rows
    num_blocks, num_groups = (num_keys + 15) // 16, (num_keys + _GROUP - 1) // _GROUP
    parts = block_size // POSITIONS_PER_RECORD
    record_bytes, values_at = record_size_of(head_dim, 1), values_offset_of(head_dim, 1)
    stride = _score_stride(num_keys)

    records = simd.as_int64s(scratch, scratch_at)
    value_scales = simd.shifted(scratch, scratch_at + 2 * num_groups * 4)
    queries = simd.as_bytes(value_scales, num_groups * _GROUP)
    q_scales = simd.shifted(value_scales, num_groups * _GROUP + pairs * head_dim // 4)
    corrections = simd.as_int32s(q_scales, pairs)
    inverses = simd.shifted(q_scales, 2 * pairs)
    weight_scales = simd.shifted(inverses, pairs)
    sums = simd.shifted(weight_scales, pairs * num_groups)
    scores = simd.shifted(sums, pairs * head_dim)

    first_block = 0
    if options is not None:
        first_block = first_visible(position, options.window) // 16
        for block in range(first_block // 4 * 4, first_block):
            simd.store(value_scales, block * 16, simd.splat(np.float32(0.0)))
    for block in range(first_block, num_blocks):
        page = np.int64(block_table[table_at + block // parts])
        records[block] = kv_address + record_at(page, kv_head, block % parts, num_kv_heads, parts, record_bytes)
        scales = simd.load(simd.floats(records[block] + values_at + POSITIONS_PER_RECORD * head_dim), 0)
        known = simd.keep_first(scales, num_keys - block * 16, np.float32(0.0))
        simd.store(value_scales, block * 16, known)
    for block in range(num_blocks, num_groups * 4):
        simd.store(value_scales, block * 16, simd.splat(np.float32(0.0)))
    scale = np.float32(1.0) / np.sqrt(np.float32(head_dim))
    for pair in range(pairs):
        source = (first_row + pair // group_size) * q_stride + (kv_head * group_size + pair % group_size) * head_dim
        _quantize_query(q, source, head_dim, scale, queries, pair * head_dim, q_scales, corrections, pair)
    for i in range(0, pairs * head_dim, 16):
        simd.store(sums, i, simd.splat(np.float32(0.0)))

    for block in range(first_block, num_blocks):
        _score(pairs, records[block], head_dim, queries, q_scales, corrections, scores, block * 16, stride)
    for pair in range(pairs):
        row_position = position + pair // group_size
        if options is None:
            inverses[pair] = _softmax(scores, pair * stride, row_position + 1, num_groups, value_scales, weight_scales,
                                      pair * num_groups)  # fmt: skip
        else:
            first = first_visible(row_position, options.window)
            inverses[pair] = _softmax_with(options, scores, pair * stride, first_block, first, row_position + 1,
                                           num_groups, value_scales, weight_scales, pair * num_groups,
                                           kv_head * group_size + pair % group_size)  # fmt: skip
    weights = simd.as_bytes(scores, 0)
    for group in range(first_block // 4, num_groups):
        start = max(group * 4, first_block)
        _add_values(pairs, records, start, min(group * 4 + 4, num_blocks) - start, values_at, head_dim, weights,
                    start * 16, stride * 4, weight_scales, group, num_groups, sums)  # fmt: skip

    for pair in range(pairs):
        target = (first_row + pair // group_size) * out_stride + (kv_head * group_size + pair % group_size) * head_dim
        inverse = simd.splat(inverses[pair])
        for i in range(0, head_dim, 16):
            simd.store(out, target + i, simd.load(sums, pair * head_dim + i) * inverse)
