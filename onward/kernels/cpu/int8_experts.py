"""Mixtures of experts in int8: the phases of one layer. `kernels.numpy_reference` has the textbook formulas.

    router        scores of each row in float32, the experts that it gets, and their weights
    grouping      the assignments of rows to experts, sorted by expert
    gathering     each assignment's quantized row, so that an expert's rows are neighbours
    expert gate/up, expert down
                  each expert's products, over its rows only; experts without rows are not read
    combination   the weighted outputs of a row's experts, in the order of their scores, then the shared expert's

A row's products have the same bits whichever rows share the loop (`int8_matmul_tile`), and its sum has an order of its
own. So no result depends on the other rows of an expert.

The number of items of a phase is the same in every layer: items of experts without rows are empty. A thread may reach a
phase when the others are already in the next layer, which has other groups; it must then find nothing to do or to wait
for.
"""

import numpy as np

from onward.kernels.cpu import simd
from onward.kernels.cpu.expert_scores import LOWEST, exp_of, score_and_rank, sigmoid
from onward.kernels.cpu.int8_forward import (
    EXPERT_DOWN,
    EXPERT_DOWN_BIAS,
    EXPERT_GATE_UP,
    EXPERT_GATE_UP_BIAS,
    EXPERTS,
    MLP_SIZE,
    NUM_EXPERT_COLUMNS,
    POST_NORM,
    POST_NORM_BIAS,
    ROUTER,
    ROUTER_BIAS,
    ROWS_AT_ONCE,
    SELECTION_BIAS,
    SHARED_GATE,
    Product,
    chunk_size,
    multiply,
    quantized_inputs,
)
from onward.kernels.cpu.int8_mlp import biased, mlp_group
from onward.kernels.cpu.int8_row_norm import middle_and_inverse, normed_values
from onward.kernels.cpu.jit import inlined_kernel_function, kernel_function, out_of_line
from onward.kernels.cpu.phases import claim_items, mark_finished, wait_for_phase
from onward.kernels.weight_formats import GROUP, OUTPUT_UNIT

EXPERT_PHASES = ("router", "grouping", "gathering", "expert gate/up", "expert down", "combination")


@kernel_function
def compute_experts(c, phase, w, adds, scratch_at):
    """Computes the experts of a layer, from the row's norm on. The result is added to the residual stream, or written
    to `c.product`. `w` is the index of the layer's first weight in the table."""
    table = simd.int64s(c.layers)
    gathered = quantized_inputs(
        c.gathered_values, c.gathered_scales, c.gathered_totals, c.gathered_corrections, c.gathered_low_corrections
    )
    inner = quantized_inputs(
        c.inner_values, c.inner_scales, c.inner_totals, c.inner_corrections, c.inner_low_corrections
    )
    has_shared = table[w + MLP_SIZE] != 0
    _route(c, phase, table[w + POST_NORM], table[w + POST_NORM_BIAS], table[w + ROUTER], table[w + ROUTER_BIAS],
           table[w + SELECTION_BIAS], has_shared, table[w + SHARED_GATE])  # fmt: skip
    _group(c, phase + 1)
    _gather(c, phase + 2)
    _expert_gate_and_up(c, phase + 3, table[w + EXPERTS], gathered, inner, scratch_at)
    _expert_down(c, phase + 4, table[w + EXPERTS], inner, scratch_at)
    _combine(c, phase + 5, has_shared, adds)


@kernel_function
def _route(c, phase, norm, norm_bias, router, router_bias, selection_bias, has_shared, shared_gate):
    out_of_line()
    work = simd.int64s(c.work)
    row = claim_items(work, phase, 0, 1)
    while row < c.num_rows:
        _normalize_row(c, row, norm, norm_bias)
        _score_row(c, row, router, router_bias)
        if c.is_sigmoid != 0:
            score_and_rank(c, row, selection_bias)
        _choose_experts(c, row)
        if has_shared:
            _share_of_shared_expert(c, row, shared_gate)
        mark_finished(work, phase, 1)
        row = claim_items(work, phase, 0, 1)
    wait_for_phase(work, phase, c.num_rows)


