"""A GGUF file as a mapping from canonical tensor names to float32 arrays, dequantized when they are asked for.

The `gguf` package dequantizes; names, bounds and the order of q and k rows are minded here.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from onward.errors import StartupError
from onward.models import tensor_names
from onward.models.loader.config_parser import from_gguf
from onward.models.loader.gguf_header import TensorInfo, read_header
from onward.proto.model import ModelConfig

ROPE_FREQS = "rope_freqs.weight"
_MAX_ROPE_FREQS = 1 << 16

_PLAIN_TYPES = {gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16}
_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")


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
        array = self._dequantized(self._tensors[name])
        if self.config.architecture == "llama":
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
        """Every tensor lies within the file, and no two of them in one place."""
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
        for name, info in tensors.items():
            if name == ROPE_FREQS:
                continue
            if by_name.setdefault(canonical_name(name), info) is not info:
                raise _unusable(self.path, info, f"is {canonical_name(name)} a second time")
        return by_name

    def _dequantized(self, info: TensorInfo) -> np.ndarray:
        rows = self._bytes_of(info)
        array = gguf.dequantize(rows, _type(self.path, info))
        return np.ascontiguousarray(array, dtype=np.float32).reshape(info.shape)

    def _bytes_of(self, info: TensorInfo) -> np.ndarray:
        """The tensor's bytes, one row of the matrix each."""
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[_type(self.path, info)]
        if info.shape[-1] % block_size:
            raise _unusable(self.path, info, f"has rows of {info.shape[-1]}, not a multiple of {block_size}")
        num_bytes = math.prod(info.shape) // block_size * block_bytes
        if info.offset + num_bytes > self._data.size:
            raise _unusable(self.path, info, "lies beyond the end of the file, which may be cut short")
        data = self._data[info.offset : info.offset + num_bytes]
        return data.reshape(-1, info.shape[-1] // block_size * block_bytes)


def canonical_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names stay, to be reported."""
    match = _GGUF_NAME.fullmatch(name)
    if match is None:
        return name
    layer, part, kind = match["layer"], match["part"], match["kind"]
    if layer is None:
        return f"{_GLOBAL_NAMES[part]}.{kind}" if part in _GLOBAL_NAMES else name
    return f"model.layers.{int(layer)}.{_LAYER_NAMES[part]}.{kind}" if part in _LAYER_NAMES else name


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
    if not is_dequantizable(kind):
        raise _unusable(path, info, f"has the type {kind.name}, which cannot be dequantized")
    return kind


@functools.cache
def is_dequantizable(kind: gguf.GGMLQuantizationType) -> bool:
    """The package has no list of what it can do: it is asked with one block of zeros."""
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _unusable(path: Path, info: TensorInfo, fault: str) -> StartupError:
    return StartupError(f"{path} is not a usable GGUF file: the tensor {info.name} {fault}")
