"""The forward pass in int8 of models that are more than a Llama: the phases of `int8_forward`, and what may lie between
them. Each phase keeps its rows apart and its sums in order, so what is said there about a row's logits holds here too.

    embed -> [norm -> qkv -> rope+store -> attention -> o -> norm of it -> norm -> gate/up -> down -> norm of it] * layers
          -> norm -> head

A phase that a model does not have is skipped. A kernel of its own, so that a Llama's is not compiled with all of this.
"""

import numpy as np
from numba.np.numpy_support import carray

from onward.kernels.cpu import simd
from onward.kernels.cpu.activations import activate, soft_cap
from onward.kernels.cpu.batch_attention import rotate_rows
from onward.kernels.cpu.batch_fields import AttentionOptions
from onward.kernels.cpu.int8_forward import (
    CONTEXT,
    COS,
    DOWN,
    DOWN_BIAS,
    GATE_UP,
    GATE_UP_BIAS,
    INPUT_NORM,
    INPUT_NORM_BIAS,
    K_NORM,
    MLP_NORM,
    MLP_NORM_BIAS,
    NUM_MATRICES,
    NUM_WEIGHTS,
    OUT,
    OUT_BIAS,
    OUT_NORM,
    OUT_NORM_BIAS,
    POST_NORM,
    POST_NORM_BIAS,
    Q_NORM,
    QKV,
    QKV_BIAS,
    ROWS_AT_ONCE,
    SIN,
    SINKS,
    TILE_SCRATCH,
    WINDOW,
    Product,
    attend_and_quantize,
    chunk_size,
    embedding_value,
    linear,
    multiply,
    quantized_inputs,
    row_lots,
)
from onward.kernels.cpu.jit import Kernel, inlined_kernel_function, kernel_function, out_of_line
from onward.kernels.cpu.phases import claim_items, mark_finished, partition_start, wait_for_phase
from onward.kernels.cpu.quantized_rows import quantize_group
from onward.kernels.cpu.rope import mean_square
from onward.kernels.weight_packing import GROUP, OUTPUT_UNIT

PHASES = ("norm", "qkv", "rope", "attention", "o", "o norm", "norm", "gate/up", "down", "down norm")
"""Of each layer, in order; the embedding comes before them, a norm and the head after."""
_PER_LAYER = len(PHASES)


@kernel_function
def _embed(c, phase, thread):
    out_of_line()
    work, hidden, token_ids = simd.int64s(c.work), simd.floats(c.hidden), simd.int32s(c.token_ids)
    table, groups = simd.uint8s(c.embedding), c.hidden_size // GROUP
    places, positions = simd.floats(c.position_table), simd.int32s(c.positions)
    row = claim_items(work, phase, 0, 1)
    while row < c.num_rows:
        token, place = np.int64(token_ids[row]), np.int64(positions[row]) * c.hidden_size
        for group in range(groups):
            for i in range(GROUP):
                at = group * GROUP + i
                value = embedding_value(table, c.embedding_is_nibbles != 0, token, groups, group, i)
                value = value * c.embedding_multiplier
                if c.position_table != 0:
                    value = value + places[place + at]
                hidden[row * c.hidden_size + at] = value
        mark_finished(work, phase, 1)
        row = claim_items(work, phase, 0, 1)
    wait_for_phase(work, phase, c.num_rows)


@inlined_kernel_function
def _mean(x, at, size):
    total = simd.splat(np.float32(0.0))
    for i in range(0, size, 16):
        total = total + simd.load(x, at + i)
    return simd.sum_lanes(total) / np.float32(size)


@inlined_kernel_function
def _mean_square_around(x, at, size, mean):
    total, middle = simd.splat(np.float32(0.0)), simd.splat(mean)
    for i in range(0, size, 16):
        v = simd.load(x, at + i) - middle
        total = simd.fma(v, v, total)
    return simd.sum_lanes(total) / np.float32(size)


