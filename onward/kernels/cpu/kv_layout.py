"""The memory layout of keys and values: records of sixteen positions of one KV head.

    float32   keys [head_dim][16], values [16][head_dim]
    int8      keys [head_dim / 4][16][4], each plus 128; 16 float32 scales;
              values [4][head_dim][4 positions]; 16 float32 scales

A page of `block_size` positions is [kv head][block_size / 16] records; pages follow each other. Sizes and offsets count
elements of the array's own type (uint8 stands for int8), whose size is `itemsize`. In int8 each (position, head) has a
scale for its key and one for its value; both are in the order in which the integer products read them.
"""

import numpy as np

from onward.kernels.cpu import simd
from onward.kernels.cpu.jit import inlined_kernel_function

POSITIONS_PER_RECORD = 16
_SCALE_BYTES = 4 * POSITIONS_PER_RECORD


def record_size(head_dim: int, itemsize: int) -> int:
    return 2 * (POSITIONS_PER_RECORD * head_dim + (_SCALE_BYTES if itemsize == 1 else 0))


def values_offset(head_dim: int, itemsize: int) -> int:
    return POSITIONS_PER_RECORD * head_dim + (_SCALE_BYTES if itemsize == 1 else 0)


record_size_of = inlined_kernel_function(record_size)
values_offset_of = inlined_kernel_function(values_offset)


@inlined_kernel_function
def record_at(page, head, part, num_kv_heads, parts_per_page, size):
    """Returns the offset of a record: part number `part` of a page."""
    return ((page * num_kv_heads + head) * parts_per_page + part) * size


@inlined_kernel_function
def store_key(kv, record, lane, source, source_at, head_dim):
    """Stores the key of position `lane` of a record."""
    if simd.itemsize(kv) == 4:
        for i in range(head_dim):
            kv[record + i * POSITIONS_PER_RECORD + lane] = source[source_at + i]
    else:
        factor = _store_scale(kv, record + POSITIONS_PER_RECORD * head_dim + 4 * lane, source, source_at, head_dim)
        for i in range(head_dim):
            level = np.int32(np.rint(source[source_at + i] * factor))
            kv[record + i // 4 * 4 * POSITIONS_PER_RECORD + lane * 4 + i % 4] = level + 128


@inlined_kernel_function
def store_value(kv, record, lane, source, source_at, head_dim):
    at = record + values_offset_of(head_dim, simd.itemsize(kv))
    if simd.itemsize(kv) == 4:
        for i in range(head_dim):
            kv[at + lane * head_dim + i] = source[source_at + i]
    else:
        factor = _store_scale(kv, at + POSITIONS_PER_RECORD * head_dim + 4 * lane, source, source_at, head_dim)
        for i in range(head_dim):
            level = np.int32(np.rint(source[source_at + i] * factor))
            kv[at + lane // 4 * 4 * head_dim + i * 4 + lane % 4] = level


@inlined_kernel_function
def _store_scale(kv, at, source, source_at, head_dim):
    """Writes the scale that makes the largest value 127, and returns its inverse."""
    largest = simd.splat(np.float32(0.0))
    for i in range(0, head_dim, 16):
        largest = simd.larger_magnitude(largest, simd.load(source, source_at + i))
    most = simd.max_magnitude(largest)
    simd.store_float(kv, at, most / np.float32(127.0))
    return np.float32(127.0) / most if most > np.float32(0.0) else np.float32(0.0)
