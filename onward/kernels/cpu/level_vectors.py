"""Makes operands of the dot instruction out of packed levels: [16 outputs][4 inputs], one byte each."""

from llvmlite import ir

from onward.kernels.cpu.llvm_vectors import I8, I32, I32X16, LANES, Builder, Value, call_llvm, load_value
from onward.kernels.weight_formats import CODE_LEVELS, WeightFormat

_I8X64 = ir.VectorType(I8, 64)
_I8X32 = ir.VectorType(I8, 32)


def _in_each_byte(value: int) -> ir.Constant:
    return ir.Constant(I32X16, [value * 0x01010101] * LANES)


class LevelEmitter:
    def __init__(self, builder: Builder, level: str, kind: WeightFormat) -> None:
        self._b, self._level, self._kind = builder, level, kind

    def chunk(self, group: Value, chunk: int) -> Value:
        """Returns the levels of the four inputs from 4 * chunk on, for a group of 16 outputs, as <16 x i32>."""
        result, at, target = None, 0, 0
        for bits in self._kind.plane_bits:
            vector = load_value(self._b, self._b.gep(group, [ir.Constant(I32, at + 64 * (chunk % bits))]), I32X16, 1)
            part = self._moved(vector, bits, chunk // bits * bits, target)
            result = part if result is None else self._b.or_(result, part)
            at, target = at + 64 * bits, target + bits
        return self._decoded(result) if self._kind.has_codes else result

    def _moved(self, vector: Value, bits: int, start: int, target: int) -> Value:
        """Returns the bits from `start` on of each byte, moved to `target`. All other bits are zero."""
        if bits == 8:
            return vector
        distance = ir.Constant(I32X16, [abs(start - target)] * LANES)
        moved = vector
        if start != target:
            moved = self._b.lshr(vector, distance) if start > target else self._b.shl(vector, distance)
        return self._b.and_(moved, _in_each_byte(((1 << bits) - 1) << target))

    def _decoded(self, codes: Value) -> Value:
        """Returns the `CODE_LEVELS` of each byte."""
        if self._level == "plain":
            return self._decoded_plainly(codes)
        table = ir.Constant(_I8X64, list(CODE_LEVELS) * 4)
        indices = self._b.bitcast(codes, _I8X64)
        if self._level == "vnni":
            found = call_llvm(self._b, "llvm.x86.avx512.pshuf.b.512", _I8X64, table, indices)
            return self._b.bitcast(found, I32X16)
        undefined, halves = ir.Constant(_I8X64, ir.Undefined), []
        for first in (0, 32):
            lanes = ir.Constant(ir.VectorType(I32, 32), list(range(first, first + 32)))
            parts = [self._b.shuffle_vector(vector, undefined, lanes) for vector in (table, indices)]
            halves.append(call_llvm(self._b, "llvm.x86.avx2.pshuf.b", _I8X32, *parts))
        both = self._b.shuffle_vector(*halves, ir.Constant(ir.VectorType(I32, 64), list(range(64))))
        return self._b.bitcast(both, I32X16)

    def _decoded_plainly(self, codes: Value) -> Value:
        def constant(value: int) -> ir.Constant:
            return ir.Constant(_I8X64, [value] * 64)

        b, codes = self._b, self._b.bitcast(codes, _I8X64)
        code = b.and_(codes, constant(7))
        magnitude = code  # the codes 0 to 4 are their own values
        for special in (5, 6, 7):
            is_special = b.icmp_unsigned("==", code, constant(special))
            magnitude = b.select(is_special, constant(CODE_LEVELS[special] - CODE_LEVELS[0]), magnitude)
        is_negative = b.icmp_unsigned(">", codes, constant(7))
        zero = constant(CODE_LEVELS[0])
        return b.bitcast(b.select(is_negative, b.sub(zero, magnitude), b.add(zero, magnitude)), I32X16)
