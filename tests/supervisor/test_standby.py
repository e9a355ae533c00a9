"""A standby worker takes over when the worker dies, is never missed when it dies itself, and never keeps memory alive."""

import signal

import pytest

from onward.proto.control import ChildReady, ReplaceWorker, WorkerGone
from onward.supervisor.children import Child, ChildState, ProcessRole
from onward.supervisor.core import (
    ACTIVATION_TIMEOUT_S,
    STANDBY_DELAY_S,
    ActivateStandby,
    KillProcess,
    RemoveProcess,
)
from onward.supervisor.worker_deaths import KillReason
from tests.supervisor.instance_of_core import InstanceOfCore

ENGINE, WORKER, STANDBY = ProcessRole.ENGINE, ProcessRole.WORKER, ProcessRole.STANDBY


def instance_with_standby(**settings: float) -> InstanceOfCore:
    instance = InstanceOfCore(owns_kv_memory=True, has_standby=True, **settings)  # type: ignore[arg-type]
    instance.make_ready()
    instance.advance(STANDBY_DELAY_S)
    instance.receive(STANDBY, ChildReady())
    assert instance.starts == [STANDBY]
    instance.starts.clear()
    instance.take()
    return instance


def activated(instance: InstanceOfCore) -> list[Child]:
    return [action.child for action in instance.take() if isinstance(action, ActivateStandby)]


def test_a_standby_starts_when_the_instance_has_served_for_a_moment() -> None:
    instance = InstanceOfCore(owns_kv_memory=True, has_standby=True)
    instance.make_ready()
    assert instance.core.was_ready and not instance.core.children_of(STANDBY)
    instance.advance(STANDBY_DELAY_S)
    assert instance.starts == [STANDBY]


def test_the_first_reason_for_which_a_worker_is_killed_decides_about_its_memory() -> None:
    """A peer may still write the memory. That the worker is found stopped as well changes nothing."""
    instance = InstanceOfCore(owns_kv_memory=True)
    instance.make_ready()
    memory, worker = instance.core.kv_memory, instance.child(WORKER)
    instance.receive(ENGINE, ReplaceWorker(worker.incarnation, "blocks are quarantined for too long"))
    instance.replace_stopped(worker)
    instance.die(WORKER)
    assert instance.core.kv_memory != memory


def test_without_the_setting_there_is_none() -> None:
    instance = InstanceOfCore(owns_kv_memory=True)
    instance.make_ready()
    instance.advance(10 * STANDBY_DELAY_S)
    assert instance.starts == []


def test_the_standby_takes_over_from_a_killed_worker_and_another_one_starts() -> None:
    instance = instance_with_standby()
    standby = instance.child(STANDBY)
    dead = instance.die(WORKER)
    assert instance.starts == [], "no other process"
    assert (standby.role, standby.state) == (WORKER, ChildState.STARTING)
    assert instance.core.restarts[WORKER] == 1
    sent = instance.take()
    gone = next(
        i for i, a in enumerate(sent) if WorkerGone(dead.incarnation, "killed", True) == getattr(a, "message", 0)
    )
    assert gone < sent.index(ActivateStandby(standby)), "its engine has heard of the death before"
    instance.ready(ENGINE)
    assert standby.state is ChildState.READY
    instance.advance(STANDBY_DELAY_S)
    assert instance.starts == [STANDBY]


def test_the_standby_serves_the_next_engine() -> None:
    instance = instance_with_standby()
    standby, worker = instance.child(STANDBY), instance.child(WORKER)
    instance.die(ENGINE)
    assert instance.starts == [ENGINE]
    taken = instance.take()
    assert RemoveProcess(worker) in taken and ActivateStandby(standby) in taken


def test_a_second_death_while_the_next_standby_starts_is_followed_by_a_cold_start() -> None:
    instance = instance_with_standby()
    instance.die(WORKER)
    instance.ready(ENGINE)
    instance.advance(STANDBY_DELAY_S)
    assert instance.starts == [STANDBY]
    instance.die(WORKER)
    instance.advance(1.0)
    assert instance.starts == [STANDBY, WORKER]


@pytest.mark.parametrize("return_code", [-signal.SIGSEGV, 1])
def test_a_worker_that_may_have_damaged_the_memory_is_followed_by_a_cold_start_with_other_memory(
    return_code: int,
) -> None:
    instance = instance_with_standby()
    standby, memory = instance.child(STANDBY), instance.core.kv_memory
    instance.die(WORKER, return_code)
    taken = instance.take()
    assert RemoveProcess(standby) in taken, "it has the memory of the past"
    assert not [action for action in taken if isinstance(action, ActivateStandby)]
    assert instance.starts == [WORKER]
    assert instance.child(WORKER).kv_memory == instance.core.kv_memory != memory


