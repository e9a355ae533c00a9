"""The shelf is there before the api processes, and when it dies or falls silent they get another."""

import time
from contextlib import closing

from onward.config import ServeConfig
from onward.proto.control import ApiGone, ShelfGone, ShelfUp, Snapshot, StartApi
from onward.supervisor.children import Child, ChildState, Role
from onward.supervisor.supervisor import Supervisor
from tests.supervisor.stand_ins import child_of, supervisor_of

PATIENCE_S = 20.0


def wait_until_ready(supervisor: Supervisor) -> Child:
    """A real process of that role."""
    [shelf] = supervisor._of(Role.SHELF)
    deadline_s = time.monotonic() + PATIENCE_S
    while shelf.state is not ChildState.READY:
        assert time.monotonic() < deadline_s
        for key, _ in supervisor._selector.select(0.05):
            supervisor._read(key.data)
    return shelf


def test_a_shelf_that_dies_is_announced_and_replaced_by_another() -> None:
    with supervisor_of(ServeConfig()) as supervisor:
        supervisor._start_shelf()
        first = wait_until_ready(supervisor)
        api, apis_end = child_of(supervisor, Role.API, "api-1")
        with closing(apis_end):
            supervisor._brief_api(api)
            assert isinstance(apis_end.receive(), StartApi)
            told = apis_end.receive()
            assert isinstance(told, ShelfUp) and told.incarnation == first.incarnation
            supervisor._was_ready = True
            first.kill()
            now_s = supervisor._clock.now_s()
            supervisor._reap(now_s)
            assert apis_end.receive() == ShelfGone(first.incarnation)
            supervisor._restart_what_is_due(now_s)
            again = apis_end.receive()
            assert isinstance(again, ShelfUp) and again.incarnation != first.incarnation
            assert again.address != told.address, "nothing meant for the dead one can reach it"
            assert supervisor._view(1).restarts["shelf"] == 1
            wait_until_ready(supervisor)


def test_a_shelf_that_dies_often_does_not_keep_the_others_waiting() -> None:
    with supervisor_of(ServeConfig()) as supervisor:
        for number in range(6):
            shelf, shelfs_end = child_of(supervisor, Role.SHELF, f"shelf-{number}")
            shelfs_end.close()
            shelf.kill()
            supervisor._bury(shelf)
            supervisor._after_death(shelf, "killed", 1.0)
        supervisor._restart_at_s.clear()
        engine, engines_end = child_of(supervisor, Role.ENGINE, "engine-1")
        engines_end.close()
        engine.kill()
        supervisor._bury(engine)
        supervisor._after_death(engine, "killed", 1.0)
        assert supervisor._restart_at_s == {(Role.ENGINE, 0): 1.0}, "at once"


def test_a_silent_shelf_is_killed() -> None:
    with supervisor_of(ServeConfig(stall_timeout_s=5)) as supervisor:
        shelf, shelfs_end = child_of(supervisor, Role.SHELF, "shelf-1")
        with closing(shelfs_end):
            supervisor._on_message(shelf, Snapshot(1, []))
            supervisor._kill_the_stuck(supervisor._clock.now_s() + 4)
            assert shelf.process.poll() is None
            supervisor._kill_the_stuck(supervisor._clock.now_s() + 6)
            assert shelf.cause_of_death() == "signal 9 (SIGKILL)"


def test_the_shelf_learns_of_an_api_process_that_died() -> None:
    with supervisor_of(ServeConfig()) as supervisor:
        _, shelfs_end = child_of(supervisor, Role.SHELF, "shelf-1")
        api, apis_end = child_of(supervisor, Role.API, "api-1")
        with closing(shelfs_end):
            apis_end.close()
            api.kill()
            supervisor._bury(api)
            supervisor._after_death(api, "killed", 1.0)
            assert shelfs_end.receive() == ApiGone("api-1")
