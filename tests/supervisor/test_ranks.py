"""The ranks of a worker end and are replaced together, whichever of them dies and of whatever."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest

from onward.config import ServeConfig
from onward.errors import StartupError
from onward.proto.control import WorkerGone
from onward.supervisor.children import Child, ProcessRole
from onward.supervisor.rank_process import RankProcess, spawn_ranks
from onward.supervisor.supervisor import Supervisor
from onward.supervisor.worker_deaths import KillReason, first_to_end
from onward.worker.tensor_parallel.rank_group import RankGroup
from onward.worker.tensor_parallel.shared_arrays import SharedArrays
from tests.supervisor.stand_ins import child_of, supervisor_of
from tests.worker import exact_int8
from tests.worker.driver import Driver, prepared

KILL, SEGV = -signal.SIGKILL, -signal.SIGSEGV
NUM_RANKS = 3
STOPPED_TIMEOUT_S = 2.0


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    config = ServeConfig(tensor_parallel=NUM_RANKS, stopped_timeout_s=STOPPED_TIMEOUT_S)
    with supervisor_of(config) as supervisor:
        supervisor._core.was_ready = True
        yield supervisor


@pytest.fixture
def channels() -> Iterator[ExitStack]:
    with ExitStack() as channels:
        yield channels


def worker_of_ranks(supervisor: Supervisor, channels: ExitStack) -> Child:
    worker, channel = child_of(supervisor, ProcessRole.WORKER, "worker-1")
    channels.callback(channel.close)
    worker.kv_memory = supervisor._core.kv_memory
    for rank in range(1, NUM_RANKS):
        process = subprocess.Popen(["sleep", "60"])
        supervisor._processes[worker].ranks.append(RankProcess(rank, process, os.pidfd_open(process.pid)))
    return worker


def end_rank(supervisor: Supervisor, worker: Child, rank: int, number: int) -> None:
    """As a fault would."""
    process = [supervisor._processes[worker].process, *(one.process for one in supervisor._processes[worker].ranks)][
        rank
    ]
    process.send_signal(number)
    process.wait()


@pytest.mark.parametrize(
    ("rank", "number", "is_memory_kept"),
    [(0, signal.SIGKILL, True), (1, signal.SIGKILL, True), (2, signal.SIGKILL, True), (0, signal.SIGSEGV, False),
     (2, signal.SIGSEGV, False)],
)  # fmt: skip
def test_a_rank_that_dies_takes_its_group_along(
    supervisor: Supervisor, channels: ExitStack, rank: int, number: signal.Signals, is_memory_kept: bool
) -> None:
    engine, engine_channel = child_of(supervisor, ProcessRole.ENGINE, "engine-1")
    channels.callback(engine_channel.close)
    worker = worker_of_ranks(supervisor, channels)
    memory, pids = supervisor._core.kv_memory, supervisor._processes[worker].pids()
    end_rank(supervisor, worker, rank, number)
    supervisor._reap()
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert worker not in supervisor._processes
    gone = engine_channel.wait_receive()
    assert isinstance(gone, WorkerGone)
    assert f"rank {rank}: signal {number.value} ({number.name})" in gone.cause
    assert gone.keeps_memory == is_memory_kept
    assert [supervisor._metrics.rank_deaths.value(str(other)) for other in range(NUM_RANKS)] == [
        float(other == rank) for other in range(NUM_RANKS)
    ]
    assert (supervisor._core.kv_memory == memory) == is_memory_kept
    assert engine in supervisor._processes, "no other process is concerned"


def test_a_fault_of_one_rank_ends_the_memory_although_another_was_killed(
    supervisor: Supervisor, channels: ExitStack
) -> None:
    worker = worker_of_ranks(supervisor, channels)
    memory = supervisor._core.kv_memory
    end_rank(supervisor, worker, 0, signal.SIGKILL)
    end_rank(supervisor, worker, 2, signal.SIGSEGV)
    supervisor._reap()
    assert supervisor._core.kv_memory != memory


def test_every_rank_is_shown_with_the_incarnation_of_its_group(supervisor: Supervisor, channels: ExitStack) -> None:
    worker = worker_of_ranks(supervisor, channels)
    pids = supervisor._processes[worker].pids()
    views = [view for view in supervisor._process_views() if view.incarnation == worker.incarnation]
    assert [(view.role, view.rank, view.pid) for view in views] == [
        ("worker", 0, pids[0]), ("worker_rank", 1, pids[1]), ("worker_rank", 2, pids[2]),
    ]  # fmt: skip


def test_a_worker_without_ranks_is_shown_without_a_rank(supervisor: Supervisor, channels: ExitStack) -> None:
    _, channel = child_of(supervisor, ProcessRole.WORKER, "worker-1")
    channels.callback(channel.close)
    [view] = [view for view in supervisor._process_views() if view.role == "worker"]
    assert view.rank is None


def test_a_kill_of_the_worker_kills_all_ranks(supervisor: Supervisor, channels: ExitStack) -> None:
    worker = worker_of_ranks(supervisor, channels)
    process = supervisor._processes[worker]
    process.send_sigkill()
    assert [one.process.wait(30) for one in process.ranks] == [KILL] * (NUM_RANKS - 1)
    process.end()
    assert process.return_code == KILL
    assert not process.killed_externally


def test_a_group_whose_rank_stays_stopped_is_killed(supervisor: Supervisor, channels: ExitStack) -> None:
    worker = worker_of_ranks(supervisor, channels)
    process = supervisor._processes[worker]
    stopped = process.ranks[1].process
    stopped.send_signal(signal.SIGSTOP)
    os.waitpid(stopped.pid, os.WUNTRACED)
    for second in range(int(STOPPED_TIMEOUT_S) + 1):
        assert process.process.poll() is None
        supervisor._sample_usage()
        supervisor._replace_stopped(float(second))
    process.end()
    assert process.return_code == KILL
    assert worker.kill_reason is KillReason.STOPPED


@pytest.mark.parametrize(
    ("return_codes", "expected"),
    [
        ({0: 0, 1: KILL, 2: 0}, 1),
        ({0: KILL, 1: 0, 2: 0}, 0),
        ({0: KILL, 2: SEGV}, 2),
        ({1: 1, 2: KILL}, 1),
        ({0: 1, 1: SEGV}, 0),
        ({0: 0, 1: 0}, 0),
    ],
    ids=str,
)
def test_the_fault_that_may_have_damaged_memory_explains_the_end_of_a_group(
    return_codes: dict[int, int], expected: int
) -> None:
    assert first_to_end(return_codes) == expected


def test_ranks_whose_leader_could_not_start_are_ended() -> None:
    processes: list[RankProcess] = []
    with pytest.raises(OSError, match="no more processes"), spawn_ranks(NUM_RANKS) as (ranks, fds):
        processes += ranks
        assert len(ranks) == len(fds) == NUM_RANKS - 1
        raise OSError("no more processes")
    assert [one.process.poll() for one in processes] == [KILL] * (NUM_RANKS - 1)


def lose_rank_0(fds: list[int], folder: Path) -> None:
    """Starts the ranks, which cannot load their model, ends their channels as rank 0 would, and waits until each rank has
    noticed."""
    config = exact_int8.shape(32, 3)
    model = msgspec.structs.replace(prepared(config, quantization="int8"), folder=str(folder), weights=["missing"])
    group = RankGroup([os.dup(fd) for fd in fds])
    with pytest.raises(StartupError):
        Driver(model, exact_int8.arrays(config), ranks=group, threads=1, tensor_parallel=NUM_RANKS)
    for fd in fds:
        with socket.socket(fileno=os.dup(fd)) as leader_end:
            leader_end.setblocking(True)
            leader_end.shutdown(socket.SHUT_WR)
            while leader_end.recv(1 << 16):
                pass


def test_ranks_whose_leader_is_gone_wait_until_they_are_killed(tmp_path: Path) -> None:
    with spawn_ranks(NUM_RANKS) as (ranks, fds):
        lose_rank_0(fds, tmp_path)
    for one in ranks:
        one.discard()
        assert one.process.returncode == KILL, "it has not ended by itself"


def test_a_fault_of_rank_0_explains_the_end_although_its_channels_close_first(
    supervisor: Supervisor, channels: ExitStack, tmp_path: Path
) -> None:
    worker, channel = child_of(supervisor, ProcessRole.WORKER, "worker-1")
    channels.callback(channel.close)
    memory = worker.kv_memory = supervisor._core.kv_memory
    ended = ended_with_an_exception()
    process = supervisor._processes[worker]
    with spawn_ranks(NUM_RANKS) as (process.ranks, fds):
        lose_rank_0(fds, tmp_path)
    supervisor._reap()
    assert worker in supervisor._processes, "no rank has ended"
    process.process.kill()
    process.process.wait()
    process.process = ended
    supervisor._reap()
    assert worker not in supervisor._processes
    assert [one.process.returncode for one in process.ranks] == [KILL] * (NUM_RANKS - 1)
    assert process.exit_cause() == "rank 0: exit code 1"
    assert supervisor._core.kv_memory != memory


def ended_with_an_exception() -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    process.wait()
    return process


def test_the_arrays_that_ranks_share_count_as_memory_that_a_standby_needs(
    supervisor: Supervisor, channels: ExitStack
) -> None:
    worker, channel = child_of(supervisor, ProcessRole.WORKER, "worker-1")
    channels.callback(channel.close)
    process = supervisor._processes[worker]
    process.process.kill()
    process.process.wait()
    arrays = SharedArrays()
    arrays.zeros("activations", 16 << 20, np.uint8)[:] = 1
    process.process = subprocess.Popen(["sleep", "60"], pass_fds=[arrays.fd])
    assert process.own_memory_bytes() >= 16 << 20
