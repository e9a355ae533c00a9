"""The tensors of one rank, cut out of those of the whole model when they are read."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from onward.models.sharding.shard_plan import Shard
from onward.models.tensor_names import EMBED, LM_HEAD
from onward.proto.model import ModelConfig


class ShardedTensors(Mapping[str, Any]):
    """Tensors (numpy or torch) by canonical name, as `shard_plan` divides them."""

    def __init__(self, tensors: Mapping[str, Any], config: ModelConfig, shard: Shard) -> None:
        """`tensors` and `config` are those of the whole model, with padded heads."""
        self._tensors, self._shard = tensors, shard
        query_heads, kv_heads = shard.query_heads(config), shard.kv_heads(config)
        self._query_rows = slice(query_heads.start * config.head_dim, query_heads.stop * config.head_dim)
        self._kv_rows = slice(kv_heads.start * config.head_dim, kv_heads.stop * config.head_dim)
        self._query_heads = slice(query_heads.start, query_heads.stop)

    def __getitem__(self, name: str) -> Any:
        array = self._tensors[name]
        owner, kind = name.split(".")[-2:]
        if name in (EMBED, LM_HEAD) or owner in ("gate_proj", "up_proj"):
            return array[self._share(array.shape[0])]
        if owner == "q_proj":
            return array[self._query_rows]
        if owner in ("k_proj", "v_proj"):
            return array[self._kv_rows]
        if kind == "sinks":
            return array[self._query_heads]
        if owner in ("o_proj", "down_proj"):
            return self._row_parallel(array, owner, kind)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _row_parallel(self, array: Any, owner: str, kind: str) -> Any:
        """Returns a rank's part of a matrix whose products are added up, or its bias, which is added once."""
        if kind == "bias":
            return array if self._shard.rank == 0 else np.zeros(tuple(array.shape), np.float32)
        return array[:, self._query_rows if owner == "o_proj" else self._share(array.shape[1])]

    def _share(self, total: int) -> slice:
        share = self._shard.share(total)
        return slice(share.start, share.stop)
