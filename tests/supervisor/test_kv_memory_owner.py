"""The supervisor holds KV memory open for as long as it has its name, and no longer."""

import os
from pathlib import Path

import pytest

from onward.config import ServeConfig
from onward.proto.control import DeviceKvAllocated, DeviceWeightsLoaded, KeptWeights
from onward.supervisor.kv_memory_owner import KvMemoryOwner, can_keep_kv_memory


def identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def open_files() -> set[tuple[int, int]]:
    """All files that this process has open."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        try:
            found.add(identity(int(path.name)))
        except OSError:
            continue  # that of the listing itself
    return found


def test_the_same_name_is_the_same_memory_with_what_is_in_it() -> None:
    owner = KvMemoryOwner()
    first = owner.fds_of("memory-1")
    assert first is not None
    os.write(first.pool, b"kv")
    os.write(first.hashes, b"hashes")
    again = owner.fds_of("memory-1")
    assert again == first
    assert os.pread(again.pool, 10, 0) == b"kv"
    assert os.pread(again.hashes, 10, 0) == b"hashes"
    owner.close()


def test_pool_and_hashes_are_two_memories_without_a_size() -> None:
    owner = KvMemoryOwner()
    memory = owner.fds_of("memory-1")
    assert memory is not None
    assert identity(memory.pool) != identity(memory.hashes)
    assert [os.fstat(fd).st_size for fd in memory] == [0, 0]
    owner.close()


def test_another_name_is_other_memory_and_the_old_one_is_closed() -> None:
    owner = KvMemoryOwner()
    first = owner.fds_of("memory-1")
    assert first is not None
    os.write(first.pool, b"kv")
    old = {identity(fd) for fd in first}
    second = owner.fds_of("memory-2")
    assert second is not None
    assert not old & open_files()
    assert [os.fstat(fd).st_size for fd in second] == [0, 0]
    owner.close()


def test_no_name_is_no_memory_and_the_old_one_is_closed() -> None:
    owner = KvMemoryOwner()
    assert owner.fds_of("") is None
    first = owner.fds_of("memory-1")
    assert first is not None
    old = {identity(fd) for fd in first}
    assert owner.fds_of("") is None
    assert not old & open_files()


def test_close_closes_the_memory_and_may_be_called_twice() -> None:
    owner = KvMemoryOwner()
    memory = owner.fds_of("memory-1")
    assert memory is not None
    old = {identity(fd) for fd in memory}
    assert old <= open_files()
    owner.close()
    assert not old & open_files()
    owner.close()


@pytest.mark.parametrize("index", [0, 1])
def test_a_child_does_not_inherit_memory_that_it_was_not_given(index: int) -> None:
    owner = KvMemoryOwner()
    memory = owner.fds_of("memory-1")
    assert memory is not None
    assert not os.get_inheritable(memory[index])
    owner.close()


@pytest.mark.parametrize(
    ("flags", "is_kept"),
    [
        ({}, True),
        ({"speculative": "ngram:4"}, True),
        ({"speculative": "draft:/models/small:4"}, True),
        ({"speculative": "eagle:/models/layer:1"}, False),
        ({"device": "cuda"}, True),
        ({"role": "decode"}, True),
        ({"role": "prefill"}, True),
    ],
)
def test_memory_is_kept_where_nothing_else_depends_on_it(flags: dict[str, str], is_kept: bool) -> None:
    assert can_keep_kv_memory(ServeConfig(**flags)) is is_kept  # type: ignore[arg-type]


def new_fd(content: bytes) -> int:
    """Stands for memory of a device, as a worker hands it over."""
    fd = os.memfd_create("onward-test", os.MFD_CLOEXEC)
    os.write(fd, content)
    return fd


def test_on_a_device_the_pool_is_what_a_worker_has_allocated() -> None:
    owner = KvMemoryOwner("cuda")
    empty = owner.fds_of("memory-1")
    assert empty is not None
    assert (empty.pool, owner.num_pool_bytes, owner.has_pool("memory-1")) == (-1, 0, False)
    owner.take_kv(DeviceKvAllocated("memory-1", 4096, True), new_fd(b"kv"))
    memory = owner.fds_of("memory-1")
    assert memory is not None
    assert os.pread(memory.pool, 10, 0) == b"kv"
    assert (memory.hashes, owner.num_pool_bytes, owner.has_pool("memory-1")) == (empty.hashes, 4096, True)
    owner.close()


def test_a_pool_of_memory_that_was_given_up_is_not_taken() -> None:
    owner = KvMemoryOwner("cuda")
    owner.fds_of("memory-1")
    owner.fds_of("memory-2")
    fd = new_fd(b"of the first")
    late = identity(fd)
    owner.take_kv(DeviceKvAllocated("memory-1", 4096, True), fd)
    assert not owner.has_pool("memory-2")
    assert late not in open_files()
    owner.close()


def test_a_second_pool_of_the_same_name_is_not_taken() -> None:
    """The engine relies on what is in the first one."""
    owner = KvMemoryOwner("cuda")
    owner.fds_of("memory-1")
    owner.take_kv(DeviceKvAllocated("memory-1", 4096, True), new_fd(b"first"))
    owner.take_kv(DeviceKvAllocated("memory-1", 8192, True), new_fd(b"second"))
    memory = owner.fds_of("memory-1")
    assert memory is not None
    assert os.pread(memory.pool, 10, 0) == b"first"
    assert owner.num_pool_bytes == 4096
    owner.close()


def test_weights_stay_when_kv_memory_is_given_up_and_newer_ones_replace_them() -> None:
    owner = KvMemoryOwner("cuda")
    owner.fds_of("memory-1")
    fd = new_fd(b"weights")
    first = identity(fd)
    owner.take_weights(DeviceWeightsLoaded(7, "a", "layout"), fd)
    owner.fds_of("memory-2")
    assert owner.weights == KeptWeights(fd, 7, "a", "layout")
    assert first in open_files()
    owner.take_weights(DeviceWeightsLoaded(8, "b", "layout"), new_fd(b"newer"))
    assert owner.weights is not None and os.pread(owner.weights.fd, 10, 0) == b"newer"
    assert first not in open_files()
    owner.close()
    assert owner.weights is None
