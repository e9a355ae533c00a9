"""One vector of many rows, on the device: `worker.embedding_pooler`, to the bit where rows have the same bits."""

import torch

from onward.kernels.ops import Ops
from onward.proto.sampling_params import Pooling
from onward.worker.cuda.staging_buffer import to_host


class DeviceEmbeddingPooler:
    def __init__(self, pooling: Pooling, hidden_size: int, device: str) -> None:
        self._pooling = pooling
        self._sum = torch.zeros(hidden_size, dtype=torch.float64, device=device)
        self._num_rows = 0

    def add(self, rows: torch.Tensor, ops: Ops) -> None:
        """The next ones, in their order."""
        if self._pooling == "last":
            self._sum.copy_(rows[-1])
            self._num_rows = 1
            return
        ops.accumulate_rows(rows, self._sum)
        self._num_rows += len(rows)

    def vector(self) -> torch.Tensor:
        """float32, on the host once the device has passed this place."""
        assert self._num_rows > 0, "rows are added before the vector is read"
        return to_host((self._sum / self._num_rows).float())
