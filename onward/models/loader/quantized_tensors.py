"""Tensors of quantized checkpoints by the names that float checkpoints have: `q_proj.weight` stands for
`q_proj.qweight`,
`q_proj.scales` and the other tensors that describe it.

Values are float32. If the int8 kernels can compute with the stored integers, these are also available, as blocks of 32.

    fp8                  weight (E4M3), weight_scale_inv or weight_scale
    awq                  qweight [in, out / 8], qzeros [in / group, out / 8], scales [in / group, out]
    gptq                 qweight [in / 8, out], qzeros [in / group, out / 8], scales [in / group, out], g_idx [in]
    compressed-tensors   weight_packed [out, in / 8] or weight, weight_scale [out, groups], weight_zero_point
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from onward.errors import StartupError
from onward.kernels.quantize import BlockMatrix
from onward.kernels.weight_formats import GROUP
from onward.models.checkpoint_quantization import CheckpointScheme
from onward.models.families.registry import tensor_sources
from onward.models.loader.lazy_mapping import LazyMapping
from onward.models.loader.quantized_layout import logical_names
from onward.models.loader.safetensors_file import Array, Float8Bits, MappedTensors
from onward.proto.model import ModelConfig

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each output's number among the eight numbers of an int32."""


@dataclass(frozen=True, slots=True)
class _Integers:
    """Weights of value scale * (level - zero)."""

    levels: np.ndarray
    """uint8 [outputs, inputs]."""
    scale: np.ndarray
    """float32 [outputs, groups]."""
    zero: np.ndarray
    """int32 [outputs, groups]."""
    group_of_input: np.ndarray
    """int64 [inputs]. Producers that quantize inputs in the order of their activations put them into groups in any
    order."""

    def floats(self) -> np.ndarray:
        groups = self._groups_of_blocks()
        if groups is None:
            wide = self.levels.astype(np.int32) - self.zero[:, self.group_of_input]
            return wide.astype(np.float32) * self.scale[:, self.group_of_input]
        wide = self._blocks().astype(np.int32) - self.zero[:, groups, None]
        return (wide.astype(np.float32) * self.scale[:, groups, None]).reshape(self.levels.shape)

    def blocks(self, num_bits: int) -> BlockMatrix | None:
        """Returns blocks for the kernels; None if their formats cannot store the groups, the scales or the zero points
        exactly."""
        groups = self._groups_of_blocks()
        if groups is None:
            return None
        scale, zero = self.scale[:, groups], self.zero[:, groups]
        if num_bits == 8:
            if not (zero == 128).all():
                return None
            return _rows("int8", scale[..., None].view(np.uint8), self._blocks() ^ 128)
        with np.errstate(over="ignore"):  # a scale that becomes infinite is not equal
            half = scale.astype(np.float16)
        if not (half.astype(np.float32) == scale).all():
            return None
        levels = self._blocks()
        nibbles = levels[..., :16] | levels[..., 16:] << 4
        if (zero == 8).all():
            return _rows("Q4_0", half[..., None].view(np.uint8), nibbles)
        return _rows("int4-zero", half[..., None].view(np.uint8), zero[..., None].astype(np.uint8), nibbles)

    def _blocks(self) -> np.ndarray:
        return self.levels.reshape(len(self.levels), -1, GROUP)

    def _groups_of_blocks(self) -> np.ndarray | None:
        """Returns the group of every 32 inputs; None if inputs of several groups alternate."""
        by_block = self.group_of_input.reshape(-1, GROUP)
        return by_block[:, 0] if (by_block == by_block[:, :1]).all() else None


def _rows(name: str, *parts: np.ndarray) -> BlockMatrix:
    blocks = np.concatenate(parts, axis=-1)
    return BlockMatrix(name, blocks.reshape(len(blocks), -1))


