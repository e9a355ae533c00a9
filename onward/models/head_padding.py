"""Pads heads of a size that a kernel cannot handle with zeros.

    q, k, v    every head gets rows of zeros        scores stay the same: a zero times anything adds nothing
    o          every head gets columns of zeros     the attention output for them is zero, and adds nothing

Rope rotates the first dimensions only, norms of q and k count the true dimensions only, and scores are divided by the
root of the true size, which is `ModelConfig.unpadded_head_dim`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from onward.kernels.quantize import BlockMatrix
from onward.models.device_support import head_unit
from onward.proto.model import ModelConfig, PreparedModel


def padded_config(config: ModelConfig, unit: int) -> ModelConfig:
    """Returns the config with heads rounded up to a multiple of `unit`."""
    if config.head_dim % unit == 0:
        return config
    padded = -(-config.head_dim // unit) * unit
    return msgspec.structs.replace(config, head_dim=padded, unpadded_head_dim=config.true_head_dim)


def pad_for_cpu(model: PreparedModel, weights: Mapping[str, Any]) -> tuple[PreparedModel, Mapping[str, Any]]:
    """Returns the model and its weights with padded heads. int8 weights were padded when they were quantized."""
    config = padded_config(model.config, head_unit(model.quantization))
    if config == model.config:
        return model, weights
    padded = weights if model.quantization == "int8" else PaddedTensors(weights, model.config, config.head_dim)
    return msgspec.structs.replace(model, config=config), padded


class PaddedTensors(Mapping[str, Any]):
    """Tensors (numpy or torch) by canonical name, with heads padded to `head_dim`."""

    def __init__(self, tensors: Mapping[str, Any], config: ModelConfig, head_dim: int) -> None:
        assert head_dim >= config.head_dim, "heads are never cut"
        self._tensors, self._config, self._head_dim = tensors, config, head_dim

    def __getitem__(self, name: str) -> Any:
        array = self._tensors[name]
        if name.endswith("o_proj.weight"):
            return self.padded(array.T).T
        if name.endswith(_BY_HEAD):
            return self.padded(array)
        return array

    def padded(self, array: Any) -> Any:
        """Pads the first axis head by head."""
        shape, before = array.shape, self._config.head_dim
        by_head = array.reshape(shape[0] // before, before, *shape[1:])
        missing = self._head_dim - before
        if isinstance(by_head, np.ndarray):
            wide = np.pad(by_head, [(0, 0), (0, missing)] + [(0, 0)] * (len(shape) - 1))
        else:
            import torch

            zeros = torch.zeros((by_head.shape[0], missing, *shape[1:]), dtype=by_head.dtype)
            wide = torch.cat([by_head, zeros], 1)
        return wide.reshape(-1, *shape[1:])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class PaddedBlocks(Mapping[str, BlockMatrix]):
    """Matrices in blocks, with heads padded to `head_dim`. Rows of zeros are blocks of zero weights in every format.
    `o` would need columns of zeros inside its blocks, so it is left out if heads are padded at all."""

    def __init__(self, blocks: Mapping[str, BlockMatrix], config: ModelConfig, head_dim: int) -> None:
        self._blocks, self._is_padded = blocks, head_dim != config.head_dim
        self._rows = PaddedTensors({}, config, head_dim)

    def __getitem__(self, name: str) -> BlockMatrix:
        if self._is_padded and name.endswith("o_proj.weight"):
            raise KeyError(name)
        found = self._blocks[name]
        if self._is_padded and name.endswith(_BY_HEAD):
            return found._replace(rows=self._rows.padded(found.rows))
        return found

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._blocks if not (self._is_padded and name.endswith("o_proj.weight")))

    def __len__(self) -> int:
        return sum(1 for _ in self)


_BY_HEAD = tuple(
    f"self_attn.{name}"
    for name in (
        "q_proj.weight", "k_proj.weight", "v_proj.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias",
        "q_norm.weight", "k_norm.weight",
    )
)  # fmt: skip
