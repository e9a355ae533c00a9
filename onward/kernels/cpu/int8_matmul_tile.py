"""The inner loop of int8 products: a few rows times 32 outputs, in registers, for every format of `kernels.weight_formats`.

For each group of 32 inputs there is an integer sum, exact in any order, and then, in this order and without fusing:

    sum = sum + (float(integer) * input_scale) * weight_scale
    sum = sum + offset * (input_scale * input_total)                  formats with an offset

If 16 inputs have a scale of their own, each half has an integer sum, which is multiplied by its small scale; that is
exact:

    sum = sum + ((float(low) * low_scale + float(high) * high_scale) * input_scale) * d
    sum = sum + ((float(-128 low_total) * low_offset + ...) * input_scale) * (m / 128)

Each (row, output) is its own chain of these operations, so its bits do not depend on how many rows share the loop.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from onward.kernels.cpu.dot_instruction import emit_dot
from onward.kernels.cpu.level_vectors import LevelEmitter
from onward.kernels.cpu.llvm_vectors import (
    F16X16,
    F32,
    F32_ZEROS,
    F32X16,
    I8,
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
from onward.kernels.weight_formats import CHUNKS, FORMATS, GROUP, WeightFormat

NUM_TILES = 2
_HALF_BYTES = 2 * LANES
_CHUNK_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Chunks that share a vector of nibbles follow each other."""


def _i32s(value: int) -> ir.Constant:
    return ir.Constant(I32X16, [value] * LANES)


class _Emitter:
    """Emits one call's code. Pointers are to bytes of weights and inputs, and to the first group's scales."""

    def __init__(self, builder: Builder, level: str, kind: WeightFormat, num_rows: int) -> None:
        self.b, self.level, self.kind, self.num_rows = builder, level, kind, num_rows
        self.cells = [(row, tile) for row in range(num_rows) for tile in range(NUM_TILES)]
        self._levels = LevelEmitter(builder, level, kind)

    def offset(self, pointer: Value, *terms: Value | int) -> Value:
        for term in terms:
            index = ir.Constant(I32, term) if isinstance(term, int) else term
            pointer = self.b.gep(pointer, [index])
        return pointer

    def splat_at(self, pointer: Value, *terms: Value | int) -> Value:
        return splat_value(self.b, self.b.load(self.offset(pointer, *terms)))

    def group_sums(self, groups: list[Value], inputs: list[Value], starts: list[Value], chunks: list[int]) -> dict:
        """Emits the exact integer sums over some chunks of a group; the sums of row r begin with `starts[r]`."""
        sums = {cell: splat_value(self.b, starts[cell[0]]) for cell in self.cells}
        for chunk in chunks:
            weights = [self._levels.chunk(group, chunk) for group in groups]
            for row in range(self.num_rows):
                four = load_value(self.b, self.offset(inputs[row], 4 * chunk), I32, align=1)
                value = splat_value(self.b, four)
                for tile in range(NUM_TILES):
                    cell = row, tile
                    sums[cell] = emit_dot(self.level, self.b, sums[cell], weights[tile], value)
        return sums

    def centered(self, correction: Value) -> Value:
        """Emits -center times the sum of some inputs, from -128 times that sum."""
        scaled = self.b.mul(correction, ir.Constant(I32, self.kind.center))
        return self.b.ashr(scaled, ir.Constant(I32, 7))

    def scale_and_offset(self, header: Value, group: Value) -> tuple[Value, Value | None]:
        """Emits scale and offset of 16 outputs, for formats with one scale per group. Products of a float16 and a byte
        are exact."""
        own = self.offset(group, self.kind.level_bytes)
        match self.kind.scales:
            case "float":
                return load_value(self.b, own, F32X16, 1), None
            case "half":
                return self.halves(own), None
            case "offset":
                return self.halves(own), self.halves(self.offset(own, _HALF_BYTES))
            case "zero":
                scale = self.halves(own)
                return scale, self.b.fneg(self.b.fmul(scale, self.bytes_as_floats(self.offset(own, _HALF_BYTES))))
            case "exponent":
                return self._powers(own), None
            case "super":
                scale = self.b.fmul(self.halves(header), self.bytes_as_floats(own))
                offset = self.b.fmul(
                    self.halves(self.offset(header, _HALF_BYTES)), self.bytes_as_floats(self.offset(own, LANES))
                )
                return scale, self.b.fneg(offset)
        raise AssertionError(self.kind.scales)

    def half_scales(self, group: Value) -> list[tuple[Value, Value | None]]:
        """Emits the small scale and offset of each half of a group."""
        own, found = self.offset(group, self.kind.level_bytes), []
        for start in (0, LANES):
            raw = load_value(self.b, self.offset(own, start), ir.VectorType(I8, LANES), 1)
            if self.kind.scales == "halves":
                found.append((self.b.sitofp(self.b.sext(raw, I32X16), F32X16), None))
            else:
                wide = self.b.zext(raw, I32X16)
                parts = self.b.and_(wide, _i32s(15)), self.b.lshr(wide, _i32s(4))
                found.append(tuple(self.b.sitofp(part, F32X16) for part in parts))
        return found

    def _powers(self, pointer: Value) -> Value:
        """Emits 2^(e - 128) of 16 bytes, as bits; the two lowest are subnormal."""
        wide = self.b.zext(load_value(self.b, pointer, ir.VectorType(I8, LANES), 1), I32X16)
        normal = self.b.shl(self.b.sub(wide, _i32s(1)), _i32s(23))
        is_small = self.b.icmp_unsigned("<", wide, _i32s(2))
        small = self.b.shl(_i32s(1 << 21), self.b.and_(wide, _i32s(1)))
        return self.b.bitcast(self.b.select(is_small, small, normal), F32X16)

    def bytes_as_floats(self, pointer: Value) -> Value:
        raw = load_value(self.b, pointer, ir.VectorType(I8, LANES), 1)
        return self.b.sitofp(self.b.zext(raw, I32X16), F32X16)

    def halves(self, pointer: Value) -> Value:
        if self.level == "plain":  # such CPUs may have no instruction for it
            bits = load_value(self.b, pointer, ir.VectorType(I16, LANES), 1)
            return half_to_float(self.b, self.b.zext(bits, I32X16))
        return self.b.fpext(load_value(self.b, pointer, F16X16, 1), F32X16)


