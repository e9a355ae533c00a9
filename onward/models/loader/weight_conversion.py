"""Writes a prepared model's weights as they are used: quantized by the kernels' scheme, or in the wanted float type.

One array is in memory at a time but for what the quantizer itself keeps and the shard that is being filled.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from onward.errors import StartupError
from onward.models.device_support import head_unit
from onward.models.head_padding import PaddedTensors, padded_config
from onward.models.loader.file_property_cache import ProgressCallback
from onward.models.loader.safetensors_file import Array, BFloat16Bits, write_file
from onward.models.tensor_names import expected_tensors
from onward.proto.model import ModelConfig

_SHARD_BYTES = 1 << 30


def write_weights(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    *,
    quantization: str,
    dtype: str,
    progress: ProgressCallback,
) -> list[str]:
    """`tensors` are float32, by canonical name. Returns the names of the files."""
    watched = _ProgressReportingTensors(tensors, progress)
    if quantization == "int8":
        from onward.kernels.quantize import quantize_model
        from onward.kernels.weight_packing import GROUP

        padded = padded_config(config, head_unit("int8"))
        _check_divisible(padded, GROUP)
        heads = PaddedTensors(watched, config, padded.head_dim)
        return _write_shards(folder, quantize_model(padded, heads))
    return _write_shards(folder, ((name, _cast(watched[name], dtype)) for name in watched))


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
        num_bytes += array.bits.nbytes if isinstance(array, BFloat16Bits) else array.nbytes
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
    """Some tensors of mapped files, widened when they are asked for."""

    def __init__(self, tensors: Mapping[str, Array], names: Iterable[str]) -> None:
        self._tensors, self._names = tensors, dict.fromkeys(names)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        array = self._tensors[name]
        return array.to_float32() if isinstance(array, BFloat16Bits) else array.astype(np.float32, copy=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _ProgressReportingTensors(Mapping[str, np.ndarray]):
    """Tells how many of the tensors have been read. A quantizer may read one several times."""

    def __init__(self, tensors: Mapping[str, np.ndarray], progress: ProgressCallback) -> None:
        self._tensors, self._progress = tensors, progress
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> np.ndarray:
        array = self._tensors[name]
        if name not in self._read:
            self._read.add(name)
            self._progress("converting the weights", len(self._read) / len(self._tensors))
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
