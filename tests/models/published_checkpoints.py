"""Small random checkpoints in the quantized layouts that other projects publish, written number by number.

Each writer draws integers, zero points and scales, stores them in the layout, and returns the weights that they stand for.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from onward.models.loader.safetensors_file import Array, BFloat16Bits, Float8Bits, write_file
from onward.proto.model import ModelConfig
from tests.models.checkpoints import hf_json, random_tensors

Stored = dict[str, Array]
Written = tuple[Stored, np.ndarray]
Writer = Callable[[np.random.Generator, int, int], Written]
GROUP = 64


def _packed(rows: np.ndarray, bits: int) -> np.ndarray:
    """[rows, n] small numbers -> int32 [rows, n * bits / 32], the first number in the lowest bits."""
    per_word = 32 // bits
    words = np.zeros((len(rows), rows.shape[1] // per_word), np.uint32)
    for index in range(rows.shape[1]):
        words[:, index // per_word] |= rows[:, index].astype(np.uint32) << np.uint32(bits * (index % per_word))
    return words.view(np.int32)


def _drawn(
    generator: np.random.Generator, outputs: int, inputs: int, group: int, bits: int, *, symmetric: bool
) -> tuple:
    """Levels [outputs, inputs], scales and zero points [outputs, groups], and the weights."""
    groups = inputs // group
    levels = generator.integers(0, 1 << bits, (outputs, inputs))
    scales = generator.uniform(0.005, 0.02, (outputs, groups)).astype(np.float16)
    shape = (outputs, groups)
    zeros = np.full(shape, 1 << (bits - 1)) if symmetric else generator.integers(0, 1 << bits, shape)
    wide = levels - np.repeat(zeros, group, axis=1)
    return levels, scales, zeros, (wide * np.repeat(scales.astype(np.float32), group, axis=1)).astype(np.float32)


def awq(generator: np.random.Generator, outputs: int, inputs: int) -> Written:
    levels, scales, zeros, weights = _drawn(generator, outputs, inputs, GROUP, 4, symmetric=False)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def shuffled(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(len(rows), -1, 8)[:, :, order].reshape(len(rows), -1)

    stored: Stored = {"qweight": _packed(shuffled(levels.T), 4), "qzeros": _packed(shuffled(zeros.T), 4),
                      "scales": np.ascontiguousarray(scales.T)}  # fmt: skip
    return stored, weights


def gptq(bits: int, *, symmetric: bool, layout: str = "gptq", reordered: bool = False) -> Writer:
    """A zero point of zero is stored as the largest number in the layout that subtracts one."""

    def write(generator: np.random.Generator, outputs: int, inputs: int) -> Written:
        levels, scales, zeros, weights = _drawn(generator, outputs, inputs, GROUP, bits, symmetric=symmetric)
        order = generator.permutation(inputs) if reordered else np.arange(inputs)
        stored_zeros = (zeros.T - 1) % (1 << bits) if layout == "gptq" else zeros.T
        stored: Stored = {
            "qweight": np.ascontiguousarray(_packed(levels[:, order], bits).T),
            "qzeros": _packed(stored_zeros, bits),
            "scales": np.ascontiguousarray(scales.T),
            "g_idx": (order // GROUP).astype(np.int32),
        }
        return stored, np.ascontiguousarray(weights[:, order])

    return write


def packed_integers(bits: int, *, symmetric: bool, reordered: bool = False) -> Writer:
    def write(generator: np.random.Generator, outputs: int, inputs: int) -> Written:
        levels, scales, zeros, weights = _drawn(generator, outputs, inputs, GROUP, bits, symmetric=symmetric)
        order = generator.permutation(inputs) if reordered else np.arange(inputs)
        stored: Stored = {"weight_packed": _packed(levels[:, order], bits), "weight_scale": scales,
                          "weight_shape": np.array([outputs, inputs], np.int64)}  # fmt: skip
        if not symmetric:
            stored["weight_zero_point"] = np.ascontiguousarray(_packed(zeros.T, bits).T)
        if reordered:
            stored["weight_g_idx"] = (order // GROUP).astype(np.int32)
        return stored, np.ascontiguousarray(weights[:, order])

    return write


def int8_channels(generator: np.random.Generator, outputs: int, inputs: int) -> Written:
    values = generator.integers(-127, 128, (outputs, inputs)).astype(np.int8)
    scales = BFloat16Bits.of(generator.uniform(0.0005, 0.002, (outputs, 1)).astype(np.float32))
    return {"weight": values, "weight_scale": scales}, values * scales.to_float32()


def fp8(scale_name: str, block: tuple[int, int] | None, per: str = "block") -> Writer:
    def write(generator: np.random.Generator, outputs: int, inputs: int) -> Written:
        bits = generator.integers(0, 256, (outputs, inputs)).astype(np.uint8)
        bits[bits & 127 == 127] = 0  # not a number
        values = Float8Bits(bits)
        shape = {"block": (-(-outputs // 48), -(-inputs // 32)), "channel": (outputs, 1), "tensor": ()}[per]
        scales = generator.uniform(0.0002, 0.001, shape).astype(np.float32)
        wide = np.broadcast_to(scales, (outputs, inputs)) if block is None else np.repeat(
            np.repeat(scales, block[0], axis=0), block[1], axis=1)[:outputs, :inputs]  # fmt: skip
        return {"weight": values, scale_name: np.asarray(scales)}, values.to_float32() * wide

    return write


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}  # fmt: skip


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
_GPTQ_V2 = _GPTQ | {"checkpoint_format": "gptq_v2"}
_GROUPS = {"type": "int", "strategy": "group", "group_size": GROUP}
LAYOUTS: dict[str, tuple[dict[str, Any], Writer, str]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, awq,
            "int4-zero"),
    "gptq-4": (_GPTQ, gptq(4, symmetric=True), "Q4_0"),
    "gptq-4-asymmetric": (_GPTQ | {"sym": False}, gptq(4, symmetric=False), "int4-zero"),
    "gptq-v2": (_GPTQ_V2 | {"sym": False}, gptq(4, symmetric=False, layout="gptq_v2"), "int4-zero"),
    "gptq-v2-symmetric": (_GPTQ_V2, gptq(4, symmetric=True, layout="gptq_v2"), "Q4_0"),
    "gptq-reordered": (_GPTQ | {"desc_act": True}, gptq(4, symmetric=True, reordered=True), "int8"),
    "gptq-8": (_GPTQ | {"bits": 8}, gptq(8, symmetric=True), "int8"),
    "compressed-int4": (_compressed("pack-quantized", num_bits=4, symmetric=True, **_GROUPS),
                        packed_integers(4, symmetric=True), "Q4_0"),
    "compressed-int4-asymmetric": (_compressed("pack-quantized", num_bits=4, symmetric=False, **_GROUPS),
                                   packed_integers(4, symmetric=False), "int4-zero"),
    "compressed-int4-reordered": (
        _compressed("pack-quantized", num_bits=4, symmetric=True, actorder="group", **_GROUPS),
        packed_integers(4, symmetric=True, reordered=True), "int8"),
    "compressed-int8": (_compressed("int-quantized", num_bits=8, type="int", strategy="channel"), int8_channels, "int8"),
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [48, 32], "activation_scheme": "dynamic"},
                   fp8("weight_scale_inv", (48, 32)), "int8"),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8("weight_scale", None, "tensor"), "int8"),
    "compressed-fp8": (_compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
                       fp8("weight_scale", None, "channel"), "int8"),
}  # fmt: skip
"""`quantization_config`, what writes a matrix, and the format in which the CPU keeps it."""
ROUNDED = [name for name in LAYOUTS if "fp8" in name or "reordered" in name]
"""Layouts whose weights are rounded to int8 on the CPU, since its formats cannot store them as they are."""


def write_published(
    folder: Path, config: ModelConfig, layout: str, write: Writer | None = None
) -> dict[str, np.ndarray]:
    """Writes a checkpoint whose layers' matrices are quantized, and returns the weights by canonical name. `write`
    replaces the writer of the layout."""
    quantization, own_writer, _ = LAYOUTS[layout]
    write = write or own_writer
    generator = np.random.default_rng(5)
    tensors = random_tensors(config)
    stored: Stored = {}
    for name, array in tensors.items():
        if "_proj" not in name or array.ndim != 2:
            stored[name.replace("mlp.router.", "mlp.gate.")] = array
            continue
        parts, tensors[name] = write(generator, *array.shape)
        stored |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
    folder.mkdir()
    write_file(folder / "model.safetensors", stored)
    (folder / "config.json").write_text(json.dumps(hf_json(config, quantization_config=quantization)))
    return tensors
