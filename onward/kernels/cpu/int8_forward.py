"""A whole forward pass in int8 as one kernel: from token ids to logits, in phases that threads share.

Every matrix product is an integer one, and everything else works on single rows in a fixed order, so a row's logits
depend on its own tokens only: not on the batch, the chunking, the number of threads, or who computed what.

    embed -> [norm+quantize -> qkv -> rope+store -> attention+quantize -> o+add
              -> norm+quantize -> gate/up+silu+quantize -> down+add] * layers -> norm+quantize -> head
"""

from typing import Any, NamedTuple

import numpy as np
from numba.np.numpy_support import carray

from onward.kernels.cpu import simd
from onward.kernels.cpu.batch_attention import attend_item, rotate_rows
from onward.kernels.cpu.batch_fields import BATCH_FIELDS
from onward.kernels.cpu.dot_instruction import best_level
from onward.kernels.cpu.int8_matmul_tile import int8_tile
from onward.kernels.cpu.jit import Kernel, inlined_kernel_function, kernel_function, out_of_line
from onward.kernels.cpu.phases import claim_items, mark_finished, partition_start, wait_for_phase
from onward.kernels.cpu.quantized_rows import QuantizedActivations, quantize_group
from onward.kernels.cpu.rope import mean_square
from onward.kernels.weight_packing import BYTES_RECORD, GROUP, NIBBLES_RECORD, OUTPUT_UNIT

_LEVEL = best_level()

PHASES = ("norm", "qkv", "rope", "attention", "o", "norm", "gate/up", "down")
"""Of each layer, in order; the embedding comes before them, a norm and the head after."""
PHASES_PER_LAYER = len(PHASES)
ROWS_AT_ONCE = 4
"""Rows that share each loaded weight. More would need more registers than there are."""
_MANY_ROWS = 64
TILE_SCRATCH = 2 * ROWS_AT_ONCE * OUTPUT_UNIT

# Columns of the table of a layer's weights; the matrices come first.
QKV, OUT, GATE_UP, DOWN, INPUT_NORM, POST_NORM, QKV_BIAS, Q_NORM, K_NORM = range(9)
# Only `int8_forward_general` reads these. COS and SIN are tables, WINDOW is a number.
(OUT_BIAS, GATE_UP_BIAS, DOWN_BIAS, INPUT_NORM_BIAS, POST_NORM_BIAS, OUT_NORM, OUT_NORM_BIAS, MLP_NORM, MLP_NORM_BIAS,
 SINKS, COS, SIN, WINDOW) = range(9, 22)  # fmt: skip
NUM_WEIGHTS, NUM_MATRICES = 22, 4

QUANTIZED_INPUTS = ("narrow", "heads", "wide")
"""Of qkv, gate/up and head; of o; of down."""

CONTEXT = np.dtype(
    [
        *BATCH_FIELDS,
        ("token_ids", np.int64),  # int32 [rows]
        ("num_sampled", np.int64),
        ("sampled", np.int64),  # int64: rows whose logits are wanted
        ("num_layers", np.int64),
        ("layer_stride", np.int64),
        ("hidden_size", np.int64),
        ("inner_size", np.int64),
        ("vocab_size", np.int64),  # padded to whole pairs of tiles
        ("layers", np.int64),  # int64 [layers, NUM_WEIGHTS]: addresses; 0 where the model has no such weight
        ("is_nibbles", np.int64),  # uint8 [layers, NUM_MATRICES]
        ("embedding", np.int64),
        ("embedding_is_nibbles", np.int64),
        ("head", np.int64),
        ("head_is_nibbles", np.int64),
        ("final_norm", np.int64),
        ("hidden", np.int64),  # float32 [rows, hidden_size]: the residual stream
        ("logits", np.int64),  # float32 [sampled, vocab_size]
        # Of `int8_forward_general` only.
        ("product", np.int64),  # float32 [rows, hidden_size]: what is normed before it is added to the residual stream
        ("position_table", np.int64),  # float32 [positions, hidden_size]; 0: none
        ("final_norm_bias", np.int64),
        ("is_layer_norm", np.int64),
        ("is_parallel", np.int64),
        ("is_gated", np.int64),
        ("activation", np.int64),  # of `activations.KINDS`
        ("embedding_multiplier", np.float32),
        ("logit_softcap", np.float32),  # 0: none
        *((f"{name}_{part}", np.int64) for name in QUANTIZED_INPUTS for part in QuantizedActivations._fields),
    ],
    align=True,
)


