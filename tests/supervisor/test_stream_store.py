"""A real stream store process: when it dies, the api processes learn of it and of the next one."""

import time
from contextlib import closing

from onward.config import ServeConfig
from onward.proto.control import StreamStoreGone, StreamStoreUp
from onward.supervisor.children import Child, ChildState, ProcessRole
from onward.supervisor.core import StartProcess
from onward.supervisor.supervisor import Supervisor
from tests.supervisor.stand_ins import child_of, kill_and_reap, supervisor_of

PATIENCE_S = 20.0


def wait_until_ready(supervisor: Supervisor) -> Child:
    [store] = supervisor._core.children_of(ProcessRole.STREAM_STORE)
    deadline_s = time.monotonic() + PATIENCE_S
    while store.state is not ChildState.READY:
        assert time.monotonic() < deadline_s
        for key, _ in supervisor._selector.select(0.05):
            supervisor._read_messages(key.data)
    return store


def test_a_stream_store_that_dies_is_announced_and_replaced_by_another() -> None:
    with supervisor_of(ServeConfig()) as supervisor:
        _, apis_end = child_of(supervisor, ProcessRole.API, "api-1")
        with closing(apis_end):
            supervisor._execute([StartProcess(ProcessRole.STREAM_STORE, 0)])
            first = wait_until_ready(supervisor)
            up = apis_end.receive()
            assert isinstance(up, StreamStoreUp) and up.incarnation == first.incarnation
            supervisor._core.was_ready = supervisor._has_announced_readiness = True
            kill_and_reap(supervisor, first)
            assert apis_end.receive() == StreamStoreGone(first.incarnation)
            supervisor._execute(supervisor._core._restart_due(supervisor._clock.now_s()))
            again = apis_end.receive()
            assert isinstance(again, StreamStoreUp) and again.incarnation != first.incarnation
            assert again.address != up.address, "nothing meant for the dead one can reach it"
            assert supervisor._instance_view(1).restarts["stream_store"] == 1
            wait_until_ready(supervisor)
