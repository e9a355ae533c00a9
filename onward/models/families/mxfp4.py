"""MXFP4, as checkpoints of gpt-oss have it: 4-bit floats, two in a byte, with a power of two as the scale of 32 of them.
The kernels compute with the same codes and scales in another order.

Without numpy at module level: families are looked up at each start, which must be light.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

GROUP = 32

_LEVELS = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
_SCALE_BIAS = 127
_NOT_A_NUMBER = 255


class ScaleError(ValueError):
    """A scale is not a number."""


def dequantize(blocks: "np.ndarray", scales: "np.ndarray") -> "np.ndarray":
    """Returns float32 [..., outputs, inputs] from blocks (uint8 [..., outputs, groups, 16], the low half of each byte
    first) and scales (uint8 [..., outputs, groups]). The values are exact in bfloat16 too. Raises `ScaleError`."""
    import numpy as np

    levels = np.array(_LEVELS, np.float32)[_codes(blocks, scales)]
    wide = np.ldexp(levels, (scales.astype(np.int32) - _SCALE_BIAS)[..., None])
    return wide.reshape(*scales.shape[:-1], -1).astype(np.float32, copy=False)


def kernel_blocks(blocks: "np.ndarray", scales: "np.ndarray") -> tuple[str, "np.ndarray"]:
    """Returns the name and the rows (uint8 [outputs, bytes]) of the kernels' format for the same weights as `dequantize`.
    There a byte has the codes of two inputs that are 16 apart, and the scale comes before its codes."""
    import numpy as np

    codes = _codes(blocks, scales)
    halves = codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4
    rows = np.concatenate([scales[..., None], halves], axis=-1)
    return "MXFP4", rows.reshape(len(rows), -1)


def _codes(blocks: "np.ndarray", scales: "np.ndarray") -> "np.ndarray":
    """Returns the codes [..., outputs, groups, 32], in the order of the inputs."""
    import numpy as np

    if (scales == _NOT_A_NUMBER).any():
        raise ScaleError("has a scale that is not a number")
    return np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, GROUP)