def num_phases(num_layers: int, per_layer: int = PHASES_PER_LAYER) -> int:
    """One for the embedding, three for what follows the layers: norm, head, soft-cap."""
    return 4 + num_layers * per_layer


class Product(NamedTuple):
    """A packed matrix and its quantized input."""

    address: Any
    is_nibbles: Any
    num_groups: Any
    source: Any


@kernel_function
def multiply(product, pair, row, num_rows, out, out_at):
    """out[r, 0:32] = outputs 32 * pair and following, for up to four rows from `row` on."""
    out_of_line()
    groups = product.num_groups
    inputs_at, scales_at = row * groups * GROUP, row * groups
    weights = simd.uint8s(product.address)
    x, s, t, c = product.source
    if product.is_nibbles:
        stride = groups * NIBBLES_RECORD
        at = 2 * pair * stride
        if num_rows == 4:
            int8_tile(_LEVEL, True, 4, weights, at, stride, groups, x, inputs_at, s, t, c, scales_at, out, out_at)
        elif num_rows == 3:
            int8_tile(_LEVEL, True, 3, weights, at, stride, groups, x, inputs_at, s, t, c, scales_at, out, out_at)
        elif num_rows == 2:
            int8_tile(_LEVEL, True, 2, weights, at, stride, groups, x, inputs_at, s, t, c, scales_at, out, out_at)
        else:
            int8_tile(_LEVEL, True, 1, weights, at, stride, groups, x, inputs_at, s, t, c, scales_at, out, out_at)
    else:
        stride = groups * BYTES_RECORD
        at = 2 * pair * stride
        if num_rows == 4:
            int8_tile(_LEVEL, False, 4, weights, at, stride, groups, x, inputs_at, s, t, c, scales_at, out, out_at)
        elif num_rows == 3:
            int8_tile(_LEVEL, False, 3, weights, at, stride, groups, x, inputs_at, s, t, c, scales_at, out, out_at)
        elif num_rows == 2:
            int8_tile(_LEVEL, False, 2, weights, at, stride, groups, x, inputs_at, s, t, c, scales_at, out, out_at)
        else:
            int8_tile(_LEVEL, False, 1, weights, at, stride, groups, x, inputs_at, s, t, c, scales_at, out, out_at)


