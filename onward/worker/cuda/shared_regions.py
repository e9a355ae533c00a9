"""Device memory that outlives the process that allocated it.

The CUDA driver exports an allocation as a file descriptor. The descriptor alone keeps the memory: a process that holds it
needs no CUDA context, and any process that gets it can map the memory. When the last descriptor and the last mapping are
gone, the memory is free. On the host, for tests, anonymous files have the same properties.
"""

import ctypes
import mmap
import os
from typing import Any, NamedTuple, Protocol

import torch


class SharedRegion(NamedTuple):
    fd: int
    memory: torch.Tensor
    """The whole memory, uint8. It stays mapped for as long as this process lives."""


class RegionAllocator(Protocol):
    def create(self, num_bytes: int) -> SharedRegion:
        """Allocates memory of undefined content."""
        ...

    def attach(self, fd: int, num_bytes: int) -> torch.Tensor:
        """Maps memory that another process has created with this size. Closes `fd`: the mapping keeps the memory.
        Raises `RuntimeError` if the driver refuses."""
        ...


class HostRegions:
    def create(self, num_bytes: int) -> SharedRegion:
        fd = os.memfd_create("onward-region", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        return SharedRegion(fd, _map_file(fd, num_bytes))

    def attach(self, fd: int, num_bytes: int) -> torch.Tensor:
        assert os.fstat(fd).st_size == num_bytes, "the memory has the size that it was created with"
        memory = _map_file(fd, num_bytes)
        os.close(fd)
        return memory


def _map_file(fd: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)


_PINNED_ALLOCATION, _FILE_DESCRIPTOR, _ON_DEVICE, _READ_AND_WRITE = 1, 1, 1, 3
_FILE_DESCRIPTORS_SUPPORTED = 103
"""A device attribute of the driver's interface."""
_OUT_OF_MEMORY = 2


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationProperties(ctypes.Structure):
    """`CUmemAllocationProp` of the driver's interface; the flags at its end are all 0."""

    _fields_ = (
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location), ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )  # fmt: skip


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _DeviceArray:
    """Memory of the device in a form that torch accepts without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def can_export() -> bool:
    """Returns whether the current CUDA device can export memory as file descriptors; some virtual devices cannot."""
    answer = ctypes.c_int()
    torch.empty(1, device="cuda")  # initializes the driver
    status = ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(
        ctypes.byref(answer), _FILE_DESCRIPTORS_SUPPORTED, torch.cuda.current_device()
    )
    return status == 0 and bool(answer.value)


class CudaRegions:
    """Regions on the current CUDA device, by the driver's virtual memory management."""

    def __init__(self) -> None:
        torch.empty(1, device="cuda")  # creates the context that the driver's calls work in
        self._device = torch.cuda.current_device()
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._properties = _AllocationProperties(
            _PINNED_ALLOCATION, _FILE_DESCRIPTOR, _Location(_ON_DEVICE, self._device)
        )
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), 0)
        self._granularity = granularity.value

    def create(self, num_bytes: int) -> SharedRegion:
        size, handle, fd = self._padded(num_bytes), ctypes.c_uint64(), ctypes.c_int()
        self._call(
            "cuMemCreate",
            ctypes.byref(handle),
            ctypes.c_size_t(size),
            ctypes.byref(self._properties),
            ctypes.c_uint64(0),
        )
        self._call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, _FILE_DESCRIPTOR, ctypes.c_uint64(0))
        return SharedRegion(fd.value, self._map(handle, size)[:num_bytes])

    def attach(self, fd: int, num_bytes: int) -> torch.Tensor:
        handle = ctypes.c_uint64()
        try:
            self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), _FILE_DESCRIPTOR)
        finally:
            os.close(fd)
        return self._map(handle, self._padded(num_bytes))[:num_bytes]

    def _padded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._granularity) * self._granularity

    def _map(self, handle: ctypes.c_uint64, size: int) -> torch.Tensor:
        """Maps an allocation. The mapping keeps the memory, so the handle is released."""
        address, length, none = ctypes.c_uint64(), ctypes.c_size_t(size), ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), length, ctypes.c_size_t(0), none, none)
        self._call("cuMemMap", address, length, ctypes.c_size_t(0), handle, none)
        access = _Access(_Location(_ON_DEVICE, self._device), _READ_AND_WRITE)
        self._call("cuMemSetAccess", address, length, ctypes.byref(access), ctypes.c_size_t(1))
        self._call("cuMemRelease", handle)
        return torch.as_tensor(_DeviceArray(address.value, size), device="cuda")

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status == _OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name}: the device has not enough free memory")
        if status:
            raise RuntimeError(f"the CUDA driver's {name} failed with status {status}")


_CHECKED_WORDS = 1 << 24
"""Words of 8 bytes that are summed at once: 128 MiB, and as much for a copy."""
_MIXER = 0x9E3779B97F4A7C15


def checksum(memory: torch.Tensor) -> str:
    """Returns a checksum that depends on each word and its position. It sums integers that wrap around, so the order of
    the sums does not matter."""
    assert memory.dtype == torch.uint8 and not len(memory) % 8, "whole words are summed"
    words = memory.view(torch.int64)
    multipliers = 2 * torch.arange(min(_CHECKED_WORDS, len(words)), device=memory.device) + 1
    sums = [(part * multipliers[: len(part)]).sum() for part in words.split(_CHECKED_WORDS)]
    total = 0
    for one in torch.stack(sums).tolist():
        total = (total * _MIXER + one) % (1 << 64)
    return f"{total:016x}"