class _Rows:
    """Emits the addresses of each row's inputs of one group, and loads their scales, totals and corrections."""

    def __init__(self, e: _Emitter, pointers: dict[str, Value], num_groups: Value) -> None:
        self._e, self._pointers, self._num_groups = e, pointers, num_groups

    def inputs(self, group: Value) -> list[Value]:
        return [self._e.offset(self._at("inputs", row, group, GROUP)) for row in range(self._e.num_rows)]

    def values(self, name: str, group: Value) -> list[Value]:
        return [self._e.b.load(self._at(name, row, group, 1)) for row in range(self._e.num_rows)]

    def _at(self, name: str, row: int, group: Value, size: int) -> Value:
        b = self._e.b
        index = b.add(b.mul(self._num_groups, ir.Constant(group.type, row)), group)
        return self._e.offset(self._pointers[name], b.mul(index, ir.Constant(group.type, size)))


def _add_group(e: _Emitter, rows: _Rows, headers: list[Value], groups: list[Value], group: Value, sums: dict) -> None:
    corrections = rows.values("corrections", group)
    starts = [e.centered(correction) for correction in corrections]
    integers = e.group_sums(groups, rows.inputs(group), starts, _CHUNK_ORDER)
    tile_scales = [e.scale_and_offset(*pair) for pair in zip(headers, groups, strict=True)]
    scales, totals = rows.values("scales", group), rows.values("totals", group)
    for row, tile in e.cells:
        scale, offset = tile_scales[tile]
        value = e.b.fmul(e.b.sitofp(integers[row, tile], F32X16), splat_value(e.b, scales[row]))
        total = e.b.fadd(e.b.load(sums[row, tile]), e.b.fmul(value, scale))
        if offset is not None:
            total = e.b.fadd(total, e.b.fmul(offset, splat_value(e.b, totals[row])))
        e.b.store(total, sums[row, tile])