@inlined_kernel_function
def _normalize_row(c, row, norm, norm_bias):
    hidden, normed, at = simd.floats(c.hidden), simd.floats(c.normed), row * c.hidden_size
    if norm == 0:
        for i in range(0, c.hidden_size, 16):
            simd.store(normed, at + i, simd.load(hidden, at + i))
    else:
        mean, inverse = middle_and_inverse(c, hidden, at)
        for i in range(0, c.hidden_size, 16):
            simd.store(normed, at + i, normed_values(hidden, at, i, mean, inverse, norm, norm_bias))


@inlined_kernel_function
def _dot(x, at, weight, weight_at, size):
    total = simd.splat(np.float32(0.0))
    for i in range(0, size, 16):
        total = simd.fma(simd.load(x, at + i), simd.load(weight, weight_at + i), total)
    return simd.sum_lanes(total)


@inlined_kernel_function
def _score_row(c, row, router, router_bias):
    """Computes a row's scores, four experts at once, so that the processor need not wait for each multiply-add before
    the next one."""
    normed, weight, scores = simd.floats(c.normed), simd.floats(router), simd.floats(c.scores)
    bias, size = simd.floats(router_bias), c.hidden_size
    at, scores_at = row * size, row * c.score_stride
    num_quads = c.num_experts // 4
    for quad in range(num_quads):
        first = 4 * quad * size
        zero = simd.splat(np.float32(0.0))
        a, b, d, e = zero, zero, zero, zero
        for i in range(0, size, 16):
            x = simd.load(normed, at + i)
            a = simd.fma(x, simd.load(weight, first + i), a)
            b = simd.fma(x, simd.load(weight, first + size + i), b)
            d = simd.fma(x, simd.load(weight, first + 2 * size + i), d)
            e = simd.fma(x, simd.load(weight, first + 3 * size + i), e)
        scores[scores_at + 4 * quad] = simd.sum_lanes(a)
        scores[scores_at + 4 * quad + 1] = simd.sum_lanes(b)
        scores[scores_at + 4 * quad + 2] = simd.sum_lanes(d)
        scores[scores_at + 4 * quad + 3] = simd.sum_lanes(e)
    for expert in range(4 * num_quads, c.num_experts):
        scores[scores_at + expert] = _dot(normed, at, weight, expert * size, size)
    if router_bias != 0:
        for expert in range(c.num_experts):
            scores[scores_at + expert] = scores[scores_at + expert] + bias[expert]
    for expert in range(c.num_experts, c.score_stride):
        scores[scores_at + expert] = np.float32(LOWEST)  # padding of the last vector


@inlined_kernel_function
def _choose_experts(c, row):
    """Chooses the experts with the largest ranks; of equal ranks, those with the lowest index. A score that is not a
    number makes all weights NaN."""
    ranks, chosen = simd.floats(c.ranks), simd.int32s(c.chosen)
    at, first = row * c.score_stride, row * c.top_k
    last_score, last = np.float32(np.inf), np.int64(-1)
    for place in range(c.top_k):
        best, best_score = np.int64(-1), np.float32(-np.inf)
        for expert in range(c.num_experts):
            score = ranks[at + expert]
            is_left = score < last_score or (score == last_score and expert > last)
            if is_left and (best < 0 or score > best_score):
                best, best_score = np.int64(expert), score
        if best < 0:  # scores that are not numbers
            best = np.int64(place)
        chosen[first + place] = np.int32(best)
        last_score, last = best_score, best
    if c.is_sigmoid != 0:
        _weigh_sigmoids(c, at, first)
    else:
        _weigh_softmax(c, at, first)


@inlined_kernel_function
def _weigh_sigmoids(c, at, first):
    scores, chosen, shares = simd.floats(c.scores), simd.int32s(c.chosen), simd.floats(c.shares)
    total, fault = np.float32(0.0), np.float32(0.0)
    for expert in range(c.num_experts):
        fault = fault + (scores[at + expert] - scores[at + expert])
    for place in range(c.top_k):
        total = total + scores[at + chosen[first + place]]
    if c.renormalize == 0:
        total = np.float32(1.0)
    total = max(total, np.float32(1e-20))  # as small as the sum of scores that are all zero
    for place in range(c.top_k):
        shares[first + place] = scores[at + chosen[first + place]] / total * c.weight_multiplier + fault


