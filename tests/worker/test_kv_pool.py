"""KV memory that can be handed to a peer or outlives its worker: the same bytes, of a fixed size, and nothing left of it
afterwards."""

import contextlib
import gc
import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from onward.worker.kv_pool import allocate_kv_pool, block_bytes, num_blocks_in
from tests.worker import small_int8

INT8 = np.dtype(np.int8)


def test_shared_memory_is_what_its_file_descriptor_maps() -> None:
    pool = allocate_kv_pool(small_int8.CONFIG, INT8, 10, 16, is_shared=True)
    assert pool.fd is not None
    with mmap.mmap(pool.fd, pool.geometry.num_bytes) as theirs:
        at = pool.geometry.page_offset(1, 7)
        theirs[at : at + 3] = b"abc"
        assert pool.kv.data[at : at + 3].tobytes() == b"abc"
        assert pool.kv.layer_stride + 7 * pool.geometry.page_bytes == at


def test_shared_memory_cannot_change_its_size() -> None:
    pool = allocate_kv_pool(small_int8.CONFIG, INT8, 10, 16, is_shared=True)
    assert pool.fd is not None
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(pool.fd, size)


def test_shared_memory_is_gone_when_nobody_uses_it() -> None:
    pool = allocate_kv_pool(small_int8.CONFIG, INT8, 10, 16, is_shared=True)
    fd = pool.fd
    assert fd is not None
    before = os.fstat(fd).st_ino
    del pool
    gc.collect()
    with contextlib.suppress(OSError):  # closed, or another file's by now
        assert os.fstat(fd).st_ino != before


def test_private_memory_has_no_file_descriptor_and_the_same_size() -> None:
    pool = allocate_kv_pool(small_int8.CONFIG, INT8, 10, 16)
    assert pool.fd is None
    assert len(pool.data) == pool.geometry.num_bytes == 10 * block_bytes(small_int8.CONFIG, INT8, 16)


@pytest.fixture
def memory_fd() -> Iterator[int]:
    """A file descriptor of memory that a supervisor keeps. Workers get duplicates, as over a process boundary."""
    fd = os.memfd_create("onward-kv-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    yield fd
    os.close(fd)


def test_memory_by_file_descriptor_has_its_bytes_for_the_next_worker(memory_fd: int) -> None:
    assert num_blocks_in(memory_fd, small_int8.CONFIG, INT8, 16) == 0
    first = allocate_kv_pool(small_int8.CONFIG, INT8, 10, 16, memory_fd=os.dup(memory_fd))
    first.kv.data[:] = np.arange(len(first.kv.data)) % 127
    written = first.kv.data.copy()
    del first
    gc.collect()
    assert num_blocks_in(memory_fd, small_int8.CONFIG, INT8, 16) == 10
    second = allocate_kv_pool(small_int8.CONFIG, INT8, 10, 16, memory_fd=os.dup(memory_fd))
    assert np.array_equal(second.kv.data, written)


@pytest.mark.parametrize("num_blocks", [9, 11])
def test_memory_of_another_size_is_refused_and_keeps_its_size(memory_fd: int, num_blocks: int) -> None:
    allocate_kv_pool(small_int8.CONFIG, INT8, 10, 16, memory_fd=os.dup(memory_fd))
    size = os.fstat(memory_fd).st_size
    with pytest.raises(AssertionError, match="size of this pool"):
        allocate_kv_pool(small_int8.CONFIG, INT8, num_blocks, 16, memory_fd=memory_fd)
    assert os.fstat(memory_fd).st_size == size


def test_memory_of_another_model_is_refused(memory_fd: int) -> None:
    os.ftruncate(memory_fd, block_bytes(small_int8.CONFIG, INT8, 16) + 1)
    with pytest.raises(AssertionError, match="the same model"):
        num_blocks_in(memory_fd, small_int8.CONFIG, INT8, 16)


def test_memory_by_file_descriptor_cannot_change_its_size(memory_fd: int) -> None:
    allocate_kv_pool(small_int8.CONFIG, INT8, 10, 16, memory_fd=os.dup(memory_fd))
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(memory_fd, size)