@inlined_kernel_function
def _middle_and_inverse(c, x, at):
    """What a row's norm subtracts, and what it multiplies with."""
    size = c.hidden_size
    if c.is_layer_norm != 0:
        mean = _mean(x, at, size)
        return mean, np.float32(1.0) / np.sqrt(_mean_square_around(x, at, size, mean) + c.eps)
    return np.float32(0.0), np.float32(1.0) / np.sqrt(mean_square(x, at, size) + c.eps)


@inlined_kernel_function
def _normed(x, at, i, mean, inverse, weight_address, bias_address):
    """Sixteen values of a row, from number `i` on."""
    value = (simd.load(x, at + i) - simd.splat(mean)) * simd.splat(inverse) * simd.load(simd.floats(weight_address), i)
    if bias_address != 0:
        value = value + simd.load(simd.floats(bias_address), i)
    return value


@kernel_function
def _normalize_row(c, row, weight_address, bias_address, target, target_row):
    """Without a weight the row is quantized as it is."""
    out_of_line()
    hidden, at, groups = simd.floats(c.hidden), row * c.hidden_size, c.hidden_size // GROUP
    if weight_address == 0:
        for group in range(groups):
            i = at + group * GROUP
            quantize_group(simd.load(hidden, i), simd.load(hidden, i + 16), target, target_row * groups + group)
    else:
        mean, inverse = _middle_and_inverse(c, hidden, at)
        for group in range(groups):
            i = group * GROUP
            low = _normed(hidden, at, i, mean, inverse, weight_address, bias_address)
            high = _normed(hidden, at, i + 16, mean, inverse, weight_address, bias_address)
            quantize_group(low, high, target, target_row * groups + group)


@kernel_function
def _normalize(c, phase, weight_address, bias_address, target):
    out_of_line()
    work = simd.int64s(c.work)
    row = claim_items(work, phase, 0, 1)
    while row < c.num_rows:
        _normalize_row(c, row, weight_address, bias_address, target, row)
        mark_finished(work, phase, 1)
        row = claim_items(work, phase, 0, 1)
    wait_for_phase(work, phase, c.num_rows)


@kernel_function
def _normalize_sampled(c, phase, target):
    out_of_line()
    work, sampled = simd.int64s(c.work), simd.int64s(c.sampled)
    i = claim_items(work, phase, 0, 1)
    while i < c.num_sampled:
        _normalize_row(c, sampled[i], c.final_norm, c.final_norm_bias, target, i)
        mark_finished(work, phase, 1)
        i = claim_items(work, phase, 0, 1)
    wait_for_phase(work, phase, c.num_sampled)


@kernel_function
def _add_product(c, phase, weight_address, bias_address):
    """The residual stream gets what the last product gave, normed if there is a weight."""
    out_of_line()
    work, hidden, product = simd.int64s(c.work), simd.floats(c.hidden), simd.floats(c.product)
    row = claim_items(work, phase, 0, 1)
    while row < c.num_rows:
        at, mean, inverse = row * c.hidden_size, np.float32(0.0), np.float32(1.0)
        if weight_address != 0:
            mean, inverse = _middle_and_inverse(c, product, at)
        for i in range(0, c.hidden_size, 16):
            value = simd.load(product, at + i)
            if weight_address != 0:
                value = _normed(product, at, i, mean, inverse, weight_address, bias_address)
            simd.store(hidden, at + i, simd.load(hidden, at + i) + value)
        mark_finished(work, phase, 1)
        row = claim_items(work, phase, 0, 1)
    wait_for_phase(work, phase, c.num_rows)


@inlined_kernel_function
def _biased(scratch, at, bias_address, bias_at):
    value = simd.load(scratch, at)
    if bias_address != 0:
        value = value + simd.load(simd.floats(bias_address), bias_at)
    return value


