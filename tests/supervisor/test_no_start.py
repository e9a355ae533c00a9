"""A system that allows no further process, file or memory for a while does not end the supervisor."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from onward.config import ServeConfig
from onward.proto.worker_wire_address import ShmWireAddress
from onward.supervisor.children import ProcessRole
from onward.supervisor.core import START_RETRY_S, StartProcess
from onward.supervisor.pd_config import PdConfig
from onward.supervisor.supervisor import Supervisor
from onward.transport import shm_wire
from onward.transport.control_channel import MAX_INLINE_BYTES
from tests.supervisor.stand_ins import kill_and_reap, supervisor_of


def open_files() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/fd").iterdir() if path.exists()}


@contextmanager
def files_left(count: int) -> Iterator[None]:
    """Only so many may be opened meanwhile."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(open_files()) + 1 + count, limits[1]))
    taken: list[int] = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in taken:
            os.close(fd)


def roles(supervisor: Supervisor) -> list[ProcessRole]:
    return [child.role for child in supervisor._processes]


class HandClock:
    at_s = 5.0

    def now_s(self) -> float:
        return self.at_s

    wall_s = now_s


def tick(supervisor: Supervisor, clock: HandClock, at_s: float) -> None:
    clock.at_s = at_s
    supervisor._execute(supervisor._core.tick(at_s))


def test_a_start_that_the_system_does_not_allow_is_tried_again_and_leaves_nothing() -> None:
    clock = HandClock()
    with supervisor_of(ServeConfig(), clock=clock) as supervisor:
        supervisor._core.was_ready = True
        before = open_files()
        for count in (0, 1, 2):  # not even a socket pair, and one without a process
            with files_left(count):
                if count:
                    tick(supervisor, clock, 5.0 + count * START_RETRY_S)
                else:
                    supervisor._execute([StartProcess(ProcessRole.STREAM_STORE, 0)])
            assert (roles(supervisor), open_files()) == ([], before)
        tick(supervisor, clock, 5.0 + 2.5 * START_RETRY_S)
        assert roles(supervisor) == []
        tick(supervisor, clock, 5.0 + 3 * START_RETRY_S)
        assert roles(supervisor) == [ProcessRole.STREAM_STORE]


def test_an_engine_that_could_be_started_without_its_worker_gets_one_later_and_stays_the_only_one() -> None:
    clock, room = HandClock(), 1
    with supervisor_of(ServeConfig(), clock=clock) as supervisor:
        supervisor._core.was_ready = True
        supervisor._core.on_start_failed(ProcessRole.ENGINE, 0, clock.at_s)
        while not roles(supervisor):  # with a little more room each time there is enough for the first of the two
            with files_left(room):
                tick(supervisor, clock, clock.at_s + START_RETRY_S)
            room += 1
        assert roles(supervisor) == [ProcessRole.ENGINE]
        tick(supervisor, clock, clock.at_s + START_RETRY_S)
        assert sorted(role.value for role in roles(supervisor)) == ["engine", "worker"]
        for later_s in (1, 10, 100):
            tick(supervisor, clock, clock.at_s + later_s)
        assert sorted(role.value for role in roles(supervisor)) == ["engine", "worker"]


def test_a_first_start_that_the_system_does_not_allow_is_an_error() -> None:
    with supervisor_of(ServeConfig()) as supervisor, files_left(0), pytest.raises(OSError):
        supervisor._execute(supervisor._core.start())


def child_pids() -> set[int]:
    """Child processes that run, or that were not reaped."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


@contextmanager
def files_of(num_bytes: int) -> Iterator[None]:
    """No file may be longer meanwhile, memory included."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_worker_that_cannot_be_told_to_start_is_ended_and_leaves_nothing() -> None:
    """A long message goes through memory, which the system may refuse after the process has started."""
    clock, others = HandClock(), child_pids()
    pd = PdConfig(kv_backend="shm", cluster_key="ab" * MAX_INLINE_BYTES)
    with supervisor_of(ServeConfig(role="decode", transport="zmq"), clock=clock, pd=pd) as supervisor:
        supervisor._core.was_ready = True
        supervisor._execute([StartProcess(ProcessRole.ENGINE, 0)])
        [worker] = supervisor._core.children_of(ProcessRole.WORKER)
        kill_and_reap(supervisor, worker)
        before = open_files()
        with files_of(0):
            tick(supervisor, clock, clock.at_s + START_RETRY_S)
        assert roles(supervisor) == [ProcessRole.ENGINE]
        assert child_pids() - others == {process.process.pid for process in supervisor._processes.values()}
        assert open_files() == before
        tick(supervisor, clock, clock.at_s + START_RETRY_S)
        assert roles(supervisor) == [ProcessRole.ENGINE, ProcessRole.WORKER]


@pytest.mark.parametrize("room", [0, 1, 2])
def test_a_wire_that_the_system_does_not_allow_leaves_nothing(room: int) -> None:
    before = open_files()
    with files_left(room), pytest.raises(OSError):
        shm_wire.create_ring(ShmWireAddress("worker", 1, 1, 100, 100))
    assert open_files() == before
