"""A whole forward pass in int8 as one kernel: from token ids to logits, in phases that threads share.

Every matrix product is an integer one, and everything else works on single rows in a fixed order. So a row's logits
depend on its own tokens only: not on the batch, the chunking, the number of threads, or which thread computed what.

    embed -> [norm+quantize -> qkv -> rope+store -> attention+quantize -> o+add
              -> norm+quantize -> gate/up+silu+quantize -> down+add] * layers -> norm+quantize -> head
"""

from typing import Any, NamedTuple

import numpy as np
from numba.np.numpy_support import carray

from onward.kernels.cpu import simd
from onward.kernels.cpu.batch_attention import attend_item, rotate_rows
from onward.kernels.cpu.batch_fields import BATCH_FIELDS
from onward.kernels.cpu.jit import Kernel, inlined_kernel_function, kernel_function, out_of_line
from onward.kernels.cpu.phases import claim_items, mark_finished, partition_start, wait_for_phase
from onward.kernels.cpu.quantized_rows import QuantizedActivations, quantize_group
from onward.kernels.cpu.rope import mean_square
from onward.kernels.cpu.weight_kernels import call_multiply
from onward.kernels.cpu.weight_lookup import look_up
from onward.kernels.weight_formats import GROUP, OUTPUT_UNIT

PHASES = ("norm", "qkv", "rope", "attention", "o", "norm", "gate/up", "down")
"""Phases of each layer, in order. The embedding comes before the first layer, a norm and the head after the last."""
PHASES_PER_LAYER = len(PHASES)
ROWS_AT_ONCE = 4
"""Rows that share each loaded weight. More would need more registers than there are."""
_MANY_ROWS = 64
TILE_SCRATCH = 2 * ROWS_AT_ONCE * OUTPUT_UNIT

# Columns of the table of a layer's weights; the matrices come first, as addresses of their `weight_kernels.pair_table`.
QKV, OUT, GATE_UP, DOWN, INPUT_NORM, POST_NORM, QKV_BIAS, Q_NORM, K_NORM = range(9)
# Only `int8_forward_general` reads these. COS and SIN are tables, WINDOW and MLP_SIZE are numbers (0: none), EXPERTS is
# the table of the layer's experts.
(OUT_BIAS, GATE_UP_BIAS, DOWN_BIAS, INPUT_NORM_BIAS, POST_NORM_BIAS, OUT_NORM, OUT_NORM_BIAS, MLP_NORM, MLP_NORM_BIAS,
 SINKS, COS, SIN, WINDOW, MLP_SIZE, ROUTER, ROUTER_BIAS, SELECTION_BIAS, SHARED_GATE, EXPERTS) = range(9, 28)  # fmt: skip
NUM_WEIGHTS, NUM_MATRICES = 28, 4
# Columns of the table of a layer's experts; the matrices come first, as pair tables too.
EXPERT_GATE_UP, EXPERT_DOWN, EXPERT_GATE_UP_BIAS, EXPERT_DOWN_BIAS = range(4)
NUM_EXPERT_COLUMNS, NUM_EXPERT_MATRICES = 4, 2