@inlined_kernel_function
def _weigh_softmax(c, at, first):
    scores, chosen, shares = simd.floats(c.scores), simd.int32s(c.chosen), simd.floats(c.shares)
    top = scores[at + chosen[first]]
    total, faults = simd.splat(np.float32(0.0)), simd.splat(np.float32(0.0))
    for i in range(0, c.score_stride, 16):
        values = simd.load(scores, at + i)
        total = total + simd.exp(values - simd.splat(top))
        faults = faults + (values - values)
    divisor, fault = simd.sum_lanes(total), simd.sum_lanes(faults)
    if c.renormalize != 0:
        divisor = np.float32(0.0)
        for place in range(c.top_k):
            divisor = divisor + exp_of(scores[at + chosen[first + place]] - top)
    for place in range(c.top_k):
        share = exp_of(scores[at + chosen[first + place]] - top) / divisor
        shares[first + place] = share * c.weight_multiplier + fault


@inlined_kernel_function
def _share_of_shared_expert(c, row, shared_gate):
    """Computes the factor of the shared expert: a sigmoid, or one if it has no gate."""
    share = np.float32(1.0)
    if shared_gate != 0:
        share = sigmoid(_dot(simd.floats(c.normed), row * c.hidden_size, simd.floats(shared_gate), 0, c.hidden_size))
    simd.floats(c.shared_shares)[row] = share


@kernel_function
def _group(c, phase):
    """Sorts the assignments by expert, by counting: assignments of one expert stay in the order of rows."""
    out_of_line()
    work, chosen, starts = simd.int64s(c.work), simd.int32s(c.chosen), simd.int32s(c.expert_starts)
    ordered, sorted_at = simd.int32s(c.assignments), simd.int32s(c.sorted_at)
    num_assignments = c.num_rows * c.top_k
    if claim_items(work, phase, 0, 1) == 0:
        for expert in range(c.num_experts + 1):
            starts[expert] = np.int32(0)
        for i in range(num_assignments):
            starts[chosen[i] + 1] += np.int32(1)
        for expert in range(c.num_experts):
            starts[expert + 1] += starts[expert]
        # Each start moves to its expert's end while assignments are written, then back.
        for i in range(num_assignments):
            place = starts[chosen[i]]
            ordered[place], sorted_at[i] = np.int32(i), place
            starts[chosen[i]] = place + np.int32(1)
        for expert in range(c.num_experts, 0, -1):
            starts[expert] = starts[expert - 1]
        starts[0] = np.int32(0)
        mark_finished(work, phase, 1)
    wait_for_phase(work, phase, 1)


@kernel_function
def _gather(c, phase):
    out_of_line()
    work, ordered = simd.int64s(c.work), simd.int32s(c.assignments)
    values, gathered_values = simd.int64s(c.narrow_values), simd.int64s(c.gathered_values)
    scales, gathered_scales = simd.floats(c.narrow_scales), simd.floats(c.gathered_scales)
    totals, gathered_totals = simd.floats(c.narrow_totals), simd.floats(c.gathered_totals)
    corrections, gathered_corrections = simd.int32s(c.narrow_corrections), simd.int32s(c.gathered_corrections)
    low_corrections = simd.int32s(c.narrow_low_corrections)
    gathered_low_corrections = simd.int32s(c.gathered_low_corrections)
    num_words, num_groups, num_assignments = c.hidden_size // 8, c.hidden_size // GROUP, c.num_rows * c.top_k
    i = claim_items(work, phase, 0, 1)
    while i < num_assignments:
        row = ordered[i] // c.top_k
        for word in range(num_words):
            gathered_values[i * num_words + word] = values[row * num_words + word]
        for group in range(num_groups):
            source, target = row * num_groups + group, i * num_groups + group
            gathered_scales[target] = scales[source]
            gathered_totals[target] = totals[source]
            gathered_corrections[target] = corrections[source]
            gathered_low_corrections[target] = low_corrections[source]
        mark_finished(work, phase, 1)
        i = claim_items(work, phase, 0, 1)
    wait_for_phase(work, phase, num_assignments)


