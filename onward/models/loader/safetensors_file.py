"""Reads tensors of a safetensors file as arrays over the mapped file, and writes such files.

The `safetensors` package copies each tensor that it hands to numpy and aligns to 8 bytes only. With mapped files, all
processes of a host share the pages, and a start needs no copy. Tensors are aligned to cache lines, so that vector loads
do not straddle two. Files that are read and written are plain safetensors.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onward.errors import StartupError
from onward.kernels.quantize import BlockMatrix
from onward.models.families.family import Pick, TensorSource
from onward.models.families.mxfp4 import ScaleError
from onward.models.families.registry import tensor_sources
from onward.models.loader.lazy_mapping import LazyMapping
from onward.models.loader.safetensors_header import TensorLocation, read_header
from onward.proto.model import ModelConfig

ALIGNMENT = 64

_NUMPY = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
_NAMES = {np.dtype(kind): name for name, kind in _NUMPY.items()}


class BFloat16Bits:
    """A bfloat16 array as its 16-bit patterns, because numpy has no type for it."""

    __slots__ = ("bits",)

    def __init__(self, bits: np.ndarray) -> None:
        assert bits.dtype == np.uint16
        self.bits = bits

    @classmethod
    def of(cls, array: np.ndarray) -> "BFloat16Bits":
        """Converts an array, rounding to nearest, ties to even. NaN stays NaN."""
        wide = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
        rounded = (wide + np.uint32(0x7FFF) + ((wide >> 16) & 1)) >> 16
        return cls(np.where(np.isnan(array), np.uint32(0x7FC0), rounded).astype(np.uint16))

    def to_float32(self) -> np.ndarray:
        return (self.bits.astype(np.uint32) << 16).view(np.float32)


class Float8Bits:
    """An array of 8-bit floats with 4 bits of exponent (E4M3), as bytes."""

    __slots__ = ("bits",)

    def __init__(self, bits: np.ndarray) -> None:
        assert bits.dtype == np.uint8
        self.bits = bits

    def to_float32(self) -> np.ndarray:
        return _FLOAT8_VALUES[self.bits]


def _float8_value(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return float("nan")
    magnitude = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -magnitude if byte & 128 else magnitude


_FLOAT8_VALUES = np.array([_float8_value(byte) for byte in range(256)], np.float32)

Array = np.ndarray | BFloat16Bits | Float8Bits


def map_file(path: Path) -> np.ndarray:
    """Maps the file's bytes copy-on-write, because torch requires writable memory. It is never written, so pages stay
    shared."""
    return np.memmap(path, mode="c", dtype=np.uint8)


def view(mapped: np.ndarray, location: TensorLocation) -> Array:
    data = np.asarray(mapped[location.begin : location.end])
    if location.dtype == "BF16":
        return BFloat16Bits(data.view(np.uint16).reshape(location.shape))
    if location.dtype == "F8_E4M3":
        return Float8Bits(data.reshape(location.shape))
    return data.view(_NUMPY[location.dtype]).reshape(location.shape)


class MappedTensors(Mapping[str, Array]):
    """All tensors of some files. Each file is mapped at the first access to one of its tensors."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.locations = {name: location for path in paths for name, location in read_header(path).items()}
        self._mapped: dict[Path, np.ndarray] = {}

    def __getitem__(self, name: str) -> Array:
        location = self.locations[name]
        if location.path not in self._mapped:
            self._mapped[location.path] = map_file(location.path)
        return view(self._mapped[location.path], location)

    def __iter__(self) -> Iterator[str]:
        return iter(self.locations)

    def __len__(self) -> int:
        return len(self.locations)


class CanonicalTensors(Mapping[str, Array]):
    """A model's tensors by their canonical names, wherever and however a checkpoint stores them."""

    def __init__(self, stored: Mapping[str, Array], config: ModelConfig) -> None:
        self._stored, self._sources = stored, tensor_sources(config, set(stored))

    def __getitem__(self, name: str) -> Array:
        source = self._sources[name]
        array = self._stored[source.name]
        if source.pick is None:
            return array
        if isinstance(array, BFloat16Bits):
            return BFloat16Bits(np.ascontiguousarray(source.pick(array.bits)))
        return np.ascontiguousarray(self._picked(source, source.pick))

    @property
    def blocks(self) -> "Mapping[str, BlockMatrix]":
        """The matrices that the family stores quantized, in a format that the int8 kernels compute with."""
        pickers = {name: source.pick_blocks for name, source in self._sources.items() if source.pick_blocks is not None}
        return LazyMapping(pickers, lambda name: BlockMatrix(*self._picked(self._sources[name], pickers[name])))

    def _picked(self, source: TensorSource, pick: Pick) -> Any:
        arrays = [self._stored[name] for name in (source.name, *(name for name, _ in source.others))]
        assert all(isinstance(array, np.ndarray) for array in arrays), "8-bit floats are widened before"
        try:
            return pick(*arrays)
        except ScaleError as fault:
            raise StartupError(f"{self._file_of(source.name)}{source.name} {fault}") from None

    def _file_of(self, name: str) -> str:
        return f"{self._stored.locations[name].path}: " if isinstance(self._stored, MappedTensors) else ""

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def write_file(path: Path, tensors: Mapping[str, Array]) -> None:
    """Writes a file. Tensors that fill whole cache lines come first, so that each of these begins at a cache line."""
    arrays = {name: _bits(array) for name, array in tensors.items()}
    order = sorted(arrays, key=lambda name: arrays[name].nbytes % ALIGNMENT != 0)
    header, offset = {}, 0
    for name in order:
        end = offset + arrays[name].nbytes
        header[name] = {
            "dtype": _dtype_name(tensors[name]),
            "shape": list(arrays[name].shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(np.ascontiguousarray(arrays[name]).data)
        file.flush()
        os.fsync(file.fileno())


def _bits(array: Array) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.bits


def _dtype_name(array: Array) -> str:
    if isinstance(array, Float8Bits):
        return "F8_E4M3"
    return "BF16" if isinstance(array, BFloat16Bits) else _NAMES[array.dtype]