QUANTIZED_INPUTS = ("narrow", "heads", "wide")
"""Inputs of matrix products: of qkv, gate/up and head; of o; of down."""
EXPERT_INPUTS = ("gathered", "inner")
"""Inputs of the two products of experts: of gate/up; of down."""

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
        ("embedding", np.int64),  # a packed matrix
        ("embedding_fields", np.int64),  # `weight_lookup.format_fields` of it
        ("head", np.int64),  # a pair table
        ("final_norm", np.int64),
        ("hidden", np.int64),  # float32 [rows, hidden_size]: the residual stream
        ("logits", np.int64),  # float32 [sampled, vocab_size]
        # Used by `int8_forward_general` only.
        ("product", np.int64),  # float32 [rows, hidden_size]: a product that is not yet in the residual stream
        ("position_table", np.int64),  # float32 [positions, hidden_size]; 0: none
        ("final_norm_bias", np.int64),
        ("is_layer_norm", np.int64),
        ("is_parallel", np.int64),
        ("is_gated", np.int64),
        ("activation", np.int64),  # a value of `activations.KINDS`
        ("embedding_multiplier", np.float32),
        ("logit_softcap", np.float32),  # 0: none
        ("swiglu_alpha", np.float32),
        ("swiglu_limit", np.float32),  # 0: activation(gate) * up
        # Used by models with experts. An assignment is a row and one of its experts: number row * top_k + place.
        ("num_experts", np.int64),
        ("score_stride", np.int64),  # `num_experts`, rounded up to whole vectors
        ("top_k", np.int64),
        ("renormalize", np.int64),
        ("is_sigmoid", np.int64),
        ("num_groups", np.int64),
        ("top_groups", np.int64),
        ("weight_multiplier", np.float32),
        ("expert_size", np.int64),
        ("normed", np.int64),  # float32 [rows, hidden_size]: input of the expert router
        ("scores", np.int64),  # float32 [rows, score_stride]
        (
            "ranks",
            np.int64,
        ),  # float32 [rows, score_stride]: what experts are chosen by; the same array without sigmoids
        ("chosen", np.int64),  # int32 [assignments]: the expert of each
        ("shares", np.int64),  # float32 [assignments]: factor of the expert's output
        ("shared_shares", np.int64),  # float32 [rows]: factor of the shared expert's output
        ("expert_starts", np.int64),  # int32 [experts + 1]: where each expert's assignments begin in `assignments`
        ("assignments", np.int64),  # int32 [assignments]: sorted by expert, then by row
        ("sorted_at", np.int64),  # int32 [assignments]: index of each assignment in `assignments`
        ("expert_output", np.int64),  # float32 [assignments, hidden_size], sorted
        ("shared_output", np.int64),  # float32 [rows, hidden_size]
        *(
            (f"{name}_{part}", np.int64)
            for name in (*QUANTIZED_INPUTS, *EXPERT_INPUTS)
            for part in QuantizedActivations._fields
        ),
    ],
    align=True,
)


def num_phases(num_layers: int, per_layer: int = PHASES_PER_LAYER) -> int:
    """Returns the number of phases of a forward pass: one for the embedding, those of the layers, and three after them
    (norm, head, soft-cap)."""
    return 4 + num_layers * per_layer


class Product(NamedTuple):
    """A matrix and its quantized input."""

    pairs: Any
    """Address of its `weight_kernels.pair_table`."""
    num_groups: Any
    source: Any


@kernel_function
def multiply(product, pair, row, num_rows, out, out_at):
    """Computes out[r, 0:32] = outputs 32 * pair and following, for up to four rows from `row` on."""
    pairs, groups = simd.int64s(product.pairs), product.num_groups
    x, s, t, c, low = product.source
    at = row * groups
    call_multiply(pairs[2 * pair + 1], pairs[2 * pair], groups, num_rows, simd.shifted(x, at * GROUP),
                  simd.shifted(s, at), simd.shifted(t, at), simd.shifted(c, at), simd.shifted(low, at),
                  simd.shifted(out, out_at))  # fmt: skip


