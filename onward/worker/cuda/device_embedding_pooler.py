"""Pools hidden states into one vector on the device. Equal rows give the same bits as in `worker.embedding_pooler`."""

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
        """Adds the next rows, in their order."""
        if self._pooling == "last":
            self._sum.copy_(rows[-1])
            self._num_rows = 1
            return
        ops.accumulate_rows(rows, self._sum)
        self._num_rows += len(rows)

    def vector(self) -> torch.Tensor:
        """Returns the vector in float32 on the host. It is complete once the device has finished all work launched so
        far."""
        assert self._num_rows > 0, "rows are added before the vector is read"
        return to_host((self._sum / self._num_rows).float())
