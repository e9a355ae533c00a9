"""Packs weights in the layout of `weight_formats`, and unpacks them for references.

Float weights become int8 with a scale for each group of 32, or 4 bits on a grid of sixteen levels where that is exact.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from onward.kernels.weight_formats import (
    CHUNKS,
    CODE_LEVELS,
    GROUP,
    INT8,
    OUTPUT_UNIT,
    Q4_1,
    TILE,
    WeightFormat,
    format_of_record,
)


def pack(weight: np.ndarray) -> np.ndarray:
    """Packs a matrix as Q4_1 if its weights allow that without loss, else as int8."""
    outputs, inputs = weight.shape
    assert inputs % GROUP == 0
    padded = np.zeros((padded_outputs(outputs), inputs), np.float32)
    padded[:outputs] = weight
    groups = padded.reshape(len(padded), inputs // GROUP, GROUP)
    found = find_grid(groups)
    if found is None:
        return pack_int8(*_rounded(groups))
    levels, scale, offset = found
    return pack_levels(Q4_1, levels, group_fields=[scale, offset])


def padded_outputs(outputs: int) -> int:
    return -(-outputs // OUTPUT_UNIT) * OUTPUT_UNIT


def pack_int8(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Packs `values` int8 [outputs, groups, 32] and `scale` float32 [outputs, groups] without a change."""
    levels = (values.astype(np.int16) + INT8.center).astype(np.uint8)
    return pack_levels(INT8, levels, group_fields=[scale])


