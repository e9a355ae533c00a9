"""KV memory that can be handed to a peer: the same bytes, of a fixed size, and nothing left of it afterwards."""

import contextlib
import gc
import mmap
import os

import numpy as np
import pytest

from onward.worker.kv_pool import allocate_kv_pool, block_bytes
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