class QuantizedTensors(Mapping[str, Array]):
    """Types and shapes were checked by `quantized_layout`. The contents of tensors are checked here."""

    def __init__(self, stored: MappedTensors, scheme: CheckpointScheme) -> None:
        self._stored, self._scheme = stored, scheme
        self._names = dict.fromkeys(logical_names(stored, scheme))

    def __getitem__(self, name: str) -> Array:
        if name not in self._names:
            raise KeyError(name)
        if (integers := self._integers(name)) is not None:
            return integers.floats()
        array = self._stored[name]
        return self._from_fp8(name, array) if isinstance(array, Float8Bits) else array

    def blocks(self, name: str) -> BlockMatrix | None:
        """Returns the stored integers of a matrix, for the kernels; None if there are none that they can use."""
        integers = self._integers(name)
        return None if integers is None else integers.blocks(self._scheme.num_bits)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _integers(self, name: str) -> _Integers | None:
        module, _, part = name.rpartition(".")
        if part != "weight" or self._scheme.is_float:
            return None
        if self._scheme.main_part == "qweight" and f"{module}.qweight" in self._stored:
            return self._awq(module) if self._scheme.method == "awq" else self._gptq(module)
        if self._scheme.method == "compressed-tensors" and f"{module}.weight_scale" in self._stored:
            return self._compressed(module)
        return None

    def _awq(self, module: str) -> _Integers:
        levels, zeros = (
            _joined(_unpacked(self._array(f"{module}.{part}"), 4)[..., _AWQ_ORDER]) for part in ("qweight", "qzeros")
        )
        return self._of_groups(module, levels.T, self._scales(f"{module}.scales").T, zeros.T)

    def _gptq(self, module: str) -> _Integers:
        bits = self._scheme.num_bits
        words = self._array(f"{module}.qweight")
        levels = _unpacked(words, bits).transpose(0, 2, 1).reshape(-1, words.shape[1])
        zeros = self._gptq_zeros(_joined(_unpacked(self._array(f"{module}.qzeros"), bits)).astype(np.int32))
        scales = self._scales(f"{module}.scales")
        return self._of_groups(module, levels.T, scales.T, zeros.T, f"{module}.g_idx")

    def _gptq_zeros(self, stored: np.ndarray) -> np.ndarray:
        """Returns zero points. In a symmetric checkpoint all are the middle level. Some producers store that less one
        and some as it is, whichever layout the config names."""
        num_levels = 1 << self._scheme.num_bits
        middle = num_levels // 2
        if self._scheme.is_symmetric and ((stored == middle).all() or (stored == middle - 1).all()):
            return np.full_like(stored, middle)
        return (stored + 1) % num_levels if self._scheme.zeros_minus_one else stored

    def _compressed(self, module: str) -> _Integers:
        bits, center = self._scheme.num_bits, 1 << (self._scheme.num_bits - 1)
        if self._scheme.is_packed:
            levels = _joined(_unpacked(self._array(f"{module}.weight_packed"), bits))
        else:
            levels = self._array(f"{module}.weight").view(np.uint8) ^ 128
        scale = _two_dims(self._scales(f"{module}.weight_scale"), len(levels))
        zeros = np.full(scale.shape, center, np.int32)
        name = f"{module}.weight_zero_point"
        if name in self._stored:
            stored = self._array(name)
            if self._scheme.is_packed:  # along the outputs
                zeros = _unpacked(stored, bits).transpose(0, 2, 1).reshape(-1, stored.shape[1])[: len(levels)]
                zeros = zeros.astype(np.int32)
            else:
                zeros = _two_dims(stored.astype(np.int32), len(levels)) + center
        name = f"{module}.weight_shape"
        if name in self._stored and self._array(name).tolist() != list(levels.shape):
            found, expected = self._array(name).tolist(), list(levels.shape)
            raise self._unusable(name, f"says {found}, but the stored integers are {expected}")
        return self._of_groups(module, levels, scale, zeros, f"{module}.weight_g_idx")

    def _of_groups(
        self, module: str, levels: np.ndarray, scale: np.ndarray, zeros: np.ndarray, order: str | None = None
    ) -> _Integers:
        """Returns the integers with the group of each input: that of the tensor `order`, or else one after the other."""
        inputs, groups = levels.shape[1], scale.shape[1]
        group_of_input = np.arange(inputs) // (inputs // groups)
        if order is not None and order in self._stored:
            found = self._array(order).astype(np.int64)
            is_unset = self._scheme.method == "compressed-tensors" and (found == -1).all()
            if not is_unset and (found.min() < 0 or found.max() >= groups):
                raise self._unusable(order, f"has groups from {found.min()} to {found.max()}, and there are {groups}")
            group_of_input = group_of_input if is_unset else found
        return _Integers(
            np.ascontiguousarray(levels), np.ascontiguousarray(scale), zeros.astype(np.int32), group_of_input
        )

    def _from_fp8(self, name: str, array: Float8Bits) -> np.ndarray:
        module = name.rpartition(".")[0]
        values = array.to_float32()
        [scale_name] = [f"{module}.{part}" for part in self._scheme.scale_parts if f"{module}.{part}" in self._stored]
        scale = self._scales(scale_name)
        if self._scheme.block is None:
            return values * _two_dims(scale, len(values))
        rows, columns = self._scheme.block
        outputs, inputs = values.shape
        # By index: repeated scales would have the size of the blocks, which the config may set to any number.
        return values * scale[np.arange(outputs) // rows][:, np.arange(inputs) // columns]

    def _array(self, name: str) -> np.ndarray:
        array = self._stored[name]
        assert isinstance(array, np.ndarray), "quantized_layout has checked that these are integers"
        return array

    def _scales(self, name: str) -> np.ndarray:
        array = self._stored[name]
        scales = array.astype(np.float32) if isinstance(array, np.ndarray) else array.to_float32()
        if not np.isfinite(scales).all():
            raise self._unusable(name, "has a scale that is not a finite number")
        return scales

    def _unusable(self, name: str, fault: str) -> StartupError:
        return StartupError(f"{self._stored.locations[name].path}: {name} {fault}")


def _unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpacks words of 32 bits [rows, columns] to uint8 [rows, columns, numbers of a word], the lowest first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    wide = np.ascontiguousarray(words).view(np.uint32)
    return ((wide[..., None] >> shifts) & np.uint32((1 << bits) - 1)).astype(np.uint8)


def _joined(numbers: np.ndarray) -> np.ndarray:
    """Returns [rows, words, numbers of a word] as [rows, numbers]."""
    return numbers.reshape(len(numbers), -1)


def _two_dims(scale: np.ndarray, outputs: int) -> np.ndarray:
    """Returns scales as [outputs, groups]. There may be one for the tensor, or one or more for each output."""
    if scale.size == 1:
        return np.broadcast_to(scale.reshape(1, 1), (outputs, 1))
    return scale.reshape(outputs, -1)


def blocks_of(tensors: QuantizedTensors, config: ModelConfig) -> Mapping[str, BlockMatrix]:
    """Returns blocks by canonical name. An access raises `KeyError` if the matrix has no blocks, which is known only
    then. Tensors of which a family picks a part have none."""
    sources = tensor_sources(config, set(tensors))

    def find(name: str) -> BlockMatrix:
        found = tensors.blocks(sources[name].name)
        if found is None:
            raise KeyError(name)
        return found

    return LazyMapping([name for name, source in sources.items() if source.pick is None], find)
