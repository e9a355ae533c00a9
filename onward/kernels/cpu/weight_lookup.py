"""Reads the weights of one output of a packed matrix as floats: a token's embedding.

One function serves all formats, and reads the properties of a format from an array. A product reads each weight for
many rows and has a function for each format (`weight_kernels`); this reads only a few thousand weights per token.
"""

import numpy as np

from onward.kernels.cpu import simd
from onward.kernels.cpu.jit import inlined_kernel_function, kernel_function, out_of_line
from onward.kernels.weight_formats import CODE_LEVELS, GROUP, TILE, WeightFormat

(_RECORD_BYTES, _HEADER_BYTES, _GROUP_BYTES, _LEVEL_BYTES, _GROUPS, _CENTER, _NUM_PLANES, _FIRST_BITS, _SECOND_BITS,
 _SCALES, _HAS_CODES) = range(11)  # fmt: skip
_FLOAT, _HALF, _OFFSET, _ZERO, _EXPONENT, _SUPER, _HALVES, _HALVES_OFFSET = range(8)
_SCALE_CODES = {
    "float": _FLOAT, "half": _HALF, "offset": _OFFSET, "zero": _ZERO, "exponent": _EXPONENT, "super": _SUPER,
    "halves": _HALVES, "halves_offset": _HALVES_OFFSET,
}  # fmt: skip


def format_fields(kind: WeightFormat) -> np.ndarray:
    """Returns the properties of a format that `look_up` needs, as int64."""
    bits = [*kind.plane_bits, 0][:2]
    values = [kind.record_bytes, kind.header_bytes, kind.group_bytes, kind.level_bytes, kind.groups, kind.center,
              len(kind.plane_bits), *bits, _SCALE_CODES[kind.scales], int(kind.has_codes)]  # fmt: skip
    return np.array(values, np.int64)


@inlined_kernel_function
def _level(table, fields, group_at, lane, i):
    chunk, value, at, shift = i // 4, np.int64(0), group_at, 0
    for plane in range(fields[_NUM_PLANES]):
        bits = fields[_FIRST_BITS + plane]
        byte = np.int64(table[at + chunk % bits * 64 + lane * 4 + i % 4])
        value |= ((byte >> (chunk // bits * bits)) & ((1 << bits) - 1)) << shift
        at += 64 * bits
        shift += bits
    if fields[_HAS_CODES] != 0:
        value = np.int64(CODE_LEVELS[value])
    return np.float32(value - fields[_CENTER])


@inlined_kernel_function
def _scale_and_offset(table, kind, record_at, own_at, lane, half):
    """Returns the scale and offset of one output and 16 inputs."""
    d_at = record_at + 2 * lane
    if kind == _FLOAT:
        return simd.float_at(table, own_at + 4 * lane), np.float32(0.0)
    if kind == _SUPER:
        scale = simd.half_at(table, d_at) * np.float32(table[own_at + lane])
        return scale, -(simd.half_at(table, d_at + 2 * TILE) * np.float32(table[own_at + TILE + lane]))
    if kind == _HALVES:
        return simd.half_at(table, d_at) * np.float32(np.int8(table[own_at + TILE * half + lane])), np.float32(0.0)
    if kind == _HALVES_OFFSET:
        both = table[own_at + TILE * half + lane]
        scale = simd.half_at(table, d_at) * np.float32(both & 15)
        return scale, -(simd.half_at(table, d_at + 2 * TILE) * np.float32(both >> 4))
    if kind == _EXPONENT:
        e = np.int64(table[own_at + lane])
        return simd.float_of_bits(np.int32((1 << 21) << e if e < 2 else (e - 1) << 23)), np.float32(0.0)
    scale = simd.half_at(table, own_at + 2 * lane)
    if kind == _OFFSET:
        return scale, simd.half_at(table, own_at + 2 * TILE + 2 * lane)
    if kind == _ZERO:
        return scale, -(scale * np.float32(table[own_at + 2 * TILE + lane]))
    return scale, np.float32(0.0)


@kernel_function
def look_up(table, fields, groups, output, out, out_at):
    """Writes the weights of an output of a packed matrix with `groups` groups of inputs. `fields` are `format_fields`."""
    out_of_line()
    lane, per_record = output % TILE, fields[_GROUPS]
    first = output // TILE * (groups // per_record) * fields[_RECORD_BYTES]
    for group in range(groups):
        record_at = first + group // per_record * fields[_RECORD_BYTES]
        group_at = record_at + fields[_HEADER_BYTES] + group % per_record * fields[_GROUP_BYTES]
        own_at = group_at + fields[_LEVEL_BYTES]
        for half in range(2):
            scale, offset = _scale_and_offset(table, fields[_SCALES], record_at, own_at, lane, half)
            for i in range(16 * half, 16 * half + 16):
                out[out_at + group * GROUP + i] = _level(table, fields, group_at, lane, i) * scale + offset