@kernel_function
def _mlp_group(c, product, group, row, count, bias_address, target, scratch_at):
    """32 inputs of `down`, of up to four rows: from two pairs of tiles with a gate (see `int8_forward`), else from one."""
    out_of_line()
    scratch, num_groups = simd.floats(c.scratch), c.inner_size // GROUP
    second_at = scratch_at + ROWS_AT_ONCE * OUTPUT_UNIT
    if c.is_gated != 0:
        multiply(product, 2 * group, row, count, scratch, scratch_at)
        multiply(product, 2 * group + 1, row, count, scratch, second_at)
        bias_at = 2 * group * OUTPUT_UNIT
        for r in range(count):
            i, j = scratch_at + r * OUTPUT_UNIT, second_at + r * OUTPUT_UNIT
            low = activate(c.activation, _biased(scratch, i, bias_address, bias_at))
            low = low * _biased(scratch, i + 16, bias_address, bias_at + 16)
            high = activate(c.activation, _biased(scratch, j, bias_address, bias_at + 32))
            high = high * _biased(scratch, j + 16, bias_address, bias_at + 48)
            quantize_group(low, high, target, (row + r) * num_groups + group)
    else:
        multiply(product, group, row, count, scratch, scratch_at)
        bias_at = group * OUTPUT_UNIT
        for r in range(count):
            i = scratch_at + r * OUTPUT_UNIT
            low = activate(c.activation, _biased(scratch, i, bias_address, bias_at))
            high = activate(c.activation, _biased(scratch, i + 16, bias_address, bias_at + 16))
            quantize_group(low, high, target, (row + r) * num_groups + group)


@kernel_function
def _gate_and_up(c, phase, thread, product, bias_address, target, scratch_at):
    out_of_line()
    work, num_groups, num_lots = simd.int64s(c.work), c.inner_size // GROUP, row_lots(c, c.num_rows)
    chunk = chunk_size(num_groups)
    for turn in range(num_lots):
        lot = (thread + turn) % num_lots
        first_row, end_row = partition_start(c.num_rows, lot, num_lots), partition_start(c.num_rows, lot + 1, num_lots)
        first = claim_items(work, phase, lot, chunk)
        while first < num_groups:
            last = min(first + chunk, num_groups)
            for group in range(first, last):
                for row in range(first_row, end_row, ROWS_AT_ONCE):
                    count = min(ROWS_AT_ONCE, end_row - row)
                    _mlp_group(c, product, group, row, count, bias_address, target, scratch_at)
            mark_finished(work, phase, last - first)
            first = claim_items(work, phase, lot, chunk)
    wait_for_phase(work, phase, num_groups * num_lots)


@kernel_function
def _cap_logits(c, phase):
    work, logits = simd.int64s(c.work), simd.floats(c.logits)
    row = claim_items(work, phase, 0, 1)
    while row < c.num_sampled:
        for i in range(row * c.vocab_size, (row + 1) * c.vocab_size, 16):
            simd.store(logits, i, soft_cap(simd.load(logits, i), c.logit_softcap))
        mark_finished(work, phase, 1)
        row = claim_items(work, phase, 0, 1)
    wait_for_phase(work, phase, c.num_sampled)


