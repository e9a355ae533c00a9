"""The arrays that a forward pass reads and writes, by name: private, or in memory that other ranks map too."""

from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

from onward.models.layers.forward_batch import ForwardBatch

Shape = int | tuple[int, ...]


class StepArrays(Protocol):
    """Allocates arrays. A name is used once in a model."""

    def zeros(self, name: str, shape: Shape, dtype: Any) -> np.ndarray: ...


class PrivateArrays:
    def zeros(self, name: str, shape: Shape, dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype)


@dataclass(slots=True)
class BatchArrays:
    """A forward batch at addresses that stay the same, so that other ranks can read each step's batch."""

    token_ids: np.ndarray
    positions: np.ndarray
    kv_block_ids: np.ndarray
    tiles: np.ndarray
    logits_indices: np.ndarray

    @classmethod
    def allocate(cls, arrays: StepArrays, max_rows: int, max_sampled: int) -> Self:
        rows = (arrays.zeros(name, max_rows, np.int32) for name in ("token_ids", "positions", "kv_block_ids"))
        return cls(
            *rows,
            tiles=arrays.zeros("tiles", (max_rows, 4), np.int32),  # a tile has at least one row
            logits_indices=arrays.zeros("logits_indices", max_sampled, np.int64),
        )

    def take(self, batch: ForwardBatch) -> ForwardBatch:
        """Copies a batch, and returns it with the copies. The block tables are large, so they are shared as they
        are."""
        self.token_ids[: batch.num_rows] = batch.token_ids
        self.positions[: batch.num_rows] = batch.positions
        self.kv_block_ids[: batch.num_rows] = batch.kv_block_ids
        num_tiles, num_sampled = len(batch.tiles), len(batch.logits_indices)
        self.tiles[:num_tiles] = batch.tiles
        self.logits_indices[:num_sampled] = batch.logits_indices
        return ForwardBatch(
            num_rows=batch.num_rows,
            token_ids=self.token_ids,
            positions=self.positions,
            kv_block_ids=self.kv_block_ids,
            tiles=self.tiles[:num_tiles],
            logits_indices=self.logits_indices[:num_sampled],
            block_tables=batch.block_tables,
        )

    def empty(self, block_tables: np.ndarray) -> ForwardBatch:
        """Returns a batch without rows, at the same addresses."""
        return ForwardBatch(
            0, self.token_ids, self.positions, self.kv_block_ids, self.tiles[:0], self.logits_indices[:0], block_tables
        )
