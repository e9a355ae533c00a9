"""A process that makes no progress is killed, once, and its successor is judged by its own deeds."""

import socket
from contextlib import closing

from onward.config import ServeConfig
from onward.proto.control import ChildReady, MetricsSnapshot
from onward.proto.stats import EngineStats
from onward.supervisor.child_process import ChildState, ProcessRole
from tests.supervisor.stand_ins import child_of, supervisor_of
from tests.transport.test_zmq import HELLO


class HandClock:
    at_s = 1000.0

    def now_s(self) -> float:
        return self.at_s

    wall_s = now_s


def stats(stalled_s: float) -> MetricsSnapshot:
    return MetricsSnapshot(1, [], EngineStats(7, True, stalled_s, {}, {}, 1))


def test_a_worker_is_killed_for_its_own_silence_and_not_for_that_of_the_one_before() -> None:
    clock = HandClock()
    with supervisor_of(ServeConfig(stall_timeout_s=5), clock=clock) as supervisor:
        engine, engines_end = child_of(supervisor, ProcessRole.ENGINE, "engine-1")
        worker, workers_end = child_of(supervisor, ProcessRole.WORKER, "worker-2")
        with closing(engines_end), closing(workers_end):
            clock.at_s += 9
            now_s = clock.at_s
            supervisor._on_message(engine, stats(stalled_s=5.5))
            worker.started_at_s = now_s - 1
            supervisor._kill_unresponsive(now_s)
            assert worker.process.poll() is None, "so young that it cannot have been silent for so long"
            worker.started_at_s = now_s - 6
            supervisor._kill_unresponsive(now_s)
            assert worker.exit_cause() == "signal 9 (SIGKILL)"
            assert engine.process.poll() is None


def test_a_supervisor_that_was_stopped_for_a_while_kills_nobody_for_the_silence_meanwhile() -> None:
    """As by Ctrl-Z and fg, or where a whole container is paused."""
    clock = HandClock()
    with supervisor_of(ServeConfig(stall_timeout_s=60), clock=clock) as supervisor:
        supervisor._was_ready = True
        engine, engines_end = child_of(supervisor, ProcessRole.ENGINE, "engine-1")
        worker, workers_end = child_of(supervisor, ProcessRole.WORKER, "worker-1")
        wakeup, waker = socket.socketpair()
        supervisor._selector.register(wakeup, 1)

        def turn(seconds: float) -> None:
            clock.at_s += seconds
            waker.send(b"!")  # so that it does not wait
            supervisor._run_once(wakeup)

        with closing(engines_end), closing(workers_end), closing(wakeup), closing(waker):
            for _ in range(62):
                turn(1.0)
                supervisor._on_message(engine, stats(stalled_s=0.0))
            turn(500.0)
            supervisor._on_message(engine, stats(stalled_s=500.0))
            turn(1.0)
            assert (engine.process.poll(), worker.process.poll()) == (None, None)
            for _ in range(60):
                turn(1.0)
            assert engine.exit_cause() == "signal 9 (SIGKILL)", "who goes on to be silent is killed"
            supervisor._selector.unregister(wakeup)


def test_a_worker_that_never_comes_to_the_end_of_its_start_is_killed_and_the_next_one_has_more_time() -> None:
    """A device that hangs, or a disk: without a bound every stream would wait for ever."""
    clock = HandClock()
    with supervisor_of(ServeConfig(stall_timeout_s=60), clock=clock) as supervisor:
        engine, engines_end = child_of(supervisor, ProcessRole.ENGINE, "engine-1")
        first, first_end = child_of(supervisor, ProcessRole.WORKER, "worker-1")
        with closing(engines_end), closing(first_end):
            first.state, first.started_at_s = ChildState.STARTING, clock.at_s
            clock.at_s += 20
            supervisor._on_message(engine, ChildReady(HELLO))
            assert supervisor._was_ready
            supervisor._remove_child(first)
            first.kill()
            for allowed_s in (10 * 20, 2 * 10 * 20):
                worker, workers_end = child_of(supervisor, ProcessRole.WORKER, "worker-2")
                worker.state, worker.started_at_s = ChildState.STARTING, clock.at_s
                with closing(workers_end):
                    supervisor._snapshots.last_heard_at_s[engine] = clock.at_s + allowed_s
                    supervisor._kill_unresponsive(clock.at_s + allowed_s)
                    assert worker.process.poll() is None, "a start may take long"
                    clock.at_s += allowed_s + 1
                    supervisor._snapshots.last_heard_at_s[engine] = clock.at_s
                    supervisor._kill_unresponsive(clock.at_s)
                    assert worker.exit_cause() == "signal 9 (SIGKILL)"
                    supervisor._remove_child(worker)
