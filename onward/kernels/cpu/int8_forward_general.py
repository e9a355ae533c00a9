"""The forward pass in int8 of models that are more than a Llama: the phases of `int8_forward`, and further phases
between them. Each phase computes its rows separately and its sums in a fixed order. So here too, a row's logits depend
on its own tokens only.

    embed -> [norm -> qkv -> rope+store -> attention -> o -> norm of it -> norm -> gate/up -> down -> experts -> norm of
    it]
          * layers -> norm -> head

In a layer with experts, gate/up and down belong to the expert that every token gets (`int8_experts`).

A phase that a model does not have is skipped. This is a separate kernel, so that the kernel of a Llama stays small.
"""

import numpy as np
from numba.np.numpy_support import carray

from onward.kernels.cpu import simd
from onward.kernels.cpu.activations import soft_cap
from onward.kernels.cpu.batch_attention import rotate_rows
from onward.kernels.cpu.batch_fields import AttentionOptions
from onward.kernels.cpu.int8_experts import EXPERT_PHASES, compute_experts
from onward.kernels.cpu.int8_forward import (
    CONTEXT,
    COS,
    DOWN,
    DOWN_BIAS,
    EXPERTS,
    GATE_UP,
    GATE_UP_BIAS,
    INPUT_NORM,
    INPUT_NORM_BIAS,
    K_NORM,
    MLP_NORM,
    MLP_NORM_BIAS,
    MLP_SIZE,
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
    SIN,
    SINKS,
    TILE_SCRATCH,
    WINDOW,
    Product,
    attend_and_quantize,
    linear,
    quantized_inputs,
)
from onward.kernels.cpu.int8_mlp import gate_and_up
from onward.kernels.cpu.int8_row_norm import middle_and_inverse, normed_values
from onward.kernels.cpu.jit import Kernel, inlined_kernel_function, kernel_function, out_of_line
from onward.kernels.cpu.phases import claim_items, mark_finished, wait_for_phase
from onward.kernels.cpu.quantized_rows import quantize_group
from onward.kernels.cpu.weight_lookup import look_up
from onward.kernels.weight_formats import GROUP

PHASES = ("norm", "qkv", "rope", "attention", "o", "o norm", "norm", "gate/up", "down", *EXPERT_PHASES, "down norm")
"""Phases of each layer, in order. The embedding comes before the first layer, a norm and the head after the last."""
_PER_LAYER = len(PHASES)
_FIRST_EXPERT_PHASE = PHASES.index(EXPERT_PHASES[0])


