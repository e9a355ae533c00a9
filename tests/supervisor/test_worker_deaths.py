"""Which death of a worker ends its KV memory: the table, how deaths are recognised, and what the supervisor does."""

import signal
from collections.abc import Callable

import pytest

from onward.proto.control import MetricsSnapshot, ReplaceWorker, WorkerGone
from onward.proto.demo import RequestKill
from onward.proto.stats import EngineStats
from onward.supervisor import worker_deaths
from onward.supervisor.children import Child, ProcessRole
from onward.supervisor.core import RemoveProcess
from onward.supervisor.worker_deaths import KillReason, WorkerDeath, classify_death, keeps_memory
from tests.supervisor.instance_of_core import InstanceOfCore

KILLED = -signal.SIGKILL
FIRST_MEMORY = "memory-1"


def make_instance(*, owns_kv_memory: bool = True) -> InstanceOfCore:
    instance = InstanceOfCore(owns_kv_memory=owns_kv_memory, allows_kills=True)
    instance.make_ready()
    return instance


def kill_worker(instance: InstanceOfCore) -> None:
    instance.die(ProcessRole.WORKER, KILLED)


def kill_for_demo(instance: InstanceOfCore) -> None:
    instance.receive(ProcessRole.API, RequestKill("worker"))
    assert [child.role for child in instance.take_killed()] == [ProcessRole.WORKER]
    instance.die(ProcessRole.WORKER, KILLED)


def kill_engine(instance: InstanceOfCore) -> None:
    remove_worker_of_dead_engine(instance, KILLED)


def remove_worker_of_dead_engine(instance: InstanceOfCore, worker_return_code: int) -> None:
    """The engine dies, and the supervisor ends its worker, or finds it dead already."""
    worker = instance.child(ProcessRole.WORKER)
    actions = instance.core.on_exit(instance.child(ProcessRole.ENGINE), KILLED, "killed", instance.now_s)
    assert RemoveProcess(worker) in actions
    instance.core.on_removed(worker, worker_return_code)


def be_silent(instance: InstanceOfCore) -> None:
    """The worker has served, and completes no step any more."""
    stalled = EngineStats(7, True, 500.0, {}, {}, 1)
    killed: list[Child] = []
    while not killed:
        instance.advance(1.0)
        killed = instance.take_killed()
        for role in (ProcessRole.API, ProcessRole.STREAM_STORE):
            instance.receive(role, MetricsSnapshot(1, []))
        instance.receive(ProcessRole.ENGINE, MetricsSnapshot(1, [], stalled))
    assert killed == [instance.child(ProcessRole.WORKER)]
    instance.die(ProcessRole.WORKER, KILLED)


def stop_by_signal(instance: InstanceOfCore) -> None:
    worker = instance.child(ProcessRole.WORKER)
    instance.replace_stopped(worker)
    assert instance.take_killed() == [worker]
    instance.die(ProcessRole.WORKER, KILLED)


def replace_worker(instance: InstanceOfCore) -> None:
    instance.receive(ProcessRole.ENGINE, ReplaceWorker(instance.child(ProcessRole.WORKER).incarnation, "quarantine"))
    assert [child.role for child in instance.take_killed()] == [ProcessRole.WORKER]
    instance.die(ProcessRole.WORKER, KILLED)


def crash(instance: InstanceOfCore) -> None:
    instance.die(ProcessRole.WORKER, -signal.SIGSEGV)


def exit_by_itself(instance: InstanceOfCore) -> None:
    instance.die(ProcessRole.WORKER, 1)


def kill_worker_with_a_late_peer(instance: InstanceOfCore) -> None:
    instance.die(ProcessRole.WORKER, KILLED, peer_may_write=True)


