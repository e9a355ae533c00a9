"""Arrays of a step travel together and arrive as they were."""

import numpy as np
import torch

from onward.worker.cuda.staging_buffer import StagingBuffer


def test_arrays_arrive_as_they_were_also_when_there_are_more_than_fit() -> None:
    stage = StagingBuffer("cpu", num_bytes=64)
    arrays = [np.arange(5, dtype=np.int32), np.arange(100, dtype=np.int64).reshape(4, 25), np.ones((2, 3), np.float32)]
    for _ in range(2):
        stage.clear()
        staged = [stage.put(array) for array in arrays]
        stage.send()
        for array, one in zip(arrays, staged, strict=True):
            assert torch.equal(one.tensor(), torch.from_numpy(array))