def _rounded(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = np.abs(groups).max(-1) / np.float32(127)
    step = np.where(scale == 0, np.float32(1), scale)[..., None]
    return np.rint(groups / step).astype(np.int8), scale


def find_grid(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Returns (u, scale, offset) with w == scale * u + offset bit by bit, u in 0..15 and float16 scales; None if there
    is no such grid.

    The least weight of a group is its offset; the greatest is some whole number of steps above it, mostly 15.
    """
    low, high = groups.min(-1), groups.max(-1)
    if max(-float(low.min()), float(high.max())) > float(np.finfo(np.float16).max):
        return None
    offset = low.astype(np.float16)
    scale = np.zeros_like(offset)
    levels = np.zeros(groups.shape, np.uint8)
    missing = np.ones(low.shape, bool)
    for steps in range(15, 0, -1):
        some = groups[missing]
        try_scale = ((high[missing] - low[missing]) / np.float32(steps)).astype(np.float16)
        try_levels = _levels(some, try_scale, offset[missing])
        exact = (unpack_grid(try_levels, try_scale, offset[missing]) == some).all(-1)
        indices = tuple(axis[exact] for axis in np.nonzero(missing))
        scale[indices], levels[indices] = try_scale[exact], try_levels[exact]
        missing[indices] = False
        if not missing.any():
            return levels, scale, offset
        if steps == 15 and missing.mean() > 0.5:
            return None
    return None


def _levels(groups: np.ndarray, scale: np.ndarray, offset: np.ndarray) -> np.ndarray:
    step = np.where(scale == 0, np.float16(1), scale).astype(np.float32)[..., None]
    return np.clip(np.rint((groups - offset.astype(np.float32)[..., None]) / step), 0, 15).astype(np.uint8)


def unpack_grid(levels: np.ndarray, scale: np.ndarray, offset: np.ndarray) -> np.ndarray:
    return scale.astype(np.float32)[..., None] * levels.astype(np.float32) + offset.astype(np.float32)[..., None]


def pack_levels(
    kind: WeightFormat,
    levels: np.ndarray,
    *,
    group_fields: Sequence[np.ndarray],
    header_fields: Sequence[np.ndarray] = (),
) -> np.ndarray:
    """Packs `levels`, uint8 [outputs, groups, 32], and fields of groups [outputs, groups] and of headers [outputs,
    records]. Fields have the order and the types of a record. Outputs are padded with zeros, which stand for weights of
    zero."""
    missing = -len(levels) % OUTPUT_UNIT
    if missing:
        levels, *fields = (
            np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))
            for array in (levels, *group_fields, *header_fields)
        )
        group_fields, header_fields = fields[: len(group_fields)], fields[len(group_fields) :]
    outputs, num_groups, _ = levels.shape
    tiles, records = outputs // TILE, num_groups // kind.groups
    assert records * kind.groups == num_groups, "records are whole"
    packed = np.empty((tiles, records, kind.record_bytes), np.uint8)
    for index, field in enumerate(header_fields):
        packed[..., index * 2 * TILE : (index + 1) * 2 * TILE] = _by_tile(field).view(np.uint8)
    groups = packed[..., kind.header_bytes :].reshape(
        tiles, num_groups, kind.group_bytes
    )  # a copy if there is a header
    groups[..., : kind.level_bytes] = _planes(kind, levels)
    at = kind.level_bytes
    for field in group_fields:
        raw = _by_tile(field).view(np.uint8)
        groups[..., at : at + raw.shape[-1]] = raw
        at += raw.shape[-1]
    assert at == kind.group_bytes, "every field of a record is given"
    packed[..., kind.header_bytes :] = groups.reshape(tiles, records, -1)
    return packed


def _planes(kind: WeightFormat, levels: np.ndarray) -> np.ndarray:
    outputs, num_groups, _ = levels.shape
    tiles = outputs // TILE
    chunks = levels.reshape(tiles, TILE, num_groups, CHUNKS, 4).transpose(0, 2, 3, 1, 4)
    parts, shift = [], 0
    for bits in kind.plane_bits:
        fields = ((chunks >> shift) & ((1 << bits) - 1)).reshape(tiles, num_groups, 8 // bits, bits, TILE * 4)
        vectors = np.zeros((tiles, num_groups, bits, TILE * 4), np.uint8)
        for field in range(8 // bits):
            vectors |= fields[:, :, field] << (field * bits)
        parts.append(vectors.reshape(tiles, num_groups, -1))
        shift += bits
    return np.concatenate(parts, axis=-1)


def _by_tile(field: np.ndarray) -> np.ndarray:
    """[outputs, groups] -> [tiles, groups, 16], contiguous."""
    outputs, num_groups = field.shape
    return np.ascontiguousarray(field.reshape(outputs // TILE, TILE, num_groups).transpose(0, 2, 1))


class UnpackedWeights(NamedTuple):
    """Each is [outputs, groups, n], with n = 32, 2 and 2: a scale and an offset for each half of a group."""

    levels: np.ndarray
    """int32, the center subtracted."""
    scale: np.ndarray
    """float32: exactly the product of the stored factors."""
    offset: np.ndarray
    """Added to each weight of the half; 0 where the format has none."""


def unpack(packed: np.ndarray) -> UnpackedWeights:
    kind = format_of_record(packed.shape[-1])
    tiles, records, _ = packed.shape
    num_groups = records * kind.groups
    header = packed[..., : kind.header_bytes]
    groups = packed[..., kind.header_bytes :].reshape(tiles, num_groups, kind.group_bytes)
    levels = np.zeros((tiles, num_groups, CHUNKS, TILE, 4), np.int32)
    at, shift = 0, 0
    for bits in kind.plane_bits:
        vectors = groups[..., at : at + 64 * bits].reshape(tiles, num_groups, bits, TILE, 4)
        fields = [(vectors >> (field * bits)) & ((1 << bits) - 1) for field in range(8 // bits)]
        levels |= np.concatenate(fields, axis=2).astype(np.int32) << shift
        at, shift = at + 64 * bits, shift + bits
    if kind.has_codes:
        levels = np.array(CODE_LEVELS, np.int32)[levels]
    levels = levels.transpose(0, 3, 1, 2, 4).reshape(tiles * TILE, num_groups, GROUP) - kind.center
    shared = [
        np.repeat(_field(header[..., start : start + 32], np.float16), kind.groups, axis=1)
        for start in range(0, kind.header_bytes, 32)
    ]
    scale, offset = _scales(kind, groups[..., kind.level_bytes :], shared)
    return UnpackedWeights(levels, scale, offset)


def _scales(kind: WeightFormat, raw: np.ndarray, shared: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns scales and offsets, [outputs, groups, 2] each."""

    def halves(first: np.ndarray, second: np.ndarray | None = None) -> np.ndarray:
        return np.stack([first, first if second is None else second], axis=-1)

    if kind.scales == "float":
        scale = halves(_field(raw, np.float32))
    elif kind.scales == "exponent":
        # The smallest powers are subnormal; ldexp rounds nothing in the formats' range.
        scale = halves(np.ldexp(np.float32(1), _field(raw, np.uint8).astype(np.int32) - 128))
    elif kind.scales in ("halves", "halves_offset"):
        one = np.int8 if kind.scales == "halves" else np.uint8
        parts = halves(*(_field(raw[..., start : start + TILE], one) for start in (0, TILE)))
        if kind.scales == "halves":
            return shared[0][..., None] * parts, np.zeros_like(parts)
        both = parts.astype(np.uint8)
        return shared[0][..., None] * (both & 15).astype(np.float32), -shared[1][..., None] * (both >> 4).astype(
            np.float32
        )
    elif kind.scales == "super":
        scale = halves(shared[0] * _field(raw[..., :TILE], np.uint8))
        return scale, -halves(shared[1] * _field(raw[..., TILE:], np.uint8))
    else:
        scale = halves(_field(raw[..., :32], np.float16))
        if kind.scales == "offset":
            return scale, halves(_field(raw[..., 32:], np.float16))
        if kind.scales == "zero":
            return scale, -(scale * halves(_field(raw[..., 32:], np.uint8)))
    return scale, np.zeros_like(scale)


def _field(raw: np.ndarray, dtype: type) -> np.ndarray:
    """[tiles, groups, bytes] -> float32 [outputs, groups]."""
    by_tile = np.ascontiguousarray(raw).view(dtype).astype(np.float32)
    return by_tile.transpose(0, 2, 1).reshape(-1, raw.shape[1])