@kernel_function
def _embed(c, phase, thread):
    out_of_line()
    work, hidden, token_ids = simd.int64s(c.work), simd.floats(c.hidden), simd.int32s(c.token_ids)
    table, fields = simd.uint8s(c.embedding), simd.int64s(c.embedding_fields)
    places, positions = simd.floats(c.position_table), simd.int32s(c.positions)
    row = claim_items(work, phase, 0, 1)
    while row < c.num_rows:
        token, place = np.int64(token_ids[row]), np.int64(positions[row]) * c.hidden_size
        first = row * c.hidden_size
        look_up(table, fields, c.hidden_size // GROUP, token, hidden, first)
        for i in range(c.hidden_size):
            value = hidden[first + i] * c.embedding_multiplier
            if c.position_table != 0:
                value = value + places[place + i]
            hidden[first + i] = value
        mark_finished(work, phase, 1)
        row = claim_items(work, phase, 0, 1)
    wait_for_phase(work, phase, c.num_rows)


@kernel_function
def _normalize_row(c, row, weight_address, bias_address, target, target_row):
    """Applies the norm to a row and quantizes it. Without a weight there is no norm."""
    out_of_line()
    hidden, at, groups = simd.floats(c.hidden), row * c.hidden_size, c.hidden_size // GROUP
    if weight_address == 0:
        for group in range(groups):
            i = at + group * GROUP
            quantize_group(simd.load(hidden, i), simd.load(hidden, i + 16), target, target_row * groups + group)
    else:
        mean, inverse = middle_and_inverse(c, hidden, at)
        for group in range(groups):
            i = group * GROUP
            low = normed_values(hidden, at, i, mean, inverse, weight_address, bias_address)
            high = normed_values(hidden, at, i + 16, mean, inverse, weight_address, bias_address)
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
    """Adds `c.product` to the residual stream, normed if there is a weight."""
    out_of_line()
    work, hidden, product = simd.int64s(c.work), simd.floats(c.hidden), simd.floats(c.product)
    row = claim_items(work, phase, 0, 1)
    while row < c.num_rows:
        at, mean, inverse = row * c.hidden_size, np.float32(0.0), np.float32(1.0)
        if weight_address != 0:
            mean, inverse = middle_and_inverse(c, product, at)
        for i in range(0, c.hidden_size, 16):
            value = simd.load(product, at + i)
            if weight_address != 0:
                value = normed_values(product, at, i, mean, inverse, weight_address, bias_address)
            simd.store(hidden, at + i, simd.load(hidden, at + i) + value)
        mark_finished(work, phase, 1)
        row = claim_items(work, phase, 0, 1)
    wait_for_phase(work, phase, c.num_rows)


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
    table = simd.int64s(c.layers)
    hidden, qkv, product = simd.floats(c.hidden), simd.floats(c.qkv), simd.floats(c.product)
    scratch_at = thread * c.scratch_stride
    tile_at = scratch_at + c.scratch_stride - TILE_SCRATCH
    heads_width = c.num_heads * c.head_dim
    qkv_width = heads_width + 2 * c.num_kv_heads * c.head_dim
    hidden_groups = c.hidden_size // GROUP
    w, phase = layer * NUM_WEIGHTS, 1 + layer * _PER_LAYER
    kv_at = layer * c.layer_stride
    has_output_norm = table[w + OUT_NORM] != 0
    is_apart = has_output_norm or c.is_parallel != 0
    options = AttentionOptions(table[w + WINDOW], table[w + SINKS], table[w + COS], table[w + SIN], c.rotary_half,
                               c.true_head_dim, c.norm_is_whole, c.query_factor, c.softcap)  # fmt: skip

    _normalize(c, phase, table[w + INPUT_NORM], table[w + INPUT_NORM_BIAS], narrow)
    matrix = Product(table[w + QKV], hidden_groups, narrow)
    linear(c, phase + 1, thread, c.num_rows, matrix, qkv_width, table[w + QKV_BIAS], False, qkv, tile_at)
    rotate_rows(c, phase + 2, thread, kv, kv_at, table[w + Q_NORM], table[w + K_NORM], options)
    attend_and_quantize(c, phase + 3, thread, kv, kv_at, heads, scratch_at, options)
    matrix = Product(table[w + OUT], heads_width // GROUP, heads)
    bias = table[w + OUT_BIAS]
    linear(c, phase + 4, thread, c.num_rows, matrix, c.hidden_size, bias, not is_apart, product if is_apart else hidden,
           tile_at)  # fmt: skip
    if has_output_norm:
        _add_product(c, phase + 5, table[w + OUT_NORM], table[w + OUT_NORM_BIAS])
    _normalize(c, phase + 6, table[w + POST_NORM], table[w + POST_NORM_BIAS], narrow)
    has_experts, inner_size = table[w + EXPERTS] != 0, table[w + MLP_SIZE]
    if inner_size != 0:
        matrix = Product(table[w + GATE_UP], hidden_groups, narrow)
        gate_and_up(c, phase + 7, thread, matrix, inner_size, table[w + GATE_UP_BIAS], wide, tile_at)
        matrix = Product(table[w + DOWN], inner_size // GROUP, wide)
        target = product if has_output_norm else hidden
        if has_experts:
            target = simd.floats(c.shared_output)
        linear(c, phase + 8, thread, c.num_rows, matrix, c.hidden_size, table[w + DOWN_BIAS],
               not has_output_norm and not has_experts, target, tile_at)  # fmt: skip
    if has_experts:
        compute_experts(c, phase + _FIRST_EXPERT_PHASE, w, not has_output_norm, tile_at)
    if is_apart:  # in a parallel block without this norm, `product` is the output of attention
        _add_product(c, phase + _PER_LAYER - 1, table[w + MLP_NORM], table[w + MLP_NORM_BIAS])


@inlined_kernel_function
def _forward(thread, c, kv):
    narrow = quantized_inputs(
        c.narrow_values, c.narrow_scales, c.narrow_totals, c.narrow_corrections, c.narrow_low_corrections
    )
    heads = quantized_inputs(
        c.heads_values, c.heads_scales, c.heads_totals, c.heads_corrections, c.heads_low_corrections
    )
    wide = quantized_inputs(c.wide_values, c.wide_scales, c.wide_totals, c.wide_corrections, c.wide_low_corrections)
    _embed(c, 0, thread)
    for layer in range(c.num_layers):
        _layer(c, thread, kv, layer, narrow, heads, wide)
    if c.num_sampled:
        phase = 1 + c.num_layers * _PER_LAYER
        tile_at = (thread + 1) * c.scratch_stride - TILE_SCRATCH
        _normalize_sampled(c, phase, narrow)
        matrix = Product(c.head, c.hidden_size // GROUP, narrow)
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
"""Kernels by the size of a KV element in bytes, as `int8_forward`."""
