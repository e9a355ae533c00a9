"""Memory of a CUDA device, as a worker hands it over to the supervisor and the next worker gets it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from onward.config import ServeConfig
from onward.proto.control import DeviceKvAllocated, DeviceWeightsLoaded
from onward.supervisor.children import Child, ChildState, ProcessRole
from onward.supervisor.core import RemoveProcess
from onward.supervisor.pd_config import PdConfig
from onward.supervisor.supervisor import Supervisor
from onward.transport.control_channel import ControlChannel
from tests.supervisor.stand_ins import child_of, kill_and_reap, supervisor_of

CONFIG = ServeConfig(device="cuda")


@contextmanager
def with_worker(
    config: ServeConfig = CONFIG, *, was_ready: bool = True
) -> Iterator[tuple[Supervisor, Child, ControlChannel]]:
    """A supervisor, its worker, and the worker's end of their channel."""
    with supervisor_of(config, pd=PdConfig()) as supervisor:
        worker, channel = child_of(supervisor, ProcessRole.WORKER, "worker-1")
        supervisor._core.was_ready = supervisor._has_announced_readiness = was_ready
        worker.kv_memory = supervisor._core.kv_memory
        supervisor._worker_start_message("worker-1")  # what it was started with
        try:
            yield supervisor, worker, channel
        finally:
            channel.close()


def hand_over(
    supervisor: Supervisor, worker: Child, channel: ControlChannel, message: object, content: bytes | None
) -> None:
    """`content` stands for memory of the device; None: its file descriptor got lost."""
    fds = []
    if content is not None:
        fds = [os.memfd_create("onward-test")]
        os.write(fds[0], content)
    assert channel.send(message, fds)
    for fd in fds:
        os.close(fd)
    supervisor._read_messages(worker)


def end_with(supervisor: Supervisor, child: Child, status: int) -> None:
    """As if the process had ended by itself."""
    process = supervisor._processes[child].process
    process.kill()
    process.wait()
    process.returncode = status
    supervisor._reap()


def test_the_next_worker_gets_weights_and_pool_of_the_last_one() -> None:
    with with_worker() as (supervisor, worker, channel):
        first = supervisor._worker_start_message("worker-1")
        assert (first.kv_memory, first.kv_memory_fd, first.weights) == ("memory-1", -1, None)
        assert supervisor._memory_fds() == ()
        hand_over(supervisor, worker, channel, DeviceWeightsLoaded(7, "abc", "layout"), b"weights")
        hand_over(supervisor, worker, channel, DeviceKvAllocated("memory-1", 1 << 40, True), b"pool")
        kill_and_reap(supervisor, worker)
        start = supervisor._worker_start_message("worker-2")
        assert (start.kv_memory, start.kv_memory_bytes) == ("memory-1", 1 << 40)
        assert start.weights is not None
        assert (start.weights.num_bytes, start.weights.checksum) == (7, "abc")
        assert supervisor._memory_fds() == (start.kv_memory_fd, start.weights.fd)
        assert os.pread(start.kv_memory_fd, 10, 0) == b"pool"
        assert os.pread(start.weights.fd, 10, 0) == b"weights"


def test_what_a_worker_sends_last_is_taken_although_it_is_dead() -> None:
    with with_worker() as (supervisor, worker, channel):
        fd = os.memfd_create("onward-test")
        assert channel.send(DeviceKvAllocated("memory-1", 4096, True), [fd])
        os.close(fd)
        kill_and_reap(supervisor, worker)
        assert supervisor._worker_start_message("worker-2").kv_memory_bytes == 4096


def test_a_worker_that_failed_leaves_its_weights_and_no_pool() -> None:
    with with_worker() as (supervisor, worker, channel):
        hand_over(supervisor, worker, channel, DeviceWeightsLoaded(7, "abc", "layout"), b"weights")
        hand_over(supervisor, worker, channel, DeviceKvAllocated("memory-1", 4096, True), b"pool")
        supervisor._processes[worker].process.terminate()  # no SIGKILL: it has died of itself
        supervisor._processes[worker].process.wait()
        supervisor._reap()
        start = supervisor._worker_start_message("worker-2")
        assert (start.kv_memory, start.kv_memory_fd, start.kv_memory_bytes) == ("memory-2", -1, 0)
        assert start.weights is not None and os.pread(start.weights.fd, 10, 0) == b"weights"


def test_a_pool_whose_descriptor_got_lost_is_given_up_with_its_worker() -> None:
    """The engine would rely on blocks that the next worker does not have."""
    with with_worker() as (supervisor, worker, channel):
        hand_over(supervisor, worker, channel, DeviceKvAllocated("memory-1", 4096, True), None)
        assert supervisor._processes[worker].process.wait(10) == -9
        supervisor._reap()
        assert supervisor._worker_start_message("worker-2").kv_memory == "memory-2"


