"""How int8 weights lie in memory: in the order in which the matrix kernels read them, scales included.

A matrix [out, in] becomes uint8 [out / 16, in / 32, record]: a record holds 16 outputs and a group of 32 inputs.

    bytes    8 vectors of [16 outputs][4 inputs], each weight plus 128; then 16 float32 scales               576 bytes
             w = scale * (u - 128)
    nibbles  4 vectors of [16 outputs][4 inputs], inputs 0..15 in the low halves, 16..31 in the high ones;
             then 16 float16 scales and 16 float16 offsets                                                   320 bytes
             w = scale * u + offset

Nibbles are for checkpoints whose weights lie on such a grid (GGUF's Q4_1), and only where that is exact. Knows numbers
and bytes, not models.
"""

import numpy as np

GROUP = 32
TILE = 16
BYTES_RECORD = 576
NIBBLES_RECORD = 320
OUTPUT_UNIT = 2 * TILE
"""Kernels handle two tiles at a time, so the number of outputs is padded to a multiple of this."""


def pack(weight: np.ndarray) -> np.ndarray:
    """As nibbles where the weights allow it without loss, else as bytes."""
    outputs, inputs = weight.shape
    assert inputs % GROUP == 0
    padded = np.zeros((-(-outputs // OUTPUT_UNIT) * OUTPUT_UNIT, inputs), np.float32)
    padded[:outputs] = weight
    groups = padded.reshape(len(padded), inputs // GROUP, GROUP)
    found = find_grid(groups)
    return _pack_bytes(groups) if found is None else _pack_nibbles(*found)


def find_grid(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """(u, scale, offset) with w == scale * u + offset bit by bit, u in 0..15 and float16 scales; None if there is none.

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


def _pack_nibbles(levels: np.ndarray, scale: np.ndarray, offset: np.ndarray) -> np.ndarray:
    outputs, num_groups, _ = levels.shape
    vectors = _interleave(levels)
    packed = np.empty((outputs // TILE, num_groups, NIBBLES_RECORD), np.uint8)
    packed[..., :256] = (vectors[..., :4, :, :] | vectors[..., 4:, :, :] << 4).reshape(*packed.shape[:2], 256)
    packed[..., 256:288] = _by_tile(scale).view(np.uint8)
    packed[..., 288:] = _by_tile(offset).view(np.uint8)
    return packed


def _pack_bytes(groups: np.ndarray) -> np.ndarray:
    outputs, num_groups, _ = groups.shape
    scale = np.abs(groups).max(-1) / np.float32(127)
    step = np.where(scale == 0, np.float32(1), scale)[..., None]
    levels = (np.rint(groups / step) + 128).astype(np.uint8)
    packed = np.empty((outputs // TILE, num_groups, BYTES_RECORD), np.uint8)
    packed[..., :512] = _interleave(levels).reshape(*packed.shape[:2], 512)
    packed[..., 512:] = _by_tile(scale).view(np.uint8)
    return packed


def _interleave(levels: np.ndarray) -> np.ndarray:
    """[outputs, groups, 32] -> [tiles, groups, 8 vectors, 16 outputs, 4 inputs]."""
    outputs, num_groups, _ = levels.shape
    return levels.reshape(outputs // TILE, TILE, num_groups, 8, 4).transpose(0, 2, 3, 1, 4)


def _by_tile(scale: np.ndarray) -> np.ndarray:
    """[outputs, groups] -> [tiles, groups, 16], contiguous."""
    outputs, num_groups = scale.shape
    return np.ascontiguousarray(scale.reshape(outputs // TILE, TILE, num_groups).transpose(0, 2, 1))


def unpack(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(levels int32 [outputs, inputs], scale, offset float32 [outputs, groups]); bytes are signed and have offset 0."""
    tiles, num_groups, record = packed.shape
    if record == NIBBLES_RECORD:
        halves = packed[..., :256].reshape(tiles, num_groups, 4, TILE, 4)
        vectors = np.concatenate([halves & 15, halves >> 4], axis=2).astype(np.int32)
        scale, offset = (_scales(packed[..., at : at + 32], np.float16) for at in (256, 288))
    else:
        vectors = packed[..., :512].reshape(tiles, num_groups, 8, TILE, 4).astype(np.int32) - 128
        scale = _scales(packed[..., 512:], np.float32)
        offset = np.zeros_like(scale)
    levels = vectors.transpose(0, 3, 1, 2, 4).reshape(tiles * TILE, num_groups * GROUP)
    return levels, scale, offset


def _scales(raw: np.ndarray, dtype: type) -> np.ndarray:
    """[tiles, groups, bytes] -> float32 [outputs, groups]."""
    by_tile = np.ascontiguousarray(raw).view(dtype).astype(np.float32)
    return by_tile.transpose(0, 2, 1).reshape(-1, raw.shape[1])