@inlined_kernel_function
def _layer(c, thread, kv, layer, narrow, heads, wide):
    table, kinds = simd.int64s(c.layers), simd.uint8s(c.is_nibbles)
    hidden, qkv, product = simd.floats(c.hidden), simd.floats(c.qkv), simd.floats(c.product)
    scratch_at = thread * c.scratch_stride
    tile_at = scratch_at + c.scratch_stride - TILE_SCRATCH
    heads_width = c.num_heads * c.head_dim
    qkv_width = heads_width + 2 * c.num_kv_heads * c.head_dim
    hidden_groups = c.hidden_size // GROUP
    w, n, phase = layer * NUM_WEIGHTS, layer * NUM_MATRICES, 1 + layer * _PER_LAYER
    kv_at = layer * c.layer_stride
    has_output_norm = table[w + OUT_NORM] != 0
    is_apart = has_output_norm or c.is_parallel != 0
    options = AttentionOptions(table[w + WINDOW], table[w + SINKS], table[w + COS], table[w + SIN], c.rotary_half,
                               c.true_head_dim, c.norm_is_whole, c.query_factor, c.softcap)  # fmt: skip

    _normalize(c, phase, table[w + INPUT_NORM], table[w + INPUT_NORM_BIAS], narrow)
    matrix = Product(table[w + QKV], kinds[n + QKV] != 0, hidden_groups, narrow)
    linear(c, phase + 1, thread, c.num_rows, matrix, qkv_width, table[w + QKV_BIAS], False, qkv, tile_at)
    rotate_rows(c, phase + 2, thread, kv, kv_at, table[w + Q_NORM], table[w + K_NORM], options)
    attend_and_quantize(c, phase + 3, thread, kv, kv_at, heads, scratch_at, options)
    matrix = Product(table[w + OUT], kinds[n + OUT] != 0, heads_width // GROUP, heads)
    bias = table[w + OUT_BIAS]
    linear(c, phase + 4, thread, c.num_rows, matrix, c.hidden_size, bias, not is_apart, product if is_apart else hidden,
           tile_at)  # fmt: skip
    if has_output_norm:
        _add_product(c, phase + 5, table[w + OUT_NORM], table[w + OUT_NORM_BIAS])
    _normalize(c, phase + 6, table[w + POST_NORM], table[w + POST_NORM_BIAS], narrow)
    matrix = Product(table[w + GATE_UP], kinds[n + GATE_UP] != 0, hidden_groups, narrow)
    _gate_and_up(c, phase + 7, thread, matrix, table[w + GATE_UP_BIAS], wide, tile_at)
    matrix = Product(table[w + DOWN], kinds[n + DOWN] != 0, c.inner_size // GROUP, wide)
    linear(c, phase + 8, thread, c.num_rows, matrix, c.hidden_size, table[w + DOWN_BIAS], not has_output_norm,
           product if has_output_norm else hidden, tile_at)  # fmt: skip
    if is_apart:  # of a parallel block, what attention gave
        _add_product(c, phase + 9, table[w + MLP_NORM], table[w + MLP_NORM_BIAS])


@inlined_kernel_function
def _forward(thread, c, kv):
    narrow = quantized_inputs(c.narrow_values, c.narrow_scales, c.narrow_totals, c.narrow_corrections)
    heads = quantized_inputs(c.heads_values, c.heads_scales, c.heads_totals, c.heads_corrections)
    wide = quantized_inputs(c.wide_values, c.wide_scales, c.wide_totals, c.wide_corrections)
    _embed(c, 0, thread)
    for layer in range(c.num_layers):
        _layer(c, thread, kv, layer, narrow, heads, wide)
    if c.num_sampled:
        phase = 1 + c.num_layers * _PER_LAYER
        tile_at = (thread + 1) * c.scratch_stride - TILE_SCRATCH
        _normalize_sampled(c, phase, narrow)
        matrix = Product(c.head, c.head_is_nibbles != 0, c.hidden_size // GROUP, narrow)
        linear(c, phase + 1, thread, c.num_sampled, matrix, c.vocab_size, 0, False, simd.floats(c.logits), tile_at)
        if c.logit_softcap > np.float32(0.0):
            _cap_logits(c, phase + 2)


def _forward_int8_kv(thread, context):
    c = carray(context, 1)[0]
    _forward(thread, c, simd.uint8s(c.kv))


def _forward_float_kv(thread, context):
    c = carray(context, 1)[0]
    _forward(thread, c, simd.floats(c.kv))


int8_forward_general = {1: Kernel(_forward_int8_kv, CONTEXT), 4: Kernel(_forward_float_kv, CONTEXT)}
"""By the size of a KV element, as `int8_forward`."""