def _add_half_groups(
    e: _Emitter, rows: _Rows, headers: list[Value], groups: list[Value], group: Value, sums: dict
) -> None:
    b = e.b
    low = rows.values("low_corrections", group)
    high = [b.sub(*pair) for pair in zip(rows.values("corrections", group), low, strict=True)]
    scales, inputs = rows.values("scales", group), rows.inputs(group)
    tile_scales = [e.half_scales(pointer) for pointer in groups]
    parts: dict = {cell: [] for cell in e.cells}
    for half, corrections in enumerate((low, high)):
        starts = [e.centered(correction) for correction in corrections]
        integers = e.group_sums(groups, inputs, starts, list(range(CHUNKS // 2 * half, CHUNKS // 2 * (half + 1))))
        for row, tile in e.cells:
            parts[row, tile].append(b.fmul(b.sitofp(integers[row, tile], F32X16), tile_scales[tile][half][0]))
    for row, tile in e.cells:
        input_scale = splat_value(b, scales[row])
        value = b.fmul(b.fmul(b.fadd(*parts[row, tile]), input_scale), e.halves(headers[tile]))
        total = b.fadd(b.load(sums[row, tile]), value)
        if e.kind.scales == "halves_offset":
            minimum = b.fmul(e.halves(e.offset(headers[tile], _HALF_BYTES)), ir.Constant(F32X16, [1 / 128] * LANES))
            products = [
                b.fmul(splat_value(b, b.sitofp(c[row], F32)), tile_scales[tile][half][1])
                for half, c in enumerate((low, high))
            ]
            total = b.fadd(total, b.fmul(b.fmul(b.fadd(*products), input_scale), minimum))
        b.store(total, sums[row, tile])


@intrinsic_on_literals
def int8_tile(typing_context, level, kind, rows, weights, num_groups, inputs, scales, totals, corrections,
              low_corrections, out):  # fmt: skip
    """Computes out[row, 0:32] = inputs[row] . two tiles of weights in the format of the name `kind`, for `rows` rows.

    `level`, `kind` and `rows` are literals; the others but `num_groups` are pointers. Pointers to inputs lead to the
    first row's first group. The inputs of a row are `num_groups * 32` bytes, row after row; scales and the arrays after
    them have one value per group (see `quantized_rows`).
    """
    require_literals(level, kind, rows)

    def emit(context: Any, builder: Builder, sig: Any, args: Any) -> Any:
        names = ("inputs", "scales", "totals", "corrections", "low_corrections")
        zero = ir.Constant(args[4].type, 0)
        pointers = {
            name: element_pointer(context, builder, sig.args[5 + index], args[5 + index], zero)
            for index, name in enumerate(names)
        }
        num_groups, out = args[4], element_pointer(context, builder, sig.args[10], args[10], zero)
        e = _Emitter(builder, level.literal_value, FORMATS[kind.literal_value], rows.literal_value)
        rows_of = _Rows(e, pointers, num_groups)

        def size(value: int) -> ir.Constant:
            return ir.Constant(num_groups.type, value)

        shift = size(e.kind.groups.bit_length() - 1)
        tile_bytes = builder.mul(builder.lshr(num_groups, shift), size(e.kind.record_bytes))
        sums = {cell: cgutils.alloca_once_value(builder, F32_ZEROS) for cell in e.cells}
        for cell in e.cells:
            builder.store(F32_ZEROS, sums[cell])
        first_tile = element_pointer(context, builder, sig.args[3], args[3], zero)
        add = _add_half_groups if e.kind.has_half_groups else _add_group
        with cgutils.for_range(builder, num_groups) as loop:
            group = loop.index
            record = builder.mul(builder.lshr(group, shift), size(e.kind.record_bytes))
            inside = builder.mul(builder.and_(group, size(e.kind.groups - 1)), size(e.kind.group_bytes))
            headers = [e.offset(first_tile, record), e.offset(first_tile, tile_bytes, record)]
            groups = [e.offset(header, e.kind.header_bytes, inside) for header in headers]
            add(e, rows_of, headers, groups, group, sums)
        for row, tile in e.cells:
            out_ptr = e.offset(out, (row * NUM_TILES + tile) * LANES)
            store_value(builder, out_ptr, builder.load(sums[row, tile]))
        return context.get_dummy_value()

    signature = types.void(level, kind, rows, weights, types.intp, inputs, scales, totals, corrections, low_corrections,
                           out)  # fmt: skip
    return signature, emit
