"""Writes a prepared model's weights as they are used: for the int8 kernels, in the checkpoint's own bits if the kernels
compute with these; or in the wanted float type.

Only one array is in memory at a time, apart from the data of the quantizer itself and the shard that is being filled.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from onward.errors import StartupError
from onward.models.device_support import head_unit
from onward.models.head_padding import PaddedBlocks, PaddedTensors, padded_config
from onward.models.loader.file_property_cache import ProgressCallback
from onward.models.loader.model_sources import OpenedWeights
from onward.models.loader.safetensors_file import Array, BFloat16Bits, write_file
from onward.models.tensor_names import expected_tensors
from onward.proto.model import ModelConfig

_SHARD_BYTES = 1 << 30
Value = TypeVar("Value")


class WrittenWeights(NamedTuple):
    files: list[str]
    formats: tuple[str, ...]
    """Formats of packed matrices, the one with the most bytes first."""


def write_weights(
    folder: Path,
    config: ModelConfig,
    weights: OpenedWeights,
    *,
    quantization: str,
    dtype: str,
    progress: ProgressCallback,
) -> WrittenWeights:
    report = _ConversionProgress(len(weights.tensors), progress)
    watched = _FiniteTensors(_WatchedMapping(weights.tensors, report), weights.source)
    if quantization == "int8":
        from onward.kernels.block_packing import BlockScaleError
        from onward.kernels.quantize import quantize_model
        from onward.kernels.weight_formats import GROUP

        padded = padded_config(config, head_unit("int8"))
        _check_divisible(padded, GROUP)
        heads = PaddedTensors(watched, config, padded.head_dim)
        blocks = PaddedBlocks(_WatchedMapping(weights.blocks, report), config, padded.head_dim)
        formats: Counter[str] = Counter()
        try:
            files = _write_shards(folder, _counted(quantize_model(padded, heads, blocks), formats))
        except BlockScaleError as fault:
            raise StartupError(f"{weights.source} cannot be converted: {fault}") from None
        return WrittenWeights(files, tuple(name for name, _ in formats.most_common()))
    return WrittenWeights(_write_shards(folder, ((name, _cast(watched[name], dtype)) for name in watched)), ())


def _counted(arrays: Iterable[tuple[str, np.ndarray]], formats: Counter[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays, and adds the bytes of each packed matrix to those of its format."""
    from onward.kernels.weight_formats import format_of_record

    for name, array in arrays:
        if array.ndim == 3:
            formats[format_of_record(array.shape[-1]).name] += array.nbytes
        yield name, array


def _check_divisible(config: ModelConfig, group: int) -> None:
    for name, shape in expected_tensors(config).items():
        if len(shape) == 2 and shape[1] % group:
            raise StartupError(
                f"the model cannot be quantized to int8: {name} has {shape[1]} inputs, not a multiple of {group}; "
                "use --quantization none"
            )


def _cast(array: np.ndarray, dtype: str) -> Array:
    if dtype == "bfloat16":
        return BFloat16Bits.of(array)
    return array.astype(np.float16 if dtype == "float16" else np.float32, copy=False)


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Array]]) -> list[str]:
    files: list[str] = []
    shard: dict[str, Array] = {}
    num_bytes = 0
    for name, array in tensors:
        shard[name] = array
        num_bytes += array.nbytes if isinstance(array, np.ndarray) else array.bits.nbytes
        if num_bytes >= _SHARD_BYTES:
            files.append(_write_shard(folder, len(files), shard))
            shard, num_bytes = {}, 0
    if shard:
        files.append(_write_shard(folder, len(files), shard))
    return files


def _write_shard(folder: Path, index: int, shard: Mapping[str, Array]) -> str:
    name = f"weights-{index:05d}.safetensors"
    write_file(folder / name, shard)
    return name


class Float32Tensors(Mapping[str, np.ndarray]):
    """Some tensors of mapped files, converted to float32 at each access."""

    def __init__(self, tensors: Mapping[str, Array], names: Iterable[str]) -> None:
        self._tensors, self._names = tensors, dict.fromkeys(names)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        array = self._tensors[name]
        return array.astype(np.float32, copy=False) if isinstance(array, np.ndarray) else array.to_float32()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _FiniteTensors(Mapping[str, np.ndarray]):
    """Tensors of a model. Refuses one with a value that is infinite or not a number: each product with it would be one
    too, and with int8 so would all weights that share its scale."""

    def __init__(self, tensors: Mapping[str, np.ndarray], source: str) -> None:
        self._tensors, self._source = tensors, source

    def __getitem__(self, name: str) -> np.ndarray:
        array = self._tensors[name]
        if not np.isfinite(array).all():
            raise StartupError(f"{self._source} cannot be converted: {name} has a value that is not a finite number")
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class _ConversionProgress:
    """Reports how many of the tensors have been read. A quantizer may read one several times."""

    def __init__(self, num_tensors: int, progress: ProgressCallback) -> None:
        self._num_tensors, self._progress = num_tensors, progress
        self._read: set[str] = set()

    def read(self, name: str) -> None:
        if name not in self._read:
            self._read.add(name)
            self._progress("converting the weights", len(self._read) / self._num_tensors)


class _WatchedMapping(Mapping[str, Value]):
    def __init__(self, values: Mapping[str, Value], report: _ConversionProgress) -> None:
        self._values, self._report = values, report

    def __getitem__(self, name: str) -> Value:
        value = self._values[name]
        self._report.read(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
