"""A whole forward pass in int8 as one kernel: from token ids to logits, in phases that threads share.

Every matrix product is an integer one, and everything else works on single rows in a fixed order, so a row's logits
depend on its own tokens only: not on the batch, the chunking, the number of threads, or who computed what.

    embed -> [norm+quantize -> qkv -> rope+store -> attention+quantize -> o+add
              -> norm+quantize -> gate/up+silu+quantize -> down+add] * layers -> norm+quantize -> head
"""

from typing import NamedTuple

import numba
import numpy as np

from onward.kernels.cpu import simd
from onward.kernels.cpu.attention import attend_tile
from onward.kernels.cpu.dot import best_level
from onward.kernels.cpu.int8_tile import int8_tile
from onward.kernels.cpu.jit import device, inlined, kernel
from onward.kernels.cpu.phases import WORDS_PER_PHASE, await_all, draw, finish
from onward.kernels.cpu.quantized import Quantized, quantize_group
from onward.kernels.cpu.rope import mean_square, rotate_and_store
from onward.kernels.packing import BYTES_RECORD, GROUP, NIBBLES_RECORD, OUTPUT_UNIT

_LEVEL = best_level()

PHASES_PER_LAYER = 8
# Columns of the tables of weights: where each matrix or vector of a layer is.
QKV, O, GATE_UP, DOWN, INPUT_NORM, POST_NORM, QKV_BIAS, Q_NORM, K_NORM = range(9)
NUM_WEIGHTS = 9


class Shape(NamedTuple):
    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    """Padded to a multiple of 32."""
    eps: np.float32


class Weights(NamedTuple):
    """Addresses, since layers differ in format and may lie in different files. Whoever builds this keeps the arrays."""

    layers: np.ndarray
    """int64 [layers, NUM_WEIGHTS]; 0 where the model has no such weight."""
    is_nibbles: np.ndarray
    """uint8 [layers, 4]."""
    ends: np.ndarray
    """int64: embedding, head, final norm."""
    ends_are_nibbles: np.ndarray
    """uint8: embedding, head."""


class Batch(NamedTuple):
    """The arrays of `layers.rows.Rows`, flat."""

    token_ids: np.ndarray
    positions: np.ndarray
    pages: np.ndarray
    tiles: np.ndarray
    sampled: np.ndarray
    block_tables: np.ndarray
    table_stride: int


class Memory(NamedTuple):
    kv: np.ndarray
    layer_stride: int
    block_size: int
    cos: np.ndarray
    sin: np.ndarray


class Buffers(NamedTuple):
    hidden: np.ndarray
    """The residual stream, float32 [rows, hidden]."""
    qkv: np.ndarray
    attended: np.ndarray
    logits: np.ndarray
    scratch: np.ndarray
    """Per thread: attention's working memory, then two tiles of products."""
    scratch_stride: int
    work: np.ndarray


class Product(NamedTuple):
    """One packed matrix."""

    address: int
    is_nibbles: bool
    num_groups: int


