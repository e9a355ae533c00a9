"""The shelf is there before the api processes, and when it dies or falls silent they get another."""

import time
from contextlib import closing

from onward.config import ServeConfig
from onward.proto.control import ApiGone, MetricsSnapshot, StartApi, StreamStoreGone, StreamStoreUp
from onward.supervisor.child_process import ChildProcess, ChildState, ProcessRole
from onward.supervisor.supervisor import Supervisor
from tests.supervisor.stand_ins import child_of, supervisor_of

PATIENCE_S = 20.0


def wait_until_ready(supervisor: Supervisor) -> ChildProcess:
    """A real process of that role."""
    [shelf] = supervisor._children_of(ProcessRole.STREAM_STORE)
    deadline_s = time.monotonic() + PATIENCE_S
    while shelf.state is not ChildState.READY:
        assert time.monotonic() < deadline_s
        for key, _ in supervisor._selector.select(0.05):
            supervisor._read_messages(key.data)
    return shelf


def test_a_shelf_that_dies_is_announced_and_replaced_by_another() -> None:
    with supervisor_of(ServeConfig()) as supervisor:
        supervisor._start_stream_store()
        first = wait_until_ready(supervisor)
        api, apis_end = child_of(supervisor, ProcessRole.API, "api-1")
        with closing(apis_end):
            supervisor._send_start_api(api)
            assert isinstance(apis_end.receive(), StartApi)
            told = apis_end.receive()
            assert isinstance(told, StreamStoreUp) and told.incarnation == first.incarnation
            supervisor._was_ready = True
            first.kill()
            now_s = supervisor._clock.now_s()
            supervisor._reap(now_s)
            assert apis_end.receive() == StreamStoreGone(first.incarnation)
            supervisor._restart_due(now_s)
            again = apis_end.receive()
            assert isinstance(again, StreamStoreUp) and again.incarnation != first.incarnation
            assert again.address != told.address, "nothing meant for the dead one can reach it"
            assert supervisor._instance_view(1).restarts["stream_store"] == 1
            wait_until_ready(supervisor)


def test_a_shelf_that_dies_often_does_not_keep_the_others_waiting() -> None:
    with supervisor_of(ServeConfig()) as supervisor:
        for number in range(6):
            shelf, shelfs_end = child_of(supervisor, ProcessRole.STREAM_STORE, f"shelf-{number}")
            shelfs_end.close()
            shelf.kill()
            supervisor._remove_child(shelf)
            supervisor._on_exit(shelf, "killed", 1.0)
        supervisor._restart_at_s.clear()
        engine, engines_end = child_of(supervisor, ProcessRole.ENGINE, "engine-1")
        engines_end.close()
        engine.kill()
        supervisor._remove_child(engine)
        supervisor._on_exit(engine, "killed", 1.0)
        assert supervisor._restart_at_s == {(ProcessRole.ENGINE, 0): 1.0}, "at once"


def test_a_silent_shelf_is_killed() -> None:
    with supervisor_of(ServeConfig(stall_timeout_s=5)) as supervisor:
        shelf, shelfs_end = child_of(supervisor, ProcessRole.STREAM_STORE, "shelf-1")
        with closing(shelfs_end):
            supervisor._on_message(shelf, MetricsSnapshot(1, []))
            supervisor._kill_unresponsive(supervisor._clock.now_s() + 4)
            assert shelf.process.poll() is None
            supervisor._kill_unresponsive(supervisor._clock.now_s() + 6)
            assert shelf.exit_cause() == "signal 9 (SIGKILL)"


def test_the_shelf_learns_of_an_api_process_that_died() -> None:
    with supervisor_of(ServeConfig()) as supervisor:
        _, shelfs_end = child_of(supervisor, ProcessRole.STREAM_STORE, "shelf-1")
        api, apis_end = child_of(supervisor, ProcessRole.API, "api-1")
        with closing(shelfs_end):
            apis_end.close()
            api.kill()
            supervisor._remove_child(api)
            supervisor._on_exit(api, "killed", 1.0)
            assert shelfs_end.receive() == ApiGone("api-1")