@inlined_kernel_function
def chunk_size(num_items):
    """Returns the number of items to claim at once: few claims, but enough of them that no thread waits for long."""
    return max(1, num_items // 16)


@kernel_function
def _embed(c, phase, thread):
    work, hidden, token_ids = simd.int64s(c.work), simd.floats(c.hidden), simd.int32s(c.token_ids)
    table, fields, groups = simd.uint8s(c.embedding), simd.int64s(c.embedding_fields), c.hidden_size // GROUP
    for turn in range(c.num_lots):
        lot = (thread + turn) % c.num_lots
        start, end = partition_start(c.num_rows, lot, c.num_lots), partition_start(c.num_rows, lot + 1, c.num_lots)
        row = start + claim_items(work, phase, lot, 1)
        while row < end:
            look_up(table, fields, groups, np.int64(token_ids[row]), hidden, row * c.hidden_size)
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
    """Applies the final norm to the rows whose logits are wanted."""
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
    """Returns the number of partitions of a product's rows. With few rows there is one: threads share the outputs, so
    that each weight is read once. With many rows threads share the rows: each thread reads all weights, and its results
    stay in its own cache."""
    return c.num_lots if num_rows >= _MANY_ROWS else 1


@kernel_function
def linear(c, phase, thread, num_rows, product, outputs, bias_address, adds, target, scratch_at):
    """Computes target (+)= source . weights (+ bias), 32 outputs at a time."""
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
    """Computes silu(gate) * up and quantizes it. A pair of tiles is sixteen outputs of gate and of up; two pairs make a
    group of the next product's input."""
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
    """Computes attention. Each item also quantizes its own output; no group has values of two items."""
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
def quantized_inputs(values, scales, totals, corrections, low_corrections):
    return QuantizedActivations(
        simd.int8s(values), simd.floats(scales), simd.floats(totals), simd.int32s(corrections),
        simd.int32s(low_corrections),
    )  # fmt: skip


@inlined_kernel_function
def _forward(thread, c, kv):
    narrow = quantized_inputs(
        c.narrow_values, c.narrow_scales, c.narrow_totals, c.narrow_corrections, c.narrow_low_corrections
    )
    heads = quantized_inputs(
        c.heads_values, c.heads_scales, c.heads_totals, c.heads_corrections, c.heads_low_corrections
    )
    wide = quantized_inputs(c.wide_values, c.wide_scales, c.wide_totals, c.wide_corrections, c.wide_low_corrections)
    table = simd.int64s(c.layers)
    hidden, qkv = simd.floats(c.hidden), simd.floats(c.qkv)
    scratch_at = thread * c.scratch_stride
    tile_at = scratch_at + c.scratch_stride - TILE_SCRATCH
    heads_width = c.num_heads * c.head_dim
    qkv_width = heads_width + 2 * c.num_kv_heads * c.head_dim
    hidden_groups = c.hidden_size // GROUP
    _embed(c, 0, thread)
    for layer in range(c.num_layers):
        w = layer * NUM_WEIGHTS
        phase = 1 + layer * PHASES_PER_LAYER
        kv_at = layer * c.layer_stride
        _normalize(c, phase, thread, table[w + INPUT_NORM], narrow)
        product = Product(table[w + QKV], hidden_groups, narrow)
        linear(c, phase + 1, thread, c.num_rows, product, qkv_width, table[w + QKV_BIAS], False, qkv, tile_at)
        rotate_rows(c, phase + 2, thread, kv, kv_at, table[w + Q_NORM], table[w + K_NORM], None)
        attend_and_quantize(c, phase + 3, thread, kv, kv_at, heads, scratch_at, None)
        product = Product(table[w + OUT], heads_width // GROUP, heads)
        linear(c, phase + 4, thread, c.num_rows, product, c.hidden_size, 0, True, hidden, tile_at)
        _normalize(c, phase + 5, thread, table[w + POST_NORM], narrow)
        product = Product(table[w + GATE_UP], hidden_groups, narrow)
        _gate_and_up(c, phase + 6, thread, product, wide, tile_at)
        product = Product(table[w + DOWN], c.inner_size // GROUP, wide)
        linear(c, phase + 7, thread, c.num_rows, product, c.hidden_size, 0, True, hidden, tile_at)
    if c.num_sampled:
        phase = 1 + c.num_layers * PHASES_PER_LAYER
        _normalize_sampled(c, phase, narrow)
        product = Product(c.head, hidden_groups, narrow)
        linear(c, phase + 1, thread, c.num_sampled, product, c.vocab_size, 0, False, simd.floats(c.logits), tile_at)


def _forward_int8_kv(thread, context):
    c = carray(context, 1)[0]
    _forward(thread, c, simd.uint8s(c.kv))


def _forward_float_kv(thread, context):
    c = carray(context, 1)[0]
    _forward(thread, c, simd.floats(c.kv))


int8_forward = {1: Kernel(_forward_int8_kv, CONTEXT), 4: Kernel(_forward_float_kv, CONTEXT)}
"""Kernels by the size of a KV element in bytes. Each fills `logits` and writes keys and values."""