CASES: dict[WorkerDeath, tuple[Callable[[InstanceOfCore], None], bool]] = {
    WorkerDeath.KILLED_FROM_OUTSIDE: (kill_worker, True),
    WorkerDeath.KILLED_FOR_DEMO: (kill_for_demo, True),
    WorkerDeath.ENGINE_DIED: (kill_engine, True),
    WorkerDeath.STOPPED: (stop_by_signal, True),
    WorkerDeath.SILENT: (be_silent, False),
    WorkerDeath.REPLACED: (replace_worker, False),
    WorkerDeath.CRASHED: (crash, False),
    WorkerDeath.EXITED: (exit_by_itself, False),
    WorkerDeath.PEER_MAY_WRITE: (kill_worker_with_a_late_peer, False),
}
"""How each death comes about, and whether its memory is kept."""


@pytest.mark.parametrize("death", WorkerDeath, ids=lambda death: death.name.lower())
def test_the_next_worker_gets_the_memory_if_this_death_keeps_it(death: WorkerDeath) -> None:
    cause, is_kept = CASES[death]
    instance = make_instance()
    assert instance.core.kv_memory == FIRST_MEMORY
    cause(instance)
    assert (instance.core.kv_memory == FIRST_MEMORY) is is_kept
    assert keeps_memory(death) is is_kept


@pytest.mark.parametrize(
    "death", [d for d in WorkerDeath if d is not WorkerDeath.ENGINE_DIED], ids=lambda d: d.name.lower()
)
def test_the_engine_is_told_whether_the_memory_is_kept(death: WorkerDeath) -> None:
    cause, is_kept = CASES[death]
    instance = make_instance()
    instance.take()
    cause(instance)
    [*_, message] = instance.take_messages(ProcessRole.ENGINE, WorkerGone)
    assert message.keeps_memory is is_kept


@pytest.mark.parametrize("death", WorkerDeath, ids=lambda death: death.name.lower())
def test_no_death_keeps_memory_that_the_supervisor_does_not_own(death: WorkerDeath) -> None:
    cause, _ = CASES[death]
    instance = make_instance(owns_kv_memory=False)
    assert instance.core.kv_memory == ""
    cause(instance)
    assert instance.core.kv_memory == ""
    assert not any(message.keeps_memory for message in instance.take_messages(ProcessRole.ENGINE, WorkerGone))


# How a death is recognised.


@pytest.mark.parametrize(
    ("return_code", "kill_reason", "has_engine", "death"),
    [
        (KILLED, None, True, WorkerDeath.KILLED_FROM_OUTSIDE),
        (KILLED, None, False, WorkerDeath.ENGINE_DIED),
        (KILLED, KillReason.STOPPED, True, WorkerDeath.STOPPED),
        (KILLED, KillReason.SILENCE, True, WorkerDeath.SILENT),
        (KILLED, KillReason.SILENCE, False, WorkerDeath.SILENT),
        (KILLED, KillReason.REPLACEMENT, True, WorkerDeath.REPLACED),
        (KILLED, KillReason.REPLACEMENT, False, WorkerDeath.REPLACED),
        (KILLED, KillReason.DEMO, True, WorkerDeath.KILLED_FOR_DEMO),
        (KILLED, KillReason.SHUTDOWN, True, WorkerDeath.EXITED),
        *[
            (-number, reason, has_engine, WorkerDeath.CRASHED)
            for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGTERM)
            for reason in (None, KillReason.DEMO)
            for has_engine in (True, False)
        ],
        (1, None, True, WorkerDeath.EXITED),
        (0, None, True, WorkerDeath.EXITED),
        (1, None, False, WorkerDeath.EXITED),
        (1, KillReason.DEMO, True, WorkerDeath.EXITED),
    ],
)
def test_the_reason_of_a_kill_decides_and_after_it_the_signal(
    return_code: int, kill_reason: KillReason | None, has_engine: bool, death: WorkerDeath
) -> None:
    assert classify_death(return_code, kill_reason, has_engine=has_engine) is death


@pytest.mark.parametrize("return_code", [KILLED, -signal.SIGSEGV, 1])
@pytest.mark.parametrize("has_engine", [True, False])
def test_a_peer_that_may_still_write_decides_before_all_else(return_code: int, has_engine: bool) -> None:
    death = classify_death(return_code, None, has_engine=has_engine, peer_may_write=True)
    assert death is WorkerDeath.PEER_MAY_WRITE


