"""The rules by which a new server takes over from an old one, seen from the supervisor core of each."""

import signal

import pytest

from onward.proto.control import EngineUp, StopChild
from onward.supervisor.children import ProcessRole
from onward.supervisor.core import ActivateStandby, Phase, RemoveProcess
from tests.supervisor.instance_of_core import InstanceOfCore

ORDER_OF_ENDS = (ProcessRole.API, ProcessRole.STREAM_STORE, ProcessRole.ENGINE, ProcessRole.WORKER)


def new_server(*, has_standby: bool = True) -> InstanceOfCore:
    """One that has started all it can while the old server serves."""
    instance = InstanceOfCore(owns_kv_memory=True, has_standby=has_standby, awaits_release=True)
    instance.start()
    for role in (ProcessRole.STREAM_STORE, ProcessRole.STANDBY, ProcessRole.API):
        assert not instance.core.is_prepared
        instance.ready(role)
    return instance


def old_server() -> InstanceOfCore:
    instance = InstanceOfCore(owns_kv_memory=True)
    instance.make_ready()
    return instance


def end_all(instance: InstanceOfCore, worker_return_code: int = 0) -> None:
    """Every process ends as it is told to."""
    for role in ORDER_OF_ENDS:
        code = worker_return_code if role is ProcessRole.WORKER else 0
        instance.die(role, code)


def test_only_a_standby_worker_maps_the_memory_of_an_old_server() -> None:
    instance = new_server()
    assert instance.core.is_prepared
    assert not instance.core.was_ready
    assert ProcessRole.WORKER not in instance.starts
    assert instance.starts.count(ProcessRole.STANDBY) == 1


@pytest.mark.parametrize("has_standby", [True, False])
def test_the_standby_serves_when_the_memory_is_released(has_standby: bool) -> None:
    instance = new_server(has_standby=has_standby)
    standby = instance.child(ProcessRole.STANDBY)
    instance.begin_serving(keeps_memory=True)
    assert [action for action in instance.take() if isinstance(action, ActivateStandby)] == [ActivateStandby(standby)]
    assert standby.role is ProcessRole.WORKER
    instance.ready(ProcessRole.ENGINE)
    assert instance.core.was_ready
    assert len(instance.take_messages(ProcessRole.API, EngineUp)) == 1


@pytest.mark.parametrize("has_standby", [True, False])
def test_without_the_memory_a_new_server_begins_with_a_worker_of_its_own(has_standby: bool) -> None:
    instance = new_server(has_standby=has_standby)
    standby, memory = instance.child(ProcessRole.STANDBY), instance.core.kv_memory
    instance.begin_serving(keeps_memory=False)
    assert [action.child for action in instance.take() if isinstance(action, RemoveProcess)] == [standby]
    assert instance.core.kv_memory != memory
    assert instance.child(ProcessRole.WORKER).kv_memory == instance.core.kv_memory
    instance.ready(ProcessRole.ENGINE)
    assert instance.core.was_ready


@pytest.mark.parametrize("role", [ProcessRole.ENGINE, ProcessRole.API, ProcessRole.STREAM_STORE])
def test_a_new_server_does_not_take_over_while_one_of_its_processes_restarts(role: ProcessRole) -> None:
    """It has adopted no memory, so all its processes run beside those of the old server."""
    instance = InstanceOfCore(owns_kv_memory=True)
    instance.make_ready()
    assert instance.core.is_prepared
    instance.die(role)
    assert not instance.core.is_prepared
    instance.ready(role)
    assert instance.core.is_prepared


def test_an_old_server_ends_its_streams_at_once_and_says_that_it_is_replaced() -> None:
    instance = old_server()
    instance.stop_for_successor()
    assert instance.take_messages(ProcessRole.API, StopChild) == [StopChild(0.0, is_replaced=True)]
    end_all(instance)
    assert instance.core.is_stopped


def test_an_old_server_that_was_told_to_stop_before_does_not_keep_the_new_one_waiting() -> None:
    """Its streams had their grace until then. It no longer accepts connections, and clients wait for the new server."""
    instance = old_server()
    memory = instance.core.kv_memory
    instance.stop()
    assert instance.take_messages(ProcessRole.API, StopChild) == [StopChild(30.0)]
    instance.stop_for_successor()
    assert instance.take_messages(ProcessRole.API, StopChild) == [StopChild(0.0, is_replaced=True)]
    end_all(instance)
    assert instance.core.is_stopped and instance.core.is_replaced
    assert instance.core.kv_memory == memory


def test_an_old_server_that_completes_handoffs_does_not_keep_the_new_one_waiting() -> None:
    """It was told to stop before, and its api processes have ended, so no server answers clients until the handover."""
    instance = InstanceOfCore(owns_kv_memory=True, serves_handoffs=True)
    instance.make_ready()
    instance.stop()
    for role in (ProcessRole.API, ProcessRole.STREAM_STORE):
        instance.die(role, 0)
    assert instance.core.phase is Phase.COMPLETING_HANDOFFS
    instance.stop_for_successor()
    assert instance.core.phase is Phase.STOPPING_ENGINE
    assert instance.take_messages(ProcessRole.ENGINE, StopChild) == [StopChild(0.0, is_replaced=True)]


def test_a_worker_that_dies_of_a_fault_while_it_is_told_to_stop_costs_the_memory() -> None:
    for code, is_kept in ((0, True), (-signal.SIGSEGV, False), (1, False)):
        instance = old_server()
        memory = instance.core.kv_memory
        instance.stop_for_successor()
        end_all(instance, code)
        assert (instance.core.kv_memory == memory) == is_kept


def test_memory_that_a_peer_may_still_write_is_not_handed_over() -> None:
    """The worker ends as it is told to; a prefill instance still has its memory mapped."""
    instance = old_server()
    memory = instance.core.kv_memory
    instance.stop_for_successor()
    for role in ORDER_OF_ENDS:
        instance.die(role, 0, peer_may_write=role is ProcessRole.WORKER)
    assert instance.core.kv_memory != memory


@pytest.mark.parametrize("keeps_memory", [True, False])
def test_an_old_server_starts_again_when_the_new_one_has_failed(keeps_memory: bool) -> None:
    """Its memory is kept only if the new server never got it."""
    instance = old_server()
    memory = instance.core.kv_memory
    instance.stop_for_successor()
    end_all(instance)
    instance.take()
    instance.start_again(keeps_memory=keeps_memory)
    assert (instance.core.kv_memory == memory) == keeps_memory
    for role in (ProcessRole.ENGINE, ProcessRole.STREAM_STORE, ProcessRole.API):
        instance.ready(role)
    assert instance.core.phase is Phase.RUNNING
    assert len(instance.take_messages(ProcessRole.API, EngineUp)) == 1
    assert not instance.core.is_replaced


def test_an_old_server_that_starts_again_can_be_stopped_and_has_its_grace() -> None:
    instance = old_server()
    instance.stop_for_successor()
    end_all(instance)
    instance.start_again(keeps_memory=True)
    for role in (ProcessRole.ENGINE, ProcessRole.STREAM_STORE, ProcessRole.API):
        instance.ready(role)
    instance.take()
    instance.stop()
    assert instance.take_messages(ProcessRole.API, StopChild) == [StopChild(30.0)]


def test_memory_that_a_new_servers_worker_may_have_damaged_is_given_up() -> None:
    instance = old_server()
    memory, worker = instance.core.kv_memory, instance.child(ProcessRole.WORKER)
    actions = instance.core.give_up_memory("the standby worker of a new server died")
    assert [getattr(action, "child", None) for action in actions] == [worker]
    assert instance.core.kv_memory != memory