@inlined
def _product(address, is_nibbles, inputs):
    return Product(address, is_nibbles != 0, inputs // GROUP)


@device
def multiply(product, pair, source, row, num_rows, out, out_at):
    """out[r, 0:32] = outputs 32 * pair and following, for up to four rows from `row` on."""
    groups = product.num_groups
    inputs_at, scales_at = row * groups * GROUP, row * groups
    weights = simd.byte_pointer(product.address)
    x, s, t, c = source.values, source.scales, source.totals, source.corrections
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


ROWS_AT_ONCE = 4


@inlined
def _chunk(num_items):
    """Items to draw at once: few draws, but enough of them that no thread is left waiting for long."""
    return max(1, num_items // 16)


@device
def _embed(work, phase, num_rows, token_ids, address, is_nibbles, width, hidden):
    table = simd.byte_pointer(address)
    groups = width // GROUP
    record = NIBBLES_RECORD if is_nibbles else BYTES_RECORD
    row = draw(work, phase, 1)
    while row < num_rows:
        token = np.int64(token_ids[row])
        for group in range(groups):
            at = ((token // 16) * groups + group) * record
            lane = token % 16
            for i in range(GROUP):
                if is_nibbles:
                    both = simd.byte_at(table, at + (i % 16) // 4 * 64 + lane * 4 + i % 4)
                    level = both & 15 if i < 16 else both >> 4
                    value = simd.half_at(table, at + 256 + 2 * lane) * np.float32(level) + simd.half_at(
                        table, at + 288 + 2 * lane
                    )
                else:
                    level = np.int32(simd.byte_at(table, at + i // 4 * 64 + lane * 4 + i % 4)) - 128
                    value = np.float32(level) * simd.float_at(table, at + 512 + 4 * lane)
                hidden[row * width + group * GROUP + i] = value
        finish(work, phase, 1)
        row = draw(work, phase, 1)
    await_all(work, phase, num_rows)


@inlined
def _normalize_row(hidden, at, width, weight, eps, target, first_group):
    inverse = simd.splat(np.float32(1.0) / np.sqrt(mean_square(hidden, at, width) + eps))
    for group in range(width // GROUP):
        i = group * GROUP
        low = simd.load(hidden, at + i) * inverse * simd.load(weight, i)
        high = simd.load(hidden, at + i + 16) * inverse * simd.load(weight, i + 16)
        quantize_group(low, high, target, first_group + group)


@device
def _normalize(work, phase, num_rows, hidden, width, weight_address, eps, target):
    weight = simd.float_pointer(weight_address)
    row = draw(work, phase, 1)
    while row < num_rows:
        _normalize_row(hidden, row * width, width, weight, eps, target, row * (width // GROUP))
        finish(work, phase, 1)
        row = draw(work, phase, 1)
    await_all(work, phase, num_rows)


@device
def _linear(work, phase, num_rows, product, source, outputs, bias_address, adds, target, scratch, scratch_at):
    """target (+)= source . weights (+ bias), 32 outputs at a time."""
    num_pairs = outputs // OUTPUT_UNIT
    chunk = _chunk(num_pairs)
    bias = simd.float_pointer(bias_address)
    first = draw(work, phase, chunk)
    while first < num_pairs:
        last = min(first + chunk, num_pairs)
        for pair in range(first, last):
            column = pair * OUTPUT_UNIT
            for row in range(0, num_rows, ROWS_AT_ONCE):
                count = min(ROWS_AT_ONCE, num_rows - row)
                multiply(product, pair, source, row, count, scratch, scratch_at)
                for r in range(count):
                    at = (row + r) * outputs + column
                    low = simd.load(scratch, scratch_at + r * 32)
                    high = simd.load(scratch, scratch_at + r * 32 + 16)
                    if bias_address != 0:
                        low = low + simd.load(bias, column)
                        high = high + simd.load(bias, column + 16)
                    if adds:
                        low = simd.load(target, at) + low
                        high = simd.load(target, at + 16) + high
                    simd.store(target, at, low)
                    simd.store(target, at + 16, high)
        finish(work, phase, last - first)
        first = draw(work, phase, chunk)
    await_all(work, phase, num_pairs)


@inlined
def _silu_times(gate, up):
    one = simd.splat(np.float32(1.0))
    return up * (gate / (one + simd.exp(simd.splat(np.float32(0.0)) - gate)))


@device
def _gate_and_up(work, phase, num_rows, product, source, inner, target, scratch, scratch_at):
    """A pair of tiles is sixteen outputs of gate and of up; two pairs make a group of the next product's input."""
    num_groups = inner // GROUP
    chunk = _chunk(num_groups)
    first = draw(work, phase, chunk)
    while first < num_groups:
        last = min(first + chunk, num_groups)
        for group in range(first, last):
            for row in range(0, num_rows, ROWS_AT_ONCE):
                count = min(ROWS_AT_ONCE, num_rows - row)
                second_at = scratch_at + ROWS_AT_ONCE * 32
                multiply(product, 2 * group, source, row, count, scratch, scratch_at)
                multiply(product, 2 * group + 1, source, row, count, scratch, second_at)
                for r in range(count):
                    i, j = scratch_at + r * 32, second_at + r * 32
                    low = _silu_times(simd.load(scratch, i), simd.load(scratch, i + 16))
                    high = _silu_times(simd.load(scratch, j), simd.load(scratch, j + 16))
                    quantize_group(low, high, target, (row + r) * num_groups + group)
        finish(work, phase, last - first)
        first = draw(work, phase, chunk)
    await_all(work, phase, num_groups)


@device
def _rotate(work, phase, num_rows, shape, batch, memory, kv_at, qkv, q_norm_address, k_norm_address):
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    row = draw(work, phase, 1)
    while row < num_rows:
        rotate_and_store(qkv, row * width, np.int64(batch.positions[row]), np.int64(batch.pages[row]),
                         memory.block_size, shape.num_heads, shape.num_kv_heads, shape.head_dim, memory.cos, memory.sin,
                         q_norm_address, k_norm_address, shape.eps, memory.kv, kv_at)  # fmt: skip
        finish(work, phase, 1)
        row = draw(work, phase, 1)
    await_all(work, phase, num_rows)


@device
def _attend(work, phase, num_tiles, shape, batch, memory, kv_at, qkv, target, out, scratch, scratch_at):
    """The longest histories tend to come last, so the last tiles are drawn first."""
    group_size = shape.num_heads // shape.num_kv_heads
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    out_width = shape.num_heads * shape.head_dim
    scale = np.float32(1.0) / np.sqrt(np.float32(shape.head_dim))
    num_items = num_tiles * shape.num_kv_heads
    item = draw(work, phase, 1)
    while item < num_items:
        tile_at = (num_tiles - 1 - item // shape.num_kv_heads) * 4
        kv_head = item % shape.num_kv_heads
        table_at = np.int64(batch.tiles[tile_at + 2]) * batch.table_stride
        attend_tile(qkv, width, memory.kv, kv_at, batch.block_tables, table_at, memory.block_size,
                    batch.tiles, tile_at, kv_head, shape.num_kv_heads, group_size, shape.head_dim, scale,
                    scratch, scratch_at, out, out_width)  # fmt: skip
        first_row = np.int64(batch.tiles[tile_at])
        for row in range(first_row, first_row + np.int64(batch.tiles[tile_at + 1])):
            start = row * out_width + kv_head * group_size * shape.head_dim
            for i in range(start, start + group_size * shape.head_dim, GROUP):
                quantize_group(simd.load(out, i), simd.load(out, i + 16), target, i // GROUP)
        finish(work, phase, 1)
        item = draw(work, phase, 1)
    await_all(work, phase, num_items)


@device
def _layer(layer, shape, weights, batch, memory, b, narrow, heads, wide, num_rows, scratch_at, tile_at):
    at = layer * NUM_WEIGHTS
    phase = 1 + layer * PHASES_PER_LAYER
    table, kinds, work = weights.layers, weights.is_nibbles, b.work
    kv_at = layer * memory.layer_stride
    heads_width = shape.num_heads * shape.head_dim
    qkv_width = heads_width + 2 * shape.num_kv_heads * shape.head_dim

    _normalize(work, phase, num_rows, b.hidden, shape.hidden, table[at + INPUT_NORM], shape.eps, narrow)
    qkv = _product(table[at + QKV], kinds[layer * 4 + QKV], shape.hidden)
    _linear(work, phase + 1, num_rows, qkv, narrow, qkv_width, table[at + QKV_BIAS], False, b.qkv,
            b.scratch, tile_at)  # fmt: skip
    _rotate(work, phase + 2, num_rows, shape, batch, memory, kv_at, b.qkv, table[at + Q_NORM], table[at + K_NORM])
    _attend(work, phase + 3, batch.tiles.size // 4, shape, batch, memory, kv_at, b.qkv, heads, b.attended,
            b.scratch, scratch_at)  # fmt: skip
    o = _product(table[at + O], kinds[layer * 4 + O], heads_width)
    _linear(work, phase + 4, num_rows, o, heads, shape.hidden, 0, True, b.hidden, b.scratch, tile_at)
    _normalize(work, phase + 5, num_rows, b.hidden, shape.hidden, table[at + POST_NORM], shape.eps, narrow)
    gate_up = _product(table[at + GATE_UP], kinds[layer * 4 + GATE_UP], shape.hidden)
    _gate_and_up(work, phase + 6, num_rows, gate_up, narrow, shape.inner, wide, b.scratch, tile_at)
    down = _product(table[at + DOWN], kinds[layer * 4 + DOWN], shape.inner)
    _linear(work, phase + 7, num_rows, down, wide, shape.hidden, 0, True, b.hidden, b.scratch, tile_at)


@device
def _head(shape, weights, batch, b, narrow, tile_at):
    phase = 1 + shape.num_layers * PHASES_PER_LAYER
    weight = simd.float_pointer(weights.ends[2])
    count = batch.sampled.size
    i = draw(b.work, phase, 1)
    while i < count:
        _normalize_row(b.hidden, batch.sampled[i] * shape.hidden, shape.hidden, weight, shape.eps, narrow,
                       i * (shape.hidden // GROUP))  # fmt: skip
        finish(b.work, phase, 1)
        i = draw(b.work, phase, 1)
    await_all(b.work, phase, count)
    head = _product(weights.ends[1], weights.ends_are_nibbles[1], shape.hidden)
    _linear(b.work, phase + 1, count, head, narrow, shape.vocab, 0, False, b.logits, b.scratch, tile_at)


@device
def _run(thread, shape, weights, batch, memory, b, narrow, heads, wide):
    num_rows = batch.token_ids.size
    scratch_at = thread * b.scratch_stride
    tile_at = (thread + 1) * b.scratch_stride - TILE_SCRATCH
    _embed(b.work, 0, num_rows, batch.token_ids, weights.ends[0], weights.ends_are_nibbles[0], shape.hidden, b.hidden)
    for layer in range(shape.num_layers):
        _layer(layer, shape, weights, batch, memory, b, narrow, heads, wide, num_rows, scratch_at, tile_at)
    if batch.sampled.size:
        _head(shape, weights, batch, b, narrow, tile_at)


TILE_SCRATCH = 2 * ROWS_AT_ONCE * 32


def num_phases(num_layers: int) -> int:
    return 3 + num_layers * PHASES_PER_LAYER


def work_words(num_layers: int) -> int:
    return num_phases(num_layers) * WORDS_PER_PHASE


@kernel
def int8_forward(shape, weights, batch, memory, buffers, narrow, heads, wide, num_threads):
    """Fills `buffers.logits` [sampled rows, vocab] and writes keys and values.

    `narrow` holds the inputs of qkv, gate/up and head, `heads` those of o, `wide` those of down.
    """
    buffers.work[:] = 0
    for thread in numba.prange(num_threads):
        _run(thread, shape, weights, batch, memory, buffers, narrow, heads, wide)
