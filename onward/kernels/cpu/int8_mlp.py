"""The first product of an MLP or of an expert, its activation, and the quantized input of the second product."""

import numpy as np

from onward.kernels.cpu import simd
from onward.kernels.cpu.activations import activate, clamped_swiglu
from onward.kernels.cpu.int8_forward import ROWS_AT_ONCE, chunk_size, multiply, row_lots
from onward.kernels.cpu.jit import inlined_kernel_function, kernel_function, out_of_line
from onward.kernels.cpu.phases import claim_items, mark_finished, partition_start, wait_for_phase
from onward.kernels.cpu.quantized_rows import quantize_group
from onward.kernels.weight_formats import GROUP, OUTPUT_UNIT


@inlined_kernel_function
def biased(scratch, at, bias_address, bias_at):
    value = simd.load(scratch, at)
    if bias_address != 0:
        value = value + simd.load(simd.floats(bias_address), bias_at)
    return value


@inlined_kernel_function
def _gated(c, gate, up):
    if c.swiglu_limit > np.float32(0.0):
        return clamped_swiglu(gate, up, c.swiglu_alpha, c.swiglu_limit)
    return activate(c.activation, gate) * up


@kernel_function
def mlp_group(c, product, group, num_groups, row, count, bias_address, target, scratch_at):
    """Computes one of `num_groups` groups of 32 inputs of `down`, for up to four rows. With a gate it takes two pairs
    of tiles (see `int8_forward`), else one."""
    out_of_line()
    scratch = simd.floats(c.scratch)
    second_at = scratch_at + ROWS_AT_ONCE * OUTPUT_UNIT
    if c.is_gated != 0:
        multiply(product, 2 * group, row, count, scratch, scratch_at)
        multiply(product, 2 * group + 1, row, count, scratch, second_at)
        bias_at = 2 * group * OUTPUT_UNIT
        for r in range(count):
            i, j = scratch_at + r * OUTPUT_UNIT, second_at + r * OUTPUT_UNIT
            low = _gated(
                c, biased(scratch, i, bias_address, bias_at), biased(scratch, i + 16, bias_address, bias_at + 16)
            )
            bias_of_j = bias_at + OUTPUT_UNIT
            high = _gated(
                c, biased(scratch, j, bias_address, bias_of_j), biased(scratch, j + 16, bias_address, bias_of_j + 16)
            )
            quantize_group(low, high, target, (row + r) * num_groups + group)
    else:
        multiply(product, group, row, count, scratch, scratch_at)
        bias_at = group * OUTPUT_UNIT
        for r in range(count):
            i = scratch_at + r * OUTPUT_UNIT
            low = activate(c.activation, biased(scratch, i, bias_address, bias_at))
            high = activate(c.activation, biased(scratch, i + 16, bias_address, bias_at + 16))
            quantize_group(low, high, target, (row + r) * num_groups + group)


@kernel_function
def gate_and_up(c, phase, thread, product, inner_size, bias_address, target, scratch_at):
    out_of_line()
    work, num_groups, num_lots = simd.int64s(c.work), inner_size // GROUP, row_lots(c, c.num_rows)
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
                    mlp_group(c, product, group, num_groups, row, count, bias_address, target, scratch_at)
            mark_finished(work, phase, last - first)
            first = claim_items(work, phase, lot, chunk)
    wait_for_phase(work, phase, num_groups * num_lots)
