"""How children end that a supervisor stops: those that serve are asked, those that are still starting are not."""

import select
import signal
import socket
import threading
from contextlib import closing

from onward.config import ServeConfig
from onward.proto.control import StopChild
from onward.supervisor.child_process import ChildState, ProcessRole
from tests.supervisor.stand_ins import child_of, supervisor_of


def test_a_worker_that_is_still_loading_is_not_waited_for() -> None:
    with supervisor_of(ServeConfig()) as supervisor, closing(socket.socket()) as wakeup:
        worker, workers_end = child_of(supervisor, ProcessRole.WORKER, "worker-1")
        worker.state = ChildState.STARTING
        with closing(workers_end):
            supervisor._stop_role(ProcessRole.WORKER, 0.0, wakeup)
        assert not supervisor._children_of(ProcessRole.WORKER)
        assert worker.exit_cause() == "signal 9 (SIGKILL)"


def test_who_serves_is_asked_to_stop_and_told_how_long_it_may_take() -> None:
    with supervisor_of(ServeConfig()) as supervisor, closing(socket.socket()) as wakeup:
        api, apis_end = child_of(supervisor, ProcessRole.API, "api-1")
        with closing(apis_end):
            api.process.terminate()
            supervisor._stop_role(ProcessRole.API, 7.0, wakeup)
            assert apis_end.receive() == StopChild(7.0)


def test_a_second_signal_leaves_the_api_processes_no_grace() -> None:
    with supervisor_of(ServeConfig(drain_s=1000.0)) as supervisor, closing(socket.socket()) as wakeup:
        api, apis_end = child_of(supervisor, ProcessRole.API, "api-1")
        heard: list[object] = []

        def serve() -> None:
            for answer in (lambda: supervisor._on_signal(signal.SIGINT, None), api.process.terminate):
                select.select([apis_end], [], [], 30)
                heard.append(apis_end.receive())
                answer()

        with closing(apis_end):
            serving = threading.Thread(target=serve)
            serving.start()
            supervisor._stop_apis(wakeup)
            serving.join()
        assert heard == [StopChild(1000.0), StopChild(0.0)]
        assert not supervisor._children_of(ProcessRole.API)