@inlined_kernel_function
def chunk_size(num_items):
    """Items to draw at once: few draws, but enough of them that no thread is left waiting for long."""
    return max(1, num_items // 16)


@inlined_kernel_function
def embedding_value(table, is_nibbles, token, groups, group, i):
    """Input `i` of a group of one token's packed row."""
    lane = token % 16
    if is_nibbles:
        at = ((token // 16) * groups + group) * NIBBLES_RECORD
        both = table[at + (i % 16) // 4 * 64 + lane * 4 + i % 4]
        level = np.float32(both & 15 if i < 16 else both >> 4)
        return simd.half_at(table, at + 256 + 2 * lane) * level + simd.half_at(table, at + 288 + 2 * lane)
    at = ((token // 16) * groups + group) * BYTES_RECORD
    level = np.float32(np.int32(table[at + i // 4 * 64 + lane * 4 + i % 4]) - 128)
    return simd.float_at(table, at + 512 + 4 * lane) * level


@kernel_function
def _embed(c, phase, thread):
    work, hidden, token_ids = simd.int64s(c.work), simd.floats(c.hidden), simd.int32s(c.token_ids)
    table, groups = simd.uint8s(c.embedding), c.hidden_size // GROUP
    for turn in range(c.num_lots):
        lot = (thread + turn) % c.num_lots
        start, end = partition_start(c.num_rows, lot, c.num_lots), partition_start(c.num_rows, lot + 1, c.num_lots)
        row = start + claim_items(work, phase, lot, 1)
        while row < end:
            for group in range(groups):
                for i in range(GROUP):
                    value = embedding_value(
                        table, c.embedding_is_nibbles != 0, np.int64(token_ids[row]), groups, group, i
                    )
                    hidden[row * c.hidden_size + group * GROUP + i] = value
            mark_finished(work, phase, 1)
            row = start + claim_items(work, phase, lot, 1)
    wait_for_phase(work, phase, c.num_rows)


@inlined_kernel_function
def _normalize_row(hidden, at, width, weight, eps, target, target_row):
    inverse = simd.splat(np.float32(1.0) / np.sqrt(mean_square(hidden, at, width) + eps))
    for group in range(width // GROUP):
        i = group * GROUP
        low = simd.load(hidden, at + i) * inverse * simd.load(weight, i)
        high = simd.load(hidden, at + i + 16) * inverse * simd.load(weight, i + 16)
        quantize_group(low, high, target, target_row * (width // GROUP) + group)


@kernel_function
def _normalize(c, phase, thread, weight_address, target):
    out_of_line()
    work, hidden, weight = simd.int64s(c.work), simd.floats(c.hidden), simd.floats(weight_address)
    for turn in range(c.num_lots):
        lot = (thread + turn) % c.num_lots
        start, end = partition_start(c.num_rows, lot, c.num_lots), partition_start(c.num_rows, lot + 1, c.num_lots)
        row = start + claim_items(work, phase, lot, 1)
        while row < end:
            _normalize_row(hidden, row * c.hidden_size, c.hidden_size, weight, c.eps, target, row)
            mark_finished(work, phase, 1)
            row = start + claim_items(work, phase, lot, 1)
    wait_for_phase(work, phase, c.num_rows)


@kernel_function
def _normalize_sampled(c, phase, target):
    """The final norm, only of the rows that the head is wanted for."""
    work, hidden, weight = simd.int64s(c.work), simd.floats(c.hidden), simd.floats(c.final_norm)
    sampled = simd.int64s(c.sampled)
    i = claim_items(work, phase, 0, 1)
    while i < c.num_sampled:
        _normalize_row(hidden, sampled[i] * c.hidden_size, c.hidden_size, weight, c.eps, target, i)
        mark_finished(work, phase, 1)
        i = claim_items(work, phase, 0, 1)
    wait_for_phase(work, phase, c.num_sampled)


@inlined_kernel_function
def row_lots(c, num_rows):
    """Few rows: threads share the outputs, so that each weight is read once. Many: they share the rows, each reads all
    the weights, and what it computes stays in its own cache."""
    return c.num_lots if num_rows >= _MANY_ROWS else 1


@kernel_function
def linear(c, phase, thread, num_rows, product, outputs, bias_address, adds, target, scratch_at):
    """target (+)= source . weights (+ bias), 32 outputs at a time."""
    out_of_line()
    work, scratch, bias = simd.int64s(c.work), simd.floats(c.scratch), simd.floats(bias_address)
    num_pairs, num_lots = outputs // OUTPUT_UNIT, row_lots(c, num_rows)
    chunk = chunk_size(num_pairs)
    for turn in range(num_lots):
        lot = (thread + turn) % num_lots
        first_row, end_row = partition_start(num_rows, lot, num_lots), partition_start(num_rows, lot + 1, num_lots)
        first = claim_items(work, phase, lot, chunk)
        while first < num_pairs:
            last = min(first + chunk, num_pairs)
            for pair in range(first, last):
                column = pair * OUTPUT_UNIT
                for row in range(first_row, end_row, ROWS_AT_ONCE):
                    count = min(ROWS_AT_ONCE, end_row - row)
                    multiply(product, pair, row, count, scratch, scratch_at)
                    for r in range(count):
                        at = (row + r) * outputs + column
                        low = simd.load(scratch, scratch_at + r * OUTPUT_UNIT)
                        high = simd.load(scratch, scratch_at + r * OUTPUT_UNIT + 16)
                        if bias_address != 0:
                            low = low + simd.load(bias, column)
                            high = high + simd.load(bias, column + 16)
                        if adds:
                            low = simd.load(target, at) + low
                            high = simd.load(target, at + 16) + high
                        simd.store(target, at, low)
                        simd.store(target, at + 16, high)
            mark_finished(work, phase, last - first)
            first = claim_items(work, phase, lot, chunk)
    wait_for_phase(work, phase, num_pairs * num_lots)


@inlined_kernel_function
def _silu_and_mul(gate, up):
    one = simd.splat(np.float32(1.0))
    return up * (gate / (one + simd.exp(simd.splat(np.float32(0.0)) - gate)))


@kernel_function
def _gate_and_up(c, phase, thread, product, target, scratch_at):
    """A pair of tiles is sixteen outputs of gate and of up; two pairs make a group of the next product's input."""
    out_of_line()
    work, scratch = simd.int64s(c.work), simd.floats(c.scratch)
    num_groups, num_lots = c.inner_size // GROUP, row_lots(c, c.num_rows)
    chunk = chunk_size(num_groups)
    second_at = scratch_at + ROWS_AT_ONCE * OUTPUT_UNIT
    for turn in range(num_lots):
        lot = (thread + turn) % num_lots
        first_row, end_row = partition_start(c.num_rows, lot, num_lots), partition_start(c.num_rows, lot + 1, num_lots)
        first = claim_items(work, phase, lot, chunk)
        while first < num_groups:
            last = min(first + chunk, num_groups)
            for group in range(first, last):
                for row in range(first_row, end_row, ROWS_AT_ONCE):
                    count = min(ROWS_AT_ONCE, end_row - row)
                    multiply(product, 2 * group, row, count, scratch, scratch_at)
                    multiply(product, 2 * group + 1, row, count, scratch, second_at)
                    for r in range(count):
                        i, j = scratch_at + r * OUTPUT_UNIT, second_at + r * OUTPUT_UNIT
                        low = _silu_and_mul(simd.load(scratch, i), simd.load(scratch, i + 16))
                        high = _silu_and_mul(simd.load(scratch, j), simd.load(scratch, j + 16))
                        quantize_group(low, high, target, (row + r) * num_groups + group)
            mark_finished(work, phase, last - first)
            first = claim_items(work, phase, lot, chunk)
    wait_for_phase(work, phase, num_groups * num_lots)


@kernel_function
def attend_and_quantize(c, phase, thread, kv, kv_at, target, scratch_at, options):
    """Attention; each item also quantizes what it wrote, which no other item shares a group with."""
    out_of_line()
    work, attended, tiles = simd.int64s(c.work), simd.floats(c.attended), simd.int32s(c.tiles)
    item_width = c.num_heads // c.num_kv_heads * c.head_dim
    num_items = c.num_tiles * c.num_kv_heads
    for turn in range(c.num_lots):
        lot = (thread + turn) % c.num_lots
        first, end = partition_start(num_items, lot, c.num_lots), partition_start(num_items, lot + 1, c.num_lots)
        item = first + claim_items(work, phase, lot, 1)
        while item < end:
            attend_item(c, item, kv, kv_at, scratch_at, options)
            tile_at = item // c.num_kv_heads * 4
            first_row = np.int64(tiles[tile_at])
            for row in range(first_row, first_row + np.int64(tiles[tile_at + 1])):
                start = row * c.num_heads * c.head_dim + item % c.num_kv_heads * item_width
                for i in range(start, start + item_width, GROUP):
                    quantize_group(simd.load(attended, i), simd.load(attended, i + 16), target, i // GROUP)
            mark_finished(work, phase, 1)
            item = first + claim_items(work, phase, lot, 1)
    wait_for_phase(work, phase, num_items)


@inlined_kernel_function
def quantized_inputs(values, scales, totals, corrections):
    return QuantizedActivations(simd.int8s(values), simd.floats(scales), simd.floats(totals), simd.int32s(corrections))


@inlined_kernel_function
def _forward(thread, c, kv):
    narrow = quantized_inputs(c.narrow_values, c.narrow_scales, c.narrow_totals, c.narrow_corrections)
    heads = quantized_inputs(c.heads_values, c.heads_scales, c.heads_totals, c.heads_corrections)
    wide = quantized_inputs(c.wide_values, c.wide_scales, c.wide_totals, c.wide_corrections)
    table, kinds = simd.int64s(c.layers), simd.uint8s(c.is_nibbles)
    hidden, qkv = simd.floats(c.hidden), simd.floats(c.qkv)
    scratch_at = thread * c.scratch_stride
    tile_at = scratch_at + c.scratch_stride - TILE_SCRATCH
    heads_width = c.num_heads * c.head_dim
    qkv_width = heads_width + 2 * c.num_kv_heads * c.head_dim
    hidden_groups = c.hidden_size // GROUP
    _embed(c, 0, thread)
    for layer in range(c.num_layers):
        w, n = layer * NUM_WEIGHTS, layer * NUM_MATRICES
        phase = 1 + layer * PHASES_PER_LAYER
        kv_at = layer * c.layer_stride
        _normalize(c, phase, thread, table[w + INPUT_NORM], narrow)
        product = Product(table[w + QKV], kinds[n + QKV] != 0, hidden_groups, narrow)
        linear(c, phase + 1, thread, c.num_rows, product, qkv_width, table[w + QKV_BIAS], False, qkv, tile_at)
        rotate_rows(c, phase + 2, thread, kv, kv_at, table[w + Q_NORM], table[w + K_NORM], None)
        attend_and_quantize(c, phase + 3, thread, kv, kv_at, heads, scratch_at, None)
        product = Product(table[w + OUT], kinds[n + OUT] != 0, heads_width // GROUP, heads)
        linear(c, phase + 4, thread, c.num_rows, product, c.hidden_size, 0, True, hidden, tile_at)
        _normalize(c, phase + 5, thread, table[w + POST_NORM], narrow)
        product = Product(table[w + GATE_UP], kinds[n + GATE_UP] != 0, hidden_groups, narrow)
        _gate_and_up(c, phase + 6, thread, product, wide, tile_at)
        product = Product(table[w + DOWN], kinds[n + DOWN] != 0, c.inner_size // GROUP, wide)
        linear(c, phase + 7, thread, c.num_rows, product, c.hidden_size, 0, True, hidden, tile_at)
    if c.num_sampled:
        phase = 1 + c.num_layers * PHASES_PER_LAYER
        _normalize_sampled(c, phase, narrow)
        product = Product(c.head, c.head_is_nibbles != 0, hidden_groups, narrow)
        linear(c, phase + 1, thread, c.num_sampled, product, c.vocab_size, 0, False, simd.floats(c.logits), tile_at)


def _forward_int8_kv(thread, context):
    c = carray(context, 1)[0]
    _forward(thread, c, simd.uint8s(c.kv))


def _forward_float_kv(thread, context):
    c = carray(context, 1)[0]
    _forward(thread, c, simd.floats(c.kv))


int8_forward = {1: Kernel(_forward_int8_kv, CONTEXT), 4: Kernel(_forward_float_kv, CONTEXT)}
"""By the size of a KV element. Fills `logits` and writes keys and values."""
