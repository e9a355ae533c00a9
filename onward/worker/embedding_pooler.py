"""Pools the hidden states of a prompt into one vector: their mean, or the last one. Rows arrive as the prompt is
computed, in chunks of any size.
"""

import numpy as np

from onward.proto.sampling_params import Pooling


class EmbeddingPooler:
    def __init__(self, pooling: Pooling, hidden_size: int) -> None:
        self._pooling = pooling
        self._sum = np.zeros(hidden_size, np.float64)
        self._num_rows = 0

    def add(self, rows: np.ndarray) -> None:
        if self._pooling == "last":
            self._sum, self._num_rows = rows[-1].astype(np.float64), 1
            return
        # Rows are added one by one, so that the bits do not depend on the sizes of the chunks.
        for row in rows:
            self._sum += row
        self._num_rows += len(rows)

    def vector(self) -> bytes:
        assert self._num_rows > 0, "rows are added before the vector is read"
        return (self._sum / self._num_rows).astype("<f4").tobytes()
