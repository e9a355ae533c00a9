"""Heads of a size that a kernel cannot handle, rounded up with zeros.

    q, k, v    every head gets rows of zeros        scores stay the same: a zero times anything adds nothing
    o          every head gets columns of zeros     what attention gives for them is zero, and counts for nothing

Rope rotates the first dimensions only, norms of q and k count the true ones, and scores are divided by the root of the true
size: `ModelConfig.unpadded_head_dim` says which that is.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from onward.models.device_support import head_unit
from onward.proto.model import ModelConfig, PreparedModel


def padded_config(config: ModelConfig, unit: int) -> ModelConfig:
    """The same model with heads that are a multiple of `unit`."""
    if config.head_dim % unit == 0:
        return config
    padded = -(-config.head_dim // unit) * unit
    return msgspec.structs.replace(config, head_dim=padded, unpadded_head_dim=config.true_head_dim)


def pad_for_cpu(model: PreparedModel, weights: Mapping[str, Any]) -> tuple[PreparedModel, Mapping[str, Any]]:
    """int8 weights were padded when they were quantized."""
    config = padded_config(model.config, head_unit(model.quantization))
    if config == model.config:
        return model, weights
    padded = weights if model.quantization == "int8" else PaddedTensors(weights, model.config, config.head_dim)
    return msgspec.structs.replace(model, config=config), padded


class PaddedTensors(Mapping[str, Any]):
    """Tensors by canonical name, numpy's or torch's, of a model whose heads become `head_dim` wide."""

    def __init__(self, tensors: Mapping[str, Any], config: ModelConfig, head_dim: int) -> None:
        assert head_dim >= config.head_dim, "heads are never cut"
        self._tensors, self._config, self._head_dim = tensors, config, head_dim

    def __getitem__(self, name: str) -> Any:
        array = self._tensors[name]
        if name.endswith("o_proj.weight"):
            return self._padded(array.T).T
        if name.endswith(_BY_HEAD):
            return self._padded(array)
        return array

    def _padded(self, array: Any) -> Any:
        """Of the first axis, head by head."""
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


_BY_HEAD = tuple(
    f"self_attn.{name}"
    for name in (
        "q_proj.weight", "k_proj.weight", "v_proj.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias",
        "q_norm.weight", "k_norm.weight",
    )
)  # fmt: skip
