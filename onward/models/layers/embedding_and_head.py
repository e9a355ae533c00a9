"""The embedding and the head of a served model, for a draft proposer that has its own layers between them.

They use the model's weights without a copy. The norm before the head is left out: the caller applies the norm it needs.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
import numpy as np

from onward.kernels.cpu.threads import ThreadPool
from onward.models.layers.forward_batch import ForwardBatch
from onward.models.layers.int8_layers import TILE_SCRATCH, Int8Model
from onward.models.layers.paged_kv import AttentionScratch, PagedKV
from onward.models.layers.rotary_table import RotaryTables
from onward.proto.model import ModelConfig, PreparedModel


class EmbeddingAndHead(Protocol):
    def embed(self, token_ids: np.ndarray) -> np.ndarray:
        """Returns the embeddings, float32 [tokens, hidden_size]."""
        ...

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Returns the logits, float32 [rows, >= vocab_size]. The array may be overwritten by the next call."""
        ...


def open_embedding_and_head(
    model: PreparedModel, weights: Mapping[str, Any], threads: ThreadPool, *, max_embedded: int, max_logits: int
) -> EmbeddingAndHead:
    if model.quantization == "int8":
        return Int8EmbeddingAndHead(weights, model.config, threads, max_embedded=max_embedded, max_logits=max_logits)
    return FloatEmbeddingAndHead(weights, model.config, model.dtype)


class Int8EmbeddingAndHead:
    """Runs a model without layers. A batch without logits only computes embeddings; a batch without rows only the
    head."""

    def __init__(
        self,
        weights: Mapping[str, np.ndarray],
        config: ModelConfig,
        threads: ThreadPool,
        *,
        max_embedded: int,
        max_logits: int,
    ) -> None:
        config_without_layers = msgspec.structs.replace(config, num_layers=0)
        end_weights = {name: weights[name] for name in ("embed", "head") if name in weights}
        end_weights["norm"] = np.ones(config.hidden_size, np.float32)
        self._eps = np.float32(config.rms_norm_eps)
        self._no_tables = np.zeros((1, 1), np.int32)
        self._model = Int8Model(
            end_weights,
            config_without_layers,
            RotaryTables.build(config, 1),
            PagedKV(np.zeros(64, np.int8), 64, 16),
            AttentionScratch.allocate(config, 1, threads.size, TILE_SCRATCH),
            threads,
            max_rows=max(max_embedded, max_logits),
            max_sampled=max_logits,
        )

    def embed(self, token_ids: np.ndarray) -> np.ndarray:
        self._model.forward(self._rows(np.ascontiguousarray(token_ids, np.int32), 0))
        return self._model.hidden[: len(token_ids)].copy()

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Returns the logits of hidden states, without a norm. The kernel divides each row by its root mean square
        before the product, so the logits are multiplied by it."""
        self._model.hidden[: len(hidden)] = hidden
        logits = self._model.forward(self._rows(np.zeros(0, np.int32), len(hidden)))
        logits *= np.sqrt(np.mean(np.square(hidden), axis=1, keepdims=True) + self._eps)
        return logits

    def _rows(self, token_ids: np.ndarray, num_sampled: int) -> ForwardBatch:
        zeros = np.zeros(len(token_ids), np.int32)
        sampled = np.arange(num_sampled, dtype=np.int64)
        tiles = np.zeros((0, 4), np.int32)
        return ForwardBatch(len(token_ids), token_ids, zeros, zeros, tiles, sampled, self._no_tables)


class FloatEmbeddingAndHead:
    def __init__(self, weights: Mapping[str, Any], config: ModelConfig, dtype: str) -> None:
        import torch

        from onward.models.layers.float_mlp import Linear

        kind = getattr(torch, dtype)
        self._embedding = Linear([weights["model.embed_tokens.weight"]], [], kind)
        self._head = self._embedding
        if not config.tie_word_embeddings:
            self._head = Linear([weights["lm_head.weight"]], [], kind)

    def embed(self, token_ids: np.ndarray) -> np.ndarray:
        import torch

        with torch.inference_mode():
            return self._embedding.weight[torch.from_numpy(token_ids).long()].float().numpy()

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        import torch

        with torch.inference_mode():
            return self._head(torch.from_numpy(hidden)).numpy()
