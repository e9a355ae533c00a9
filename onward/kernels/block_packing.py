"""Packs blocks of weights, as checkpoints have them, for the matrix kernels without changing a weight.

The blocks are those of GGUF files, and two formats of our own to which loaders rewrite other checkpoints: a float32
scale and 32 signed bytes (`int8`); a float16 scale, a zero point and 32 nibbles (`int4-zero`). A tensor is given as its
bytes, uint8 [rows, bytes of a row]. The names d, m, q, h and s stand for scale, offset, low bits, high bits and
sub-scales. The docstring of each reader lists the fields of its blocks in their order.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from onward.kernels.weight_formats import FORMATS, GROUP
from onward.kernels.weight_packing import pack_levels


@dataclass(slots=True)
class _Fields:
    levels: np.ndarray
    """uint8 [rows, ...], 32 inputs of a group after each other."""
    group: list[np.ndarray]
    header: list[np.ndarray] = field(default_factory=list)


_NOT_A_NUMBER = 255
"""The exponent that MXFP4 has for a scale that is not a number."""


class BlockScaleError(ValueError):
    """A block's scale is infinite or not a number."""


def pack_blocks(format_name: str, rows: np.ndarray, tensor: str) -> np.ndarray:
    """Returns the packed array of a matrix in blocks. Raises `BlockScaleError`, which names the tensor."""
    kind = FORMATS[format_name]
    block_bytes, read = _READERS[format_name]
    blocks = rows.reshape(len(rows), -1, block_bytes)
    fields = read(blocks)
    _check_finite([*fields.header, *fields.group], tensor)
    if kind.scales == "exponent" and (fields.group[0] == _NOT_A_NUMBER).any():
        raise BlockScaleError(f"{tensor} has a block whose scale is not a number")
    return pack_levels(
        kind,
        fields.levels.reshape(len(rows), -1, GROUP),
        group_fields=[array.reshape(len(rows), -1) for array in fields.group],
        header_fields=[array.reshape(len(rows), -1) for array in fields.header],
    )


def _check_finite(scales: list[np.ndarray], tensor: str) -> None:
    if not all(np.isfinite(array).all() for array in scales if array.dtype in (np.float16, np.float32)):
        raise BlockScaleError(f"{tensor} has a block whose scale is not finite")


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _nibbles(q: np.ndarray) -> np.ndarray:
    """Returns the low halves of all bytes, then the high halves."""
    return np.concatenate([q & 15, q >> 4], axis=-1)


def _bits(h: np.ndarray) -> np.ndarray:
    """Returns the bits of four bytes, the lowest bit of the first byte first."""
    return np.unpackbits(h, axis=-1, bitorder="little")


def _q4_0(b: np.ndarray) -> _Fields:
    """d, 16 q."""
    return _Fields(_nibbles(b[..., 2:]), [_half(b, 0)])


def _q4_1(b: np.ndarray) -> _Fields:
    """d, m, 16 q."""
    return _Fields(_nibbles(b[..., 4:]), [_half(b, 0), _half(b, 2)])


def _q5_0(b: np.ndarray) -> _Fields:
    """d, 4 h, 16 q."""
    return _Fields(_nibbles(b[..., 6:]) | _bits(b[..., 2:6]) << 4, [_half(b, 0)])


def _q5_1(b: np.ndarray) -> _Fields:
    """d, m, 4 h, 16 q."""
    return _Fields(_nibbles(b[..., 8:]) | _bits(b[..., 4:8]) << 4, [_half(b, 0), _half(b, 2)])


def _q8_0(b: np.ndarray) -> _Fields:
    """d, 32 signed q."""
    return _Fields(b[..., 2:] ^ 128, [_half(b, 0)])


def _int8(b: np.ndarray) -> _Fields:
    """A float32 scale, 32 signed q."""
    return _Fields(b[..., 4:] ^ 128, [np.ascontiguousarray(b[..., :4]).view(np.float32)[..., 0]])


def _int4_zero(b: np.ndarray) -> _Fields:
    """d, z, 16 q."""
    return _Fields(_nibbles(b[..., 3:]), [_half(b, 0), b[..., 2]])


