"""Arrays on their way to the device: gathered in pinned memory, sent in one copy, read there as tensors.

A step has a staging buffer of its own until it is done: its copy may still be running while the next step is prepared.
"""

from collections.abc import Sequence

import numpy as np
import torch

_ALIGNMENT = 16
_KINDS = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}


def to_device(values: Sequence[float], dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    """Returns a few numbers as a tensor on the device. Without pinned memory the copy would wait for all earlier work
    of the device."""
    is_host = torch.device(device).type == "cpu"
    return torch.tensor(values, dtype=dtype, pin_memory=not is_host).to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy on the host, which is complete once the device has finished all work launched so far."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


class StagingBuffer:
    def __init__(self, device: str, num_bytes: int = 1 << 16) -> None:
        self._device = device
        self._used = 0
        self._allocate(num_bytes)

    def clear(self) -> None:
        self._used = 0

    def put(self, array: np.ndarray) -> "StagedArrayView":
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        self._used = start + array.nbytes
        if self._used > len(self._bytes):
            self._grow(self._used)
        self._bytes[start : self._used] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return StagedArrayView(self, start, array.shape, _KINDS[array.dtype])

    def send(self) -> None:
        self._device_buffer[: self._used].copy_(self._host_buffer[: self._used], non_blocking=True)

    def read(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        end = start + int(np.prod(shape)) * dtype.itemsize
        assert end <= self._used, "an array is read before its buffer is cleared"
        return self._device_buffer[start:end].view(dtype).view(shape)

    def _grow(self, num_bytes: int) -> None:
        old_bytes = self._bytes
        self._allocate(max(num_bytes, 2 * len(old_bytes)))
        self._bytes[: len(old_bytes)] = old_bytes

    def _allocate(self, num_bytes: int) -> None:
        self._host_buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device != "cpu")
        self._bytes = self._host_buffer.numpy()
        self._device_buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


class StagedArrayView:
    """An array that was put into a staging buffer. After `StagingBuffer.send`, `tensor` returns a view of the array's
    part of the buffer on the device, which is valid until the buffer is cleared."""

    def __init__(self, stage: StagingBuffer, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._stage, self._start, self._shape, self._dtype = stage, start, shape, dtype

    def tensor(self) -> torch.Tensor:
        return self._stage.read(self._start, self._shape, self._dtype)