@kernel_function
def _expert_gate_and_up(c, phase, experts, source, target, scratch_at):
    out_of_line()
    work, table = simd.int64s(c.work), simd.int64s(experts)
    starts, num_groups = simd.int32s(c.expert_starts), c.expert_size // GROUP
    num_items, chunk = c.num_experts * num_groups, chunk_size(num_groups)
    first = claim_items(work, phase, 0, chunk)
    while first < num_items:
        last = min(first + chunk, num_items)
        for item in range(first, last):
            expert, group = item // num_groups, item % num_groups
            e = expert * NUM_EXPERT_COLUMNS
            product = Product(table[e + EXPERT_GATE_UP], c.hidden_size // GROUP, source)
            end = np.int64(starts[expert + 1])
            for row in range(np.int64(starts[expert]), end, ROWS_AT_ONCE):
                mlp_group(c, product, group, num_groups, row, min(ROWS_AT_ONCE, end - row),
                          table[e + EXPERT_GATE_UP_BIAS], target, scratch_at)  # fmt: skip
        mark_finished(work, phase, last - first)
        first = claim_items(work, phase, 0, chunk)
    wait_for_phase(work, phase, num_items)


@kernel_function
def _expert_down(c, phase, experts, source, scratch_at):
    out_of_line()
    work, table = simd.int64s(c.work), simd.int64s(experts)
    scratch, output, starts = simd.floats(c.scratch), simd.floats(c.expert_output), simd.int32s(c.expert_starts)
    num_pairs = c.hidden_size // OUTPUT_UNIT
    num_items, chunk = c.num_experts * num_pairs, chunk_size(num_pairs)
    first = claim_items(work, phase, 0, chunk)
    while first < num_items:
        last = min(first + chunk, num_items)
        for item in range(first, last):
            expert, pair = item // num_pairs, item % num_pairs
            e, column = expert * NUM_EXPERT_COLUMNS, item % num_pairs * OUTPUT_UNIT
            bias = table[e + EXPERT_DOWN_BIAS]
            product = Product(table[e + EXPERT_DOWN], c.expert_size // GROUP, source)
            end = np.int64(starts[expert + 1])
            for row in range(np.int64(starts[expert]), end, ROWS_AT_ONCE):
                count = min(ROWS_AT_ONCE, end - row)
                multiply(product, pair, row, count, scratch, scratch_at)
                for r in range(count):
                    at, i = (row + r) * c.hidden_size + column, scratch_at + r * OUTPUT_UNIT
                    simd.store(output, at, biased(scratch, i, bias, column))
                    simd.store(output, at + 16, biased(scratch, i + 16, bias, column + 16))
        mark_finished(work, phase, last - first)
        first = claim_items(work, phase, 0, chunk)
    wait_for_phase(work, phase, num_items)


@kernel_function
def _combine(c, phase, has_shared, adds):
    out_of_line()
    work, hidden, product = simd.int64s(c.work), simd.floats(c.hidden), simd.floats(c.product)
    output, shared, shares = simd.floats(c.expert_output), simd.floats(c.shared_output), simd.floats(c.shares)
    sorted_at, shared_shares, size = simd.int32s(c.sorted_at), simd.floats(c.shared_shares), c.hidden_size
    row = claim_items(work, phase, 0, 1)
    while row < c.num_rows:
        at, first = row * size, row * c.top_k
        for i in range(0, size, 16):
            total = simd.splat(np.float32(0.0))
            for place in range(c.top_k):
                values = simd.load(output, np.int64(sorted_at[first + place]) * size + i)
                total = simd.fma(simd.splat(shares[first + place]), values, total)
            if has_shared:
                total = simd.fma(simd.splat(shared_shares[row]), simd.load(shared, at + i), total)
            if adds:
                simd.store(hidden, at + i, simd.load(hidden, at + i) + total)
            else:
                simd.store(product, at + i, total)
        mark_finished(work, phase, 1)
        row = claim_items(work, phase, 0, 1)
    wait_for_phase(work, phase, c.num_rows)