def _mxfp4(b: np.ndarray) -> _Fields:
    """An exponent, 16 q."""
    return _Fields(_nibbles(b[..., 1:]), [b[..., 0]])


def _fields_of_two_bits(q: np.ndarray) -> np.ndarray:
    """Returns the levels of two bits in 64 bytes: each half has 128 levels, four times 32 from the lowest bits up."""
    halves = q.reshape(*q.shape[:-1], 2, 1, 32)
    return ((halves >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3).reshape(*q.shape[:-1], 256)


def _q2_k(b: np.ndarray) -> _Fields:
    """16 s, 64 q, d, m."""
    s = b[..., :16].reshape(*b.shape[:-1], 8, 2)
    return _Fields(_fields_of_two_bits(b[..., 16:80]), [s[..., 0], s[..., 1]], [_half(b, 80), _half(b, 82)])


def _q3_k(b: np.ndarray) -> _Fields:
    """32 h, 64 q, 12 s, d. Bit g of h belongs to group g. s has eight bytes of two nibbles, then the 2 bits above
    them."""
    high = (b[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    levels = _fields_of_two_bits(b[..., 32:96]) | high.reshape(*b.shape[:-1], 256) << 2
    above = (b[..., None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    s = _nibbles(b[..., 96:104]) | above.reshape(*b.shape[:-1], 16) << 4
    signed = (s.astype(np.int16) - 32).astype(np.int8).reshape(*b.shape[:-1], 8, 2)
    return _Fields(levels, [signed[..., 0], signed[..., 1]], [_half(b, 108)])


def _six_bit_scales(s: np.ndarray) -> list[np.ndarray]:
    """Returns eight scales and eight offsets from 12 bytes: the first four of each are six low bits, the others are
    spread."""
    first, second, third = s[..., :4], s[..., 4:8], s[..., 8:]
    scale = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=-1)
    return [scale, np.concatenate([second & 63, third >> 4 | (second >> 6) << 4], axis=-1)]


def _pairs_of_groups(q: np.ndarray) -> np.ndarray:
    """Returns the levels of four bits in 128 bytes: low halves of 32 bytes are one group, the high ones the next."""
    return _nibbles(q.reshape(*q.shape[:-1], 4, 32)).reshape(*q.shape[:-1], 256)


def _q4_k(b: np.ndarray) -> _Fields:
    """d, m, 12 s, 128 q."""
    return _Fields(_pairs_of_groups(b[..., 16:]), _six_bit_scales(b[..., 4:16]), [_half(b, 0), _half(b, 2)])


def _q5_k(b: np.ndarray) -> _Fields:
    """d, m, 12 s, 32 h, 128 q. Bit g of h belongs to group g."""
    high = (b[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    levels = _pairs_of_groups(b[..., 48:]) | high.reshape(*b.shape[:-1], 256) << 4
    return _Fields(levels, _six_bit_scales(b[..., 4:16]), [_half(b, 0), _half(b, 2)])


def _q6_k(b: np.ndarray) -> _Fields:
    """128 q, 64 h, 16 signed s, d. In each half of 128 levels the low halves of 64 q come before the high ones."""
    low = _nibbles(b[..., :128].reshape(*b.shape[:-1], 2, 64)).reshape(*b.shape[:-1], 256)
    s = b[..., 192:208].view(np.int8).reshape(*b.shape[:-1], 8, 2)
    return _Fields(low | _fields_of_two_bits(b[..., 128:192]) << 4, [s[..., 0], s[..., 1]], [_half(b, 208)])


_READERS: dict[str, tuple[int, Callable[[np.ndarray], _Fields]]] = {
    "Q4_0": (18, _q4_0), "Q4_1": (20, _q4_1), "Q5_0": (22, _q5_0), "Q5_1": (24, _q5_1), "Q8_0": (34, _q8_0),
    "Q2_K": (84, _q2_k), "Q3_K": (110, _q3_k), "Q4_K": (144, _q4_k), "Q5_K": (176, _q5_k), "Q6_K": (210, _q6_k),
    "MXFP4": (17, _mxfp4), "int8": (36, _int8), "int4-zero": (19, _int4_zero),
}  # fmt: skip
"""By format: the bytes of a block, and the function that reads it."""