def test_a_standby_that_is_killed_is_replaced_and_nobody_else_is_concerned() -> None:
    instance = instance_with_standby()
    instance.die(STANDBY)
    assert instance.take() == []
    instance.advance(STANDBY_DELAY_S)
    assert instance.starts == [STANDBY]


def test_a_standby_that_keeps_dying_is_started_less_and_less_often() -> None:
    instance = instance_with_standby()
    for _ in range(6):
        if instance.core.children_of(STANDBY):
            instance.die(STANDBY)
        instance.advance(STANDBY_DELAY_S)
    assert len(instance.starts) < 6
    assert instance.core.restarts[WORKER] == 0


@pytest.mark.parametrize("return_code", [pytest.param(-signal.SIGSEGV, id="signal"), pytest.param(1, id="exception")])
def test_a_standby_that_dies_of_a_fault_costs_the_memory_that_it_may_have_damaged(return_code: int) -> None:
    """On a CUDA device a stray write of a kernel ends as an exception."""
    instance = instance_with_standby()
    worker, memory = instance.child(WORKER), instance.core.kv_memory
    instance.die(STANDBY, return_code)
    [kill] = [action for action in instance.take() if isinstance(action, KillProcess)]
    assert kill.child is worker
    instance.die(WORKER)
    assert instance.core.kv_memory != memory


def test_a_standby_that_is_killed_for_its_silence_costs_the_memory() -> None:
    instance = instance_with_standby()
    memory = instance.core.kv_memory
    instance.child(STANDBY).kill_reason = KillReason.SILENCE
    instance.die(STANDBY)
    assert instance.core.kv_memory != memory


def test_a_standby_that_reports_a_failed_start_costs_nothing() -> None:
    """There may have been no memory for it."""
    instance = instance_with_standby()
    memory = instance.core.kv_memory
    instance.die(STANDBY, 0)
    assert instance.core.kv_memory == memory
    assert not [action for action in instance.take() if isinstance(action, KillProcess)]


def test_a_standby_that_is_activated_and_stays_silent_is_killed_soon() -> None:
    instance = instance_with_standby(stall_timeout_s=100.0)
    standby = instance.child(STANDBY)
    instance.advance(200.0)
    instance.take()
    instance.die(WORKER)
    assert activated(instance) == [standby]
    instance.advance(ACTIVATION_TIMEOUT_S / 2)
    assert not [action for action in instance.take() if isinstance(action, KillProcess)]
    for _ in range(30):
        instance.advance(4.0)  # it is not the supervisor that was suspended
    assert standby in [action.child for action in instance.take() if isinstance(action, KillProcess)]


def test_a_shutdown_begins_with_the_standby() -> None:
    instance = instance_with_standby()
    standby = instance.child(STANDBY)
    instance.stop()
    assert instance.take()[0] == RemoveProcess(standby)
    assert not instance.core.children_of(STANDBY)


def test_a_standby_that_keeps_crashing_is_given_up_and_does_not_take_the_worker_down_for_ever() -> None:
    instance = InstanceOfCore(owns_kv_memory=True, has_standby=True)
    instance.make_ready()
    num_crashes = 0
    for _ in range(600):
        instance.advance(0.5)
        if instance.core.children_of(STANDBY):
            num_crashes += 1
            instance.die(STANDBY, -signal.SIGABRT)
            instance.die(WORKER)
            instance.advance(3.0)
            instance.ready(ENGINE)
    assert num_crashes <= 5, "after five in a minute there is none any more"


def test_a_standby_that_crashes_while_there_is_no_worker_ends_the_memory_too() -> None:
    instance = instance_with_standby()
    memory = instance.core.kv_memory
    engine, worker = instance.child(ENGINE), instance.child(WORKER)
    instance.core.on_exit(engine, -signal.SIGKILL, "killed", instance.now_s)
    instance.core.on_removed(worker, -signal.SIGKILL)
    assert instance.core.kv_memory == memory
    instance.core.on_exit(instance.child(STANDBY), -signal.SIGSEGV, "crashed", instance.now_s)
    assert instance.core.kv_memory != memory


@pytest.mark.parametrize("role", [ProcessRole.API, ProcessRole.STREAM_STORE])
def test_deaths_of_other_processes_cost_neither_the_memory_nor_the_standby(role: ProcessRole) -> None:
    instance = instance_with_standby()
    memory, standby = instance.core.kv_memory, instance.child(STANDBY)
    for _ in range(4):
        instance.die(role)
        instance.advance(3.5)
    assert instance.core.kv_memory == memory
    assert instance.core.children_of(STANDBY) == [standby]


def test_a_standby_that_serves_a_new_engine_may_take_as_long_as_that_engine_s_start() -> None:
    instance = instance_with_standby(stall_timeout_s=100.0)
    standby = instance.child(STANDBY)
    instance.advance(200.0)
    instance.die(ENGINE)
    instance.take()
    for _ in range(6):
        instance.advance(4.0)
    assert standby not in [action.child for action in instance.take() if isinstance(action, KillProcess)]