def test_every_death_has_a_row_in_the_table() -> None:
    assert worker_deaths._KEEPS_MEMORY.keys() == set(WorkerDeath)


@pytest.mark.parametrize("reason", KillReason)
def test_every_reason_to_kill_a_worker_is_in_the_table(reason: KillReason) -> None:
    assert classify_death(KILLED, reason, has_engine=True) in worker_deaths._KEEPS_MEMORY


# With its engine.


@pytest.mark.parametrize("return_code", [-signal.SIGSEGV, -signal.SIGABRT, 1])
def test_memory_ends_if_the_worker_of_a_dead_engine_had_died_of_a_fault_before(return_code: int) -> None:
    instance = make_instance()
    remove_worker_of_dead_engine(instance, return_code)
    assert instance.core.kv_memory != FIRST_MEMORY


def test_memory_ends_if_the_worker_of_a_dead_engine_was_to_be_killed_for_its_silence() -> None:
    instance = make_instance()
    instance.child(ProcessRole.WORKER).kill_reason = KillReason.SILENCE
    kill_engine(instance)
    assert instance.core.kv_memory != FIRST_MEMORY


def test_memory_ends_if_a_peer_may_still_write_that_of_the_worker_of_a_dead_engine() -> None:
    instance = make_instance()
    worker = instance.child(ProcessRole.WORKER)
    instance.core.on_exit(instance.child(ProcessRole.ENGINE), KILLED, "killed", instance.now_s)
    instance.core.on_removed(worker, KILLED, peer_may_write=True)
    assert instance.core.kv_memory != FIRST_MEMORY


def test_memory_that_a_crash_has_ended_stays_ended_when_the_engine_is_killed_next() -> None:
    instance = make_instance()
    crash(instance)
    memory = instance.core.kv_memory
    kill_engine(instance)
    assert instance.core.kv_memory == memory != FIRST_MEMORY


def test_memory_ends_if_an_engine_fails_while_it_starts() -> None:
    """What it was to adopt may be the cause; else no engine would ever start."""
    instance = make_instance()
    kill_engine(instance)
    assert instance.core.kv_memory == FIRST_MEMORY
    instance.advance(0.0)
    instance.die(ProcessRole.ENGINE, 1)  # the new one, before it was ready
    assert instance.core.kv_memory != FIRST_MEMORY


def test_an_engine_that_was_ready_keeps_the_memory_of_each_of_its_workers() -> None:
    instance = make_instance()
    for _ in range(3):
        kill_engine(instance)
        instance.advance(60.0)
        instance.ready(ProcessRole.ENGINE)
        assert instance.core.kv_memory == FIRST_MEMORY


def test_each_memory_has_a_name_of_its_own() -> None:
    instance = make_instance()
    names = [instance.core.kv_memory]
    for _ in range(3):
        crash(instance)
        names.append(instance.core.kv_memory)
        instance.advance(120.0)
        instance.ready(ProcessRole.ENGINE)
    assert len(set(names)) == 4


# When memory that is kept may itself be the cause.


def test_memory_is_kept_when_two_workers_are_killed_one_after_the_other() -> None:
    """As by `pkill -9`, which finds the standby too."""
    instance = make_instance()
    kill_worker(instance)
    kill_worker(instance)
    assert instance.core.kv_memory == FIRST_MEMORY


def test_memory_ends_with_the_third_death_without_a_completed_step() -> None:
    instance = make_instance()
    for _ in range(2):
        kill_worker(instance)
        instance.advance(0.5)
        instance.ready(ProcessRole.ENGINE)
        assert instance.core.kv_memory == FIRST_MEMORY
    instance.take()
    kill_worker(instance)
    assert instance.core.kv_memory != FIRST_MEMORY
    assert [gone.keeps_memory for gone in instance.take_messages(ProcessRole.ENGINE, WorkerGone)] == [False]
