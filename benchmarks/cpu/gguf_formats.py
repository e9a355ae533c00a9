"""Writes a GGUF file again with its matrices in other formats, with plain rounding and the mixes of types that are usual.

    Q4_0, Q6_K, Q8_0   every matrix in that type
    Q4_K_M, Q5_K_M     Q4_K or Q5_K, but Q6_K for half of the matrices of v and down

Rows that are not multiples of 256 get the next type with blocks of 32. The embedding is Q8_0, as large formats have it when
it is the head too. Quantizers that choose scales by the errors they cause make better files of the same size and speed.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Kind = gguf.GGMLQuantizationType
_MIXES = {
    "Q4_0": (Kind.Q4_0, Kind.Q4_0), "Q4_K_M": (Kind.Q4_K, Kind.Q6_K), "Q5_K_M": (Kind.Q5_K, Kind.Q6_K),
    "Q6_K": (Kind.Q6_K, Kind.Q6_K), "Q8_0": (Kind.Q8_0, Kind.Q8_0),
}  # fmt: skip
"""The type of most matrices, and the type of the matrices that are most sensitive to rounding."""
FORMATS = tuple(_MIXES)
_FOR_OTHER_ROWS = {Kind.Q4_K: Kind.Q5_0, Kind.Q5_K: Kind.Q5_1, Kind.Q6_K: Kind.Q8_0}
_SUPER_BLOCK = 256


def convert(source: Path, target: Path, name: str) -> Path:
    """Writes the target, whose weights are those of the source, dequantized and rounded to the format. Returns it."""
    reader = gguf.GGUFReader(source)
    architecture = _contents(reader, "general.architecture")
    num_layers = _contents(reader, f"{architecture}.block_count")
    writer = gguf.GGUFWriter(target, architecture)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            subtype = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=subtype)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = _type_of(tensor.name, values.shape, num_layers, *_MIXES[name])
        writer.add_tensor(tensor.name, values if kind is None else quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _contents(reader: gguf.GGUFReader, key: str) -> Any:
    return reader.fields[key].contents()


def _type_of(name: str, shape: tuple[int, ...], num_layers: int, most: Kind, sensitive: Kind) -> Kind | None:
    """Returns the type of a tensor; None for a vector, which stays as it is."""
    if len(shape) < 2:
        return None
    if name == "token_embd.weight":
        return Kind.Q8_0
    kind = most
    if name.endswith(("attn_v.weight", "ffn_down.weight")):
        layer, eighth = int(name.split(".")[1]), num_layers // 8
        if layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2:
            kind = sensitive
    return _FOR_OTHER_ROWS.get(kind, kind) if shape[-1] % _SUPER_BLOCK else kind


def quantize(values: np.ndarray, kind: Kind) -> np.ndarray:
    """Returns blocks, uint8 [rows, bytes]."""
    if kind not in _SUPER_BLOCKS:
        return gguf.quantize(values, kind)
    blocks = values.reshape(-1, _SUPER_BLOCK)
    return _SUPER_BLOCKS[kind](blocks).reshape(len(values), -1)


def _half(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns float16 numbers as bytes, and what they stand for."""
    half = values.astype(np.float16)
    return half[:, None].view(np.uint8), half.astype(np.float32)


def _quotient(values: np.ndarray, divisor: np.ndarray, lowest: int, highest: int) -> np.ndarray:
    """Returns rounded quotients, and zero where the divisor is zero."""
    safe = np.where(divisor == 0, np.float32(1), divisor)
    return np.clip(np.rint(np.where(divisor == 0, 0, values / safe)), lowest, highest).astype(np.int32)


def _with_offsets(blocks: np.ndarray, bits: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns scales and offsets of Q4_K and Q5_K as bytes, and levels [blocks, 8, 32]."""
    groups = blocks.reshape(-1, 8, 32)
    offset = np.maximum(-groups.min(-1), 0)
    scale = (groups.max(-1) + offset) / ((1 << bits) - 1)
    d_bytes, d = _half(scale.max(-1) / 63)
    m_bytes, m = _half(offset.max(-1) / 63)
    s, o = _quotient(scale, d[:, None], 0, 63), _quotient(offset, m[:, None], 0, 63)
    levels = _quotient(groups + (m[:, None] * o)[..., None], (d[:, None] * s)[..., None], 0, (1 << bits) - 1)
    parts = [s[:, :4] | s[:, 4:] >> 4 << 6, o[:, :4] | o[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (o[:, 4:] & 15) << 4]
    return [d_bytes, m_bytes, np.concatenate(parts, axis=1).astype(np.uint8)], levels


def _nibbles(levels: np.ndarray) -> np.ndarray:
    """The low halves of 32 bytes are one group, the high ones the next."""
    low = levels & 15
    return (low[:, 0::2] | low[:, 1::2] << 4).astype(np.uint8).reshape(len(levels), -1)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    head, levels = _with_offsets(blocks, 4)
    return np.concatenate([*head, _nibbles(levels)], axis=1)


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    head, levels = _with_offsets(blocks, 5)
    high = ((levels >> 4) << np.arange(8)[:, None]).sum(1).astype(np.uint8)
    return np.concatenate([*head, high, _nibbles(levels)], axis=1)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    groups = blocks.reshape(-1, 16, 16)
    scale = np.abs(groups).max(-1) / 31
    d_bytes, d = _half(scale.max(-1) / 127)
    s = _quotient(scale, d[:, None], 0, 127)
    levels = _quotient(groups, (d[:, None] * s)[..., None], -32, 31).reshape(-1, 2, 128) + 32
    low = (levels[..., :64] & 15 | (levels[..., 64:] & 15) << 4).astype(np.uint8).reshape(-1, 128)
    high = (
        ((levels >> 4).reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6])[:, None]).sum(2).astype(np.uint8).reshape(-1, 64)
    )
    return np.concatenate([low, high, s.astype(np.uint8), d_bytes], axis=1)


_SUPER_BLOCKS: dict[Kind, Callable[[np.ndarray], np.ndarray]] = {Kind.Q4_K: _q4_k, Kind.Q5_K: _q5_k, Kind.Q6_K: _q6_k}


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
