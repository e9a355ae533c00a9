"""The two inner loops of attention in int8, in registers: keys against queries, and weights against values.

    scores[j, 0:16] = (float(q[j] . sixteen keys) * q_scale[j]) * key_scales
    sums[j, :]      = sums[j, :] + float(sum over up to 64 positions of weight[j] * value) * weight_scale[j]

The integer sums are exact. Each (row, lane) has one chain of float operations, whichever rows share the loop.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from onward.kernels.cpu.dot_instruction import emit_dot
from onward.kernels.cpu.llvm_vectors import (
    F32X16,
    I8,
    I32,
    I32X16,
    LANES,
    Builder,
    Value,
    element_pointer,
    fma_value,
    intrinsic_on_literals,
    load_value,
    require_literals,
    splat_value,
    store_value,
)

_BYTES = I8.as_pointer()


def _step(builder: Builder, pointer: Value, index: Value | int, times: int = 1) -> Value:
    """Returns the pointer `index * times` elements further on."""
    if isinstance(index, int):
        return builder.gep(pointer, [ir.Constant(ir.IntType(64), index * times)])
    return builder.gep(pointer, [builder.mul(index, ir.Constant(index.type, times))])


def _splat_four(builder: Builder, pointer: Value) -> Value:
    return splat_value(builder, load_value(builder, pointer, I32, align=1))


@intrinsic_on_literals
def int8_scores(typing_context, level, rows, record, head_dim, q, q_at, scales, corrections, row, out, out_at, stride):
    """Computes the scores of sixteen keys, which are at the address `record`. Queries are int8 [pairs, head_dim] from
    `q_at` on. `scales` and `corrections` (-128 times the sum of a query) have one value per pair, from index `row`
    on."""
    require_literals(level, rows)
    num_rows = rows.literal_value

    def emit(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
        _, _, record_, dim, q_, q_at_, scales_, corrections_, row_, out_, out_at_, stride_ = args
        keys = builder.inttoptr(record_, _BYTES)
        q_ptr = builder.bitcast(element_pointer(context, builder, sig.args[4], q_, q_at_), _BYTES)
        scale_ptr = element_pointer(context, builder, sig.args[6], scales_, row_)
        correction_ptr = element_pointer(context, builder, sig.args[7], corrections_, row_)
        out_ptr = element_pointer(context, builder, sig.args[9], out_, out_at_)
        q_rows = [_step(builder, q_ptr, dim, j) for j in range(num_rows)]
        sums = [cgutils.alloca_once(builder, I32X16) for _ in range(num_rows)]
        for j in range(num_rows):
            builder.store(splat_value(builder, builder.load(_step(builder, correction_ptr, j))), sums[j])
        with cgutils.for_range(builder, builder.lshr(dim, ir.Constant(dim.type, 2))) as loop:
            vector = load_value(builder, _step(builder, keys, loop.index, 4 * LANES), I32X16, 1)
            for j in range(num_rows):
                four = _splat_four(builder, _step(builder, q_rows[j], loop.index, 4))
                total = emit_dot(level.literal_value, builder, builder.load(sums[j]), vector, four)
                builder.store(total, sums[j])
        key_scales = load_value(builder, _step(builder, keys, dim, LANES), F32X16, 1)
        for j in range(num_rows):
            scale = splat_value(builder, builder.load(_step(builder, scale_ptr, j)))
            score = builder.fmul(builder.sitofp(builder.load(sums[j]), F32X16), scale)
            store_value(builder, _step(builder, out_ptr, stride_, j), builder.fmul(score, key_scales))
        return context.get_dummy_value()

    index = types.int64
    signature = types.void(level, rows, index, index, q, index, scales, corrections, index, out, index, index)
    return signature, emit


@intrinsic_on_literals
def int8_values(typing_context, level, rows, columns, records, first, num_records, values_at, column, head_dim,
                weights, weights_at, weights_step, scales, scales_at, scales_step, sums, sums_at):  # fmt: skip
    """Adds weighted values to sums, for 16 * `columns` lanes from `column` on. `records` has addresses, of which
    `num_records` (up to four) from `first` on are read. A row's weights are 64 bytes from `weights_at` on, in rows of
    `weights_step` bytes; its sums are `head_dim` floats."""
    require_literals(level, rows, columns)
    num_rows, num_columns = rows.literal_value, columns.literal_value

    def emit(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
        (_, _, _, records_, first_, count, values_at_, column_, dim, weights_, weights_at_, weights_step_, scales_,
         scales_at_, scales_step_, sums_, sums_at_) = args  # fmt: skip
        record_ptr = element_pointer(context, builder, sig.args[3], records_, first_)
        weight_ptr = builder.bitcast(element_pointer(context, builder, sig.args[9], weights_, weights_at_), _BYTES)
        scale_ptr = element_pointer(context, builder, sig.args[12], scales_, scales_at_)
        sum_ptr = _step(builder, element_pointer(context, builder, sig.args[15], sums_, sums_at_), column_)
        weight_rows = [_step(builder, weight_ptr, weights_step_, j) for j in range(num_rows)]
        cells = [(j, c) for j in range(num_rows) for c in range(num_columns)]
        totals = {cell: cgutils.alloca_once(builder, I32X16) for cell in cells}
        for cell in cells:
            builder.store(ir.Constant(I32X16, [0] * LANES), totals[cell])
        with cgutils.for_range(builder, count) as loop:
            address = builder.load(_step(builder, record_ptr, loop.index))
            base = builder.gep(builder.inttoptr(address, _BYTES), [values_at_])
            base = _step(builder, base, column_, 4)
            for quad in range(4):
                quad_ptr = _step(builder, base, dim, 4 * quad)
                vectors = [
                    load_value(builder, _step(builder, quad_ptr, 4 * LANES * c), I32X16, 1) for c in range(num_columns)
                ]
                for j in range(num_rows):
                    element_ptr = _step(builder, _step(builder, weight_rows[j], loop.index, LANES), 4 * quad)
                    four = _splat_four(builder, element_ptr)
                    for c in range(num_columns):
                        cell = totals[j, c]
                        total = emit_dot(level.literal_value, builder, builder.load(cell), four, vectors[c])
                        builder.store(total, cell)
        for j, c in cells:
            scale = splat_value(builder, builder.load(_step(builder, scale_ptr, scales_step_, j)))
            element_ptr = _step(builder, _step(builder, sum_ptr, dim, j), c * LANES)
            value = builder.sitofp(builder.load(totals[j, c]), F32X16)
            store_value(
                builder, element_ptr, fma_value(builder, value, scale, load_value(builder, element_ptr, F32X16))
            )
        return context.get_dummy_value()

    index = types.int64
    signature = types.void(level, rows, columns, records, index, index, index, index, index, weights, index, index,
                           scales, index, index, sums, index)  # fmt: skip
    return signature, emit
