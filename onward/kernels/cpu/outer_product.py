"""The inner loop of attention: sums of outer products, in registers.

    out[j, :] = sum over k, in order, of a[j, k] * b[k, :]          j < rows, 16 * columns lanes

Each (row, lane) is one chain of fused multiply-adds over k, so its bits do not depend on how many rows share the loop.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from onward.kernels.cpu.llvm_vectors import (
    F32_ZEROS,
    F32X16,
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


@intrinsic_on_literals
def outer_sum(typing_context, rows, columns, resume, a, a_at, a_step, b, b_at, b_step, count, out, out_at, out_step):
    """Computes the sums that the module describes, and writes them to `out`. `rows`, `columns` and `resume` are
    literals. With `resume` the sums begin with the values in `out` instead of zero."""
    require_literals(rows, columns, resume)
    num_rows, num_columns, resumes = rows.literal_value, columns.literal_value, resume.literal_value

    def emit(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
        _, _, _, a_, a_at_, a_step_, b_, b_at_, b_step_, count_, out_, out_at_, out_step_ = args
        a_ptr = element_pointer(context, builder, sig.args[3], a_, a_at_)
        b_ptr = element_pointer(context, builder, sig.args[6], b_, b_at_)
        out_ptr = element_pointer(context, builder, sig.args[10], out_, out_at_)

        def out_cell(j: int, c: int) -> Value:
            row = builder.mul(out_step_, ir.Constant(out_step_.type, j))
            return builder.gep(out_ptr, [builder.add(row, ir.Constant(row.type, c * LANES))])

        cells = [(j, c) for j in range(num_rows) for c in range(num_columns)]
        sums = {cell: cgutils.alloca_once(builder, F32X16) for cell in cells}
        for cell in cells:
            start = load_value(builder, out_cell(*cell), F32X16) if resumes else F32_ZEROS
            builder.store(start, sums[cell])
        with cgutils.for_range(builder, count_) as loop:
            k = loop.index
            b_row = builder.gep(b_ptr, [builder.mul(k, b_step_)])
            vectors = [
                load_value(builder, builder.gep(b_row, [ir.Constant(k.type, c * LANES)]), F32X16)
                for c in range(num_columns)
            ]
            for j in range(num_rows):
                a_row = builder.mul(a_step_, ir.Constant(a_step_.type, j))
                factor = splat_value(builder, builder.load(builder.gep(a_ptr, [builder.add(a_row, k)])))
                for c in range(num_columns):
                    cell = sums[j, c]
                    builder.store(fma_value(builder, factor, vectors[c], builder.load(cell)), cell)
        for cell in cells:
            store_value(builder, out_cell(*cell), builder.load(sums[cell]))
        return context.get_dummy_value()

    index = types.intp
    return types.void(rows, columns, resume, a, index, index, b, index, index, index, out, index, index), emit
