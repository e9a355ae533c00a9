"""The inner loop of int8 products: a few rows times 32 outputs, in registers. `kernels.weight_packing` draws the weights.

For each group of 32 inputs an integer sum, exact in any order, then, in this order and without fusing:

    sum = sum + (float(integer) * input_scale) * weight_scale
    sum = sum + offset * (input_scale * input_total)              nibbles only

Each (row, output) is its own chain of these, so its bits do not depend on how many rows share the loop.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from onward.kernels.cpu.dot_instruction import emit_dot
from onward.kernels.cpu.llvm_vectors import (
    F16X16,
    F32_ZEROS,
    F32X16,
    I16,
    I32,
    I32X16,
    LANES,
    Builder,
    Value,
    element_pointer,
    half_to_float,
    intrinsic_on_literals,
    load_value,
    require_literals,
    splat_value,
    store_value,
)
from onward.kernels.weight_packing import BYTES_RECORD, GROUP, NIBBLES_RECORD

NUM_TILES = 2


class _Emitter:
    """Emits one call's code. Pointers are to bytes of weights and inputs, and to the first group's scales."""

    def __init__(self, builder: Builder, level: str, is_nibbles: bool, num_rows: int) -> None:
        self.b, self.level, self.is_nibbles, self.num_rows = builder, level, is_nibbles, num_rows
        self.cells = [(row, tile) for row in range(num_rows) for tile in range(NUM_TILES)]

    def offset(self, pointer: Value, *terms: Value | int) -> Value:
        for term in terms:
            index = ir.Constant(I32, term) if isinstance(term, int) else term
            pointer = self.b.gep(pointer, [index])
        return pointer

    def splat_at(self, pointer: Value, *terms: Value | int) -> Value:
        return splat_value(self.b, self.b.load(self.offset(pointer, *terms)))

    def group_sums(self, records: list[Value], inputs: list[Value], starts: list[Value]) -> dict:
        """The exact integer sums of one group."""
        sums = {cell: starts[cell[0]] for cell in self.cells}
        for vector in range(4 if self.is_nibbles else 8):
            steps = self._nibble_steps(records, vector) if self.is_nibbles else self._byte_steps(records, vector)
            for at, weights in steps:
                for row in range(self.num_rows):
                    four = load_value(self.b, self.offset(inputs[row], at), I32, align=1)
                    value = splat_value(self.b, four)
                    for tile in range(NUM_TILES):
                        cell = row, tile
                        sums[cell] = emit_dot(self.level, self.b, sums[cell], weights[tile], value)
        return sums

    def _byte_steps(self, records: list[Value], vector: int) -> list:
        return [(4 * vector, [load_value(self.b, self.offset(r, 64 * vector), I32X16, 1) for r in records])]

    def _nibble_steps(self, records: list[Value], vector: int) -> list:
        both = [load_value(self.b, self.offset(r, 64 * vector), I32X16, 1) for r in records]
        mask, four = ir.Constant(I32X16, [0x0F0F0F0F] * LANES), ir.Constant(I32X16, [4] * LANES)
        low = [self.b.and_(v, mask) for v in both]
        high = [self.b.and_(self.b.lshr(v, four), mask) for v in both]
        return [(4 * vector, low), (16 + 4 * vector, high)]

    def scales(self, record: Value) -> tuple[Value, Value | None]:
        if not self.is_nibbles:
            return load_value(self.b, self.offset(record, 512), F32X16, 1), None
        scale, offset = (self._halves(self.offset(record, at)) for at in (256, 288))
        return scale, offset

    def _halves(self, pointer: Value) -> Value:
        if self.level == "plain":  # such CPUs may have no instruction for it
            bits = load_value(self.b, pointer, ir.VectorType(I16, LANES), 1)
            return half_to_float(self.b, self.b.zext(bits, I32X16))
        return self.b.fpext(load_value(self.b, pointer, F16X16, 1), F32X16)


@intrinsic_on_literals
def int8_tile(typing_context, level, is_nibbles, rows, weights, weights_at, tile_stride, num_groups,
              inputs, inputs_at, scales, totals, corrections, scales_at, out, out_at):  # fmt: skip
    """out[row, 0:32] = inputs[row] . two tiles of weights, for `rows` (a literal) rows.

    Row r's inputs are `num_groups * 32` bytes from `inputs_at` on, row after row; its scales, one per group, lie in
    `scales`, `totals` (scale times sum of the inputs) and `corrections` (-128 times that sum).
    """
    require_literals(level, is_nibbles, rows)

    def emit(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
        names = ("weights", "inputs", "scales", "totals", "corrections", "out")
        arg_indices = {"weights": 3, "inputs": 7, "scales": 9, "totals": 10, "corrections": 11, "out": 13}
        starts = {"weights": 4, "inputs": 8, "scales": 12, "totals": 12, "corrections": 12, "out": 14}
        pointer = {
            name: element_pointer(
                context, builder, sig.args[arg_indices[name]], args[arg_indices[name]], args[starts[name]]
            )
            for name in names
        }
        stride, groups = args[5], args[6]
        e = _Emitter(builder, level.literal_value, bool(is_nibbles.literal_value), rows.literal_value)
        record_size = ir.Constant(groups.type, NIBBLES_RECORD if e.is_nibbles else BYTES_RECORD)
        row_bytes = builder.mul(groups, ir.Constant(groups.type, GROUP))

        def row_pointer(name: str, row: int, step: Value) -> Value:
            return e.offset(pointer[name], builder.mul(step, ir.Constant(step.type, row)))

        input_rows = [row_pointer("inputs", row, row_bytes) for row in range(e.num_rows)]
        scale_rows, total_rows, correction_rows = (
            [row_pointer(name, row, groups) for row in range(e.num_rows)]
            for name in ("scales", "totals", "corrections")
        )
        sums = {cell: cgutils.alloca_once_value(builder, F32_ZEROS) for cell in e.cells}
        for cell in e.cells:
            builder.store(F32_ZEROS, sums[cell])
        with cgutils.for_range(builder, groups) as loop:
            group = loop.index
            first = e.offset(pointer["weights"], builder.mul(group, record_size))
            records = [first, e.offset(first, stride)]
            group_inputs = [e.offset(r, builder.mul(group, ir.Constant(group.type, GROUP))) for r in input_rows]
            zeros = ir.Constant(I32X16, [0] * LANES)
            begins = [zeros if e.is_nibbles else e.splat_at(c, group) for c in correction_rows]
            integers = e.group_sums(records, group_inputs, begins)
            tile_scales = [e.scales(record) for record in records]
            for row, tile in e.cells:
                scale, offset = tile_scales[tile]
                value = builder.fmul(builder.sitofp(integers[row, tile], F32X16), e.splat_at(scale_rows[row], group))
                total = builder.fadd(builder.load(sums[row, tile]), builder.fmul(value, scale))
                if offset is not None:
                    total = builder.fadd(total, builder.fmul(offset, e.splat_at(total_rows[row], group)))
                builder.store(total, sums[row, tile])
        for row, tile in e.cells:
            out_ptr = e.offset(pointer["out"], (row * NUM_TILES + tile) * LANES)
            store_value(builder, out_ptr, builder.load(sums[row, tile]))
        return context.get_dummy_value()

    index = types.intp
    signature = types.void(level, is_nibbles, rows, weights, index, index, index, inputs, index, scales, totals,
                           corrections, index, out, index)  # fmt: skip
    return signature, emit
