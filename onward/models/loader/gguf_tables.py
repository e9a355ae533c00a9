"""Rewrites GGUF blocks of the types IQ4_NL and IQ4_XS, whose 4-bit codes stand for the entries of a table.

The entries are integers of 8 bits, so blocks of 8 bits hold the same weights without rounding. They take twice the
memory. Files of the types Q2_K and Q3_K have tensors in IQ4_NL where rows are not multiples of 256.
"""

from collections.abc import Callable, Mapping

import numpy as np

from onward.kernels.quantize import BlockMatrix
from onward.kernels.weight_formats import GROUP

_TABLE = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8)
_NL_BYTES = 18
_XS_BYTES = 136


def _integers(codes: np.ndarray) -> np.ndarray:
    """Returns int8 [..., 32] from bytes [..., 16], each with a code in its low half and one of 16 inputs later."""
    return _TABLE[np.concatenate([codes & 15, codes >> 4], axis=-1)]


def _rewrite_nl(rows: np.ndarray) -> BlockMatrix:
    """Rewrites IQ4_NL blocks as Q8_0. A block has a float16 scale and 16 bytes of codes."""
    blocks = rows.reshape(len(rows), -1, _NL_BYTES)
    rewritten = np.concatenate([blocks[..., :2], _integers(blocks[..., 2:]).view(np.uint8)], axis=-1)
    return BlockMatrix("Q8_0", rewritten.reshape(len(rows), -1))


def _rewrite_xs(rows: np.ndarray) -> BlockMatrix:
    """Rewrites IQ4_XS blocks as int8 blocks. A block has a float16 scale, then for eight groups: 2 high bits of each
    factor, 4 low bits of each factor, codes."""
    blocks = rows.reshape(len(rows), -1, _XS_BYTES)
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    high = np.ascontiguousarray(blocks[..., 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], axis=-1).reshape(*blocks.shape[:-1], 8)
    factor = (low.astype(np.int32) | high.astype(np.int32) << 4) - 32
    scales = scale * factor.astype(np.float32)  # exact: 11 bits times 6 bits
    values = _integers(blocks[..., 8:].reshape(*blocks.shape[:-1], 8, GROUP // 2))
    rewritten = np.concatenate([scales[..., None].view(np.uint8), values.view(np.uint8)], axis=-1)
    return BlockMatrix("int8", rewritten.reshape(len(rows), -1))


TABLE_FORMATS: Mapping[str, Callable[[np.ndarray], BlockMatrix]] = {"IQ4_NL": _rewrite_nl, "IQ4_XS": _rewrite_xs}
"""By GGUF type: the function that rewrites uint8 [outputs, bytes]."""
