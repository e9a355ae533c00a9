"""Tensors of a safetensors file as arrays over the mapped file, and the writing of such files.

The `safetensors` package copies each tensor that it hands to numpy and aligns to 8 bytes only. Mapped in place, all
processes of a host share the pages, and a start costs no copy; aligned to a cache line, vector loads do not straddle
two. Files are plain safetensors in both directions.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from onward.models.families.registry import tensor_sources
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
    """A bfloat16 array, which numpy has no type for, as the 16-bit patterns that stand for it."""

    __slots__ = ("bits",)

    def __init__(self, bits: np.ndarray) -> None:
        assert bits.dtype == np.uint16
        self.bits = bits

    @classmethod
    def of(cls, array: np.ndarray) -> "BFloat16Bits":
        """Rounded to the nearest, ties to even. NaN stays NaN."""
        wide = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
        rounded = (wide + np.uint32(0x7FFF) + ((wide >> 16) & 1)) >> 16
        return cls(np.where(np.isnan(array), np.uint32(0x7FC0), rounded).astype(np.uint16))

    def to_float32(self) -> np.ndarray:
        return (self.bits.astype(np.uint32) << 16).view(np.float32)


Array = np.ndarray | BFloat16Bits


def map_file(path: Path) -> np.ndarray:
    """The file's bytes. Copy-on-write, for torch insists on writable memory; nobody writes, so pages stay shared."""
    return np.memmap(path, mode="c", dtype=np.uint8)


def view(mapped: np.ndarray, location: TensorLocation) -> Array:
    data = np.asarray(mapped[location.begin : location.end])
    if location.dtype == "BF16":
        return BFloat16Bits(data.view(np.uint16).reshape(location.shape))
    return data.view(_NUMPY[location.dtype]).reshape(location.shape)


class MappedTensors(Mapping[str, Array]):
    """All tensors of some files, each file mapped when its first tensor is asked for."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._locations = {name: (path, location) for path in paths for name, location in read_header(path).items()}
        self._mapped: dict[Path, np.ndarray] = {}

    def __getitem__(self, name: str) -> Array:
        path, location = self._locations[name]
        if path not in self._mapped:
            self._mapped[path] = map_file(path)
        return view(self._mapped[path], location)

    def __iter__(self) -> Iterator[str]:
        return iter(self._locations)

    def __len__(self) -> int:
        return len(self._locations)


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
        return np.ascontiguousarray(source.pick(array))

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)


def write_file(path: Path, tensors: Mapping[str, Array]) -> None:
    """Tensors that fill whole cache lines come first, so that each of them begins at one."""
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
    return array.bits if isinstance(array, BFloat16Bits) else array


def _dtype_name(array: Array) -> str:
    return "BF16" if isinstance(array, BFloat16Bits) else _NAMES[array.dtype]
