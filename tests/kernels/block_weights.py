"""Random blocks of every weight format, with the largest, the smallest and no scales among them."""

import gguf
import numpy as np

from onward.kernels.block_packing import pack_blocks

_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "int4-zero": (0,),
}  # fmt: skip
"""Where a block has float16 numbers."""
_OWN_SIZES = {"int8": (32, 36), "int4-zero": (32, 19)}
_LARGEST, _SUBNORMAL = 65504.0, 6e-8


def block_size(name: str) -> tuple[int, int]:
    """Weights and bytes of a block."""
    if name in _OWN_SIZES:
        return _OWN_SIZES[name]
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


def random_rows(name: str, outputs: int, inputs: int, seed: int = 1) -> np.ndarray:
    """uint8 [outputs, bytes]: random levels. Some scales are the largest or the smallest float16, some are zero, and the
    last row's first block has nothing but zeros."""
    generator = np.random.default_rng(seed)
    num_weights, num_bytes = block_size(name)
    blocks = generator.integers(0, 256, (outputs, inputs // num_weights, num_bytes), dtype=np.uint8)
    shape = blocks.shape[:2]
    for at in _HALVES.get(name, ()):
        scales = generator.normal(0, 0.1, shape).astype(np.float16)
        scales[0], scales[1], scales[2], scales[3] = _LARGEST, -_LARGEST, _SUBNORMAL, 0
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = generator.integers(118, 130, shape)
        blocks[0, :, 0], blocks[1, :, 0], blocks[2, :, 0] = 0, 1, 160
    if name == "int8":
        scales = generator.normal(0, 0.1, shape).astype(np.float32)
        scales[0], scales[1], scales[2] = 1e30, 1e-40, 0
        blocks[..., :4] = scales[..., None].view(np.uint8)
    blocks[-1, 0] = 0
    return blocks.reshape(outputs, -1)


def packed_blocks(name: str, outputs: int, inputs: int) -> np.ndarray:
    return pack_blocks(name, random_rows(name, outputs, inputs), "the tensor")


_STEPS = {
    "Q4_0": 0.02, "Q4_1": 0.02, "Q5_0": 0.01, "Q5_1": 0.01, "Q8_0": 0.0013, "Q2_K": 0.01, "Q3_K": 0.0025, "Q4_K": 0.0006,
    "Q5_K": 0.0003, "Q6_K": 0.00007, "int4-zero": 0.02,
}  # fmt: skip


def lively_rows(name: str, outputs: int, inputs: int, seed: int = 1) -> np.ndarray:
    """Blocks of a model that works: weights of about 0.1 of either sign."""
    rows = random_rows(name, outputs, inputs, seed)
    blocks = rows.reshape(outputs, -1, block_size(name)[1])
    generator = np.random.default_rng(seed)
    for index, at in enumerate(_HALVES.get(name, ())):
        highest = {"Q4_1": 15, "Q5_1": 31, "Q2_K": 3, "Q4_K": 15, "Q5_K": 31}.get(name, 0)
        step = _STEPS[name] * (1 if index == 0 else highest / 2 * (-1 if name in ("Q4_1", "Q5_1") else 1))
        scales = (step * generator.uniform(0.5, 1.5, blocks.shape[:2])).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = generator.integers(121, 125, blocks.shape[:2])
    if name == "int8":
        scales = generator.uniform(0.0005, 0.002, blocks.shape[:2]).astype(np.float32)
        blocks[..., :4] = scales[..., None].view(np.uint8)
    if name == "int4-zero":
        blocks[..., 2] = generator.integers(6, 10, blocks.shape[:2])
    return rows