def test_a_standby_is_not_started_before_there_is_a_pool_to_attach() -> None:
    with with_worker(ServeConfig(device="cuda", standby_worker="on")) as (supervisor, worker, channel):
        supervisor._start_standby()
        assert not supervisor._core.children_of(ProcessRole.STANDBY)
        hand_over(supervisor, worker, channel, DeviceKvAllocated("memory-1", 4096, True), b"pool")
        supervisor._start_standby()
        assert len(supervisor._core.children_of(ProcessRole.STANDBY)) == 1


def test_there_is_no_standby_where_the_device_has_no_room() -> None:
    with with_worker(was_ready=False) as (supervisor, worker, channel):
        assert supervisor._core._settings.has_standby
        hand_over(supervisor, worker, channel, DeviceKvAllocated("memory-1", 4096, False), b"pool")
        assert not supervisor._core._settings.has_standby


def test_removing_a_standby_of_memory_that_was_given_up_leaves_the_present_memory_alone() -> None:
    """The engine writes block hashes into the table that it was given with the present memory."""
    with with_worker(ServeConfig(device="cuda", standby_worker="on")) as (supervisor, worker, channel):
        hand_over(supervisor, worker, channel, DeviceKvAllocated("memory-1", 4096, True), b"pool")
        standby, standby_channel = child_of(supervisor, ProcessRole.STANDBY, "worker-2")
        standby_channel.close()
        standby.kv_memory = "memory-1"
        end_with(supervisor, worker, -11)
        present = supervisor._kv_memory.fds_of("memory-2")
        assert present is not None
        table = os.fstat(present.hashes).st_ino
        supervisor._execute([RemoveProcess(standby)])
        after = supervisor._kv_memory.fds_of("memory-2")
        assert after is not None and os.fstat(after.hashes).st_ino == table


@pytest.mark.parametrize(("status", "are_kept"), [(1, False), (0, True)])
def test_weights_that_a_worker_cannot_start_with_are_loaded_again(status: int, are_kept: bool) -> None:
    """A failed start that was reported, and ends with 0, has another cause."""
    with with_worker() as (supervisor, worker, channel):
        hand_over(supervisor, worker, channel, DeviceWeightsLoaded(7, "abc", "layout"), b"weights")
        worker.state = ChildState.STARTING
        end_with(supervisor, worker, status)
        assert (supervisor._worker_start_message("worker-2").weights is not None) is are_kept


def test_weights_of_a_worker_that_has_served_are_kept_whatever_it_died_of() -> None:
    """The next worker compares their checksum."""
    with with_worker() as (supervisor, worker, channel):
        hand_over(supervisor, worker, channel, DeviceWeightsLoaded(7, "abc", "layout"), b"weights")
        end_with(supervisor, worker, 1)
        assert supervisor._worker_start_message("worker-2").weights is not None


def test_a_pool_that_was_sent_just_before_the_engine_died_is_kept() -> None:
    """Its engine may have sealed blocks of it: the next one must not find other memory under its name."""
    with with_worker() as (supervisor, worker, channel):
        fd = os.memfd_create("onward-test")
        os.write(fd, b"pool")
        assert channel.send(DeviceKvAllocated("memory-1", 4096, True), [fd])
        os.close(fd)
        supervisor._execute([RemoveProcess(worker)])
        start = supervisor._worker_start_message("worker-2")
        assert (start.kv_memory, start.kv_memory_bytes) == ("memory-1", 4096)
        assert os.pread(start.kv_memory_fd, 10, 0) == b"pool"


def test_memory_without_a_pool_ends_with_its_engine() -> None:
    with with_worker() as (supervisor, worker, _):
        supervisor._execute([RemoveProcess(worker)])
        assert supervisor._worker_start_message("worker-2").kv_memory == "memory-2"


def test_a_later_worker_keeps_the_number_of_blocks_that_the_first_one_has_chosen() -> None:
    with with_worker() as (supervisor, _, _):
        first = supervisor._worker_start_message("worker-1").config
        assert (first.num_kv_blocks, first.keeps_pool_size) == (None, False)
        supervisor._num_kv_blocks = 123  # as its hello says
        later = supervisor._worker_start_message("worker-2").config
        assert (later.num_kv_blocks, later.keeps_pool_size) == (123, True)
    with with_worker(ServeConfig(device="cuda", num_kv_blocks=123)) as (supervisor, _, _):
        assert not supervisor._worker_start_message("worker-1").config.keeps_pool_size, "the number comes from a flag"
