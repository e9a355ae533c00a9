"""A GGUF file as a mapping from canonical tensor names to float32 arrays, dequantized at each access.

The `gguf` package dequantizes; this module handles names, bounds and the order of q and k rows.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from onward.errors import StartupError
from onward.kernels.quantize import BlockMatrix
from onward.kernels.weight_formats import BLOCK_FORMATS
from onward.models import tensor_names
from onward.models.loader.config_parser import from_gguf
from onward.models.loader.gguf_header import TensorInfo, read_header
from onward.models.loader.gguf_names import canonical_tensors
from onward.models.loader.gguf_tables import TABLE_FORMATS
from onward.models.loader.lazy_mapping import LazyMapping
from onward.proto.model import ModelConfig

ROPE_FREQS = "rope_freqs.weight"
_MAX_ROPE_FREQS = 1 << 16

_PLAIN_TYPES = {gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16}
_UNSUPPORTED_PREFIXES = ("IQ1", "IQ2", "IQ3")
"""Prefixes of types whose blocks are indices into tables of vectors, which no kernel computes with."""
_OTHER_TYPES = "take a file in Q2_K to Q8_0, IQ4_NL or IQ4_XS"


class GgufFile(Mapping[str, np.ndarray]):
    """Opening checks that every tensor of the model is there, has its shape and lies within the file."""

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self.path = path
        self.metadata: dict[str, Any] = header.metadata
        self._data = np.memmap(path, mode="r", dtype=np.uint8)
        self._check_places(header.tensors)
        shapes = {name: info.shape for name, info in header.tensors.items()}
        self.config: ModelConfig = from_gguf(header.metadata, shapes, self._rope_freqs(header.tensors.get(ROPE_FREQS)))
        self._tensors = self._by_canonical_name(header.tensors)
        found = {name: info.shape for name, info in self._tensors.items()}
        tensor_names.check_tensors(found, tensor_names.expected_tensors(self.config), source=str(self.path))

    @property
    def is_quantized(self) -> bool:
        return any(_type(self.path, info) not in _PLAIN_TYPES for info in self._tensors.values())

    def __getitem__(self, name: str) -> np.ndarray:
        return self._in_rope_order(name, self._dequantized(self._tensors[name]))

    @property
    def blocks(self) -> "Mapping[str, BlockMatrix]":
        """The matrices in a format that the int8 kernels compute with, by canonical name."""
        names = [
            name
            for name, info in self._tensors.items()
            if len(info.shape) == 2 and _type(self.path, info).name in (*BLOCK_FORMATS, *TABLE_FORMATS)
        ]
        return LazyMapping(names, self._block_matrix)

    def _block_matrix(self, name: str) -> BlockMatrix:
        info = self._tensors[name]
        kind, rows = _type(self.path, info).name, self._in_rope_order(name, self._bytes_of(info))
        return TABLE_FORMATS[kind](rows) if kind in TABLE_FORMATS else BlockMatrix(kind, rows)

    def _in_rope_order(self, name: str, array: np.ndarray) -> np.ndarray:
        if self.config.architecture in ("llama", "mixtral"):
            if ".q_proj." in name:
                return unpermute_rope_rows(array, self.config.num_heads)
            if ".k_proj." in name:
                return unpermute_rope_rows(array, self.config.num_kv_heads)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _check_places(self, tensors: Mapping[str, TensorInfo]) -> None:
        """Raises unless every tensor lies within the file and no two tensors overlap."""
        end = 0
        for info in sorted(tensors.values(), key=lambda info: info.offset):
            if info.offset < end:
                raise _unusable(self.path, info, "overlaps another tensor")
            end = info.offset + self._bytes_of(info).size

    def _rope_freqs(self, info: TensorInfo | None) -> list[float] | None:
        if info is None:
            return None
        if math.prod(info.shape) > _MAX_ROPE_FREQS:
            raise _unusable(self.path, info, f"has more than {_MAX_ROPE_FREQS} values")
        return self._dequantized(info).ravel().tolist()

    def _by_canonical_name(self, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        by_name: dict[str, TensorInfo] = {}
        num_experts = 0 if self.config.experts is None else self.config.experts.num_experts
        for name, info in tensors.items():
            if name == ROPE_FREQS:
                continue
            for canonical, part in canonical_tensors(info, self._bytes_of(info).size, num_experts):
                if by_name.setdefault(canonical, part) is not part:
                    raise _unusable(self.path, info, f"is {canonical} a second time")
        return by_name

    def _dequantized(self, info: TensorInfo) -> np.ndarray:
        rows = self._bytes_of(info)
        array = gguf.dequantize(rows, _type(self.path, info))
        return np.ascontiguousarray(array, dtype=np.float32).reshape(info.shape)

    def _bytes_of(self, info: TensorInfo) -> np.ndarray:
        """Returns the tensor's bytes, with the bytes of one matrix row in each row."""
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[_type(self.path, info)]
        if info.shape[-1] % block_size:
            raise _unusable(self.path, info, f"has rows of {info.shape[-1]}, not a multiple of {block_size}")
        num_bytes = math.prod(info.shape) // block_size * block_bytes
        if info.offset + num_bytes > self._data.size:
            raise _unusable(self.path, info, "lies beyond the end of the file, which may be cut short")
        data = self._data[info.offset : info.offset + num_bytes]
        return data.reshape(-1, info.shape[-1] // block_size * block_bytes)


def unpermute_rope_rows(array: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF's `llama` keeps the two halves of a head's rope pairs interleaved; Hugging Face keeps them apart.

    GGUF:  a0 b0 a1 b1 …        here:  a0 a1 … b0 b1 …
    """
    half = array.shape[0] // num_heads // 2
    pairs = array.reshape(num_heads, half, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(array.shape))


def _type(path: Path, info: TensorInfo) -> gguf.GGMLQuantizationType:
    try:
        kind = gguf.GGMLQuantizationType(info.type_id)
    except ValueError:
        raise _unusable(path, info, f"has the unknown type {info.type_id}") from None
    if kind.name.startswith(_UNSUPPORTED_PREFIXES):
        raise _unusable(path, info, f"has the type {kind.name}, which is not supported; {_OTHER_TYPES}")
    if not is_dequantizable(kind):
        raise _unusable(path, info, f"has the type {kind.name}, which cannot be dequantized")
    return kind


def is_readable(kind: gguf.GGMLQuantizationType) -> bool:
    """Returns whether a file may have tensors of this type."""
    return not kind.name.startswith(_UNSUPPORTED_PREFIXES) and is_dequantizable(kind)


@functools.cache
def is_dequantizable(kind: gguf.GGMLQuantizationType) -> bool:
    """Returns whether the `gguf` package can dequantize this type. It has no list of them, so this tries a block of
    zeros."""
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _unusable(path: Path, info: TensorInfo, fault: str) -> StartupError:
    return StartupError(f"{path} is not a usable GGUF file: the tensor {info.name} {fault}")
