"""A worker that makes no progress is killed, once, and its successor is judged by its own deeds."""

from contextlib import closing

from onward.config import ServeConfig
from onward.proto.control import Snapshot
from onward.proto.stats import EngineStats
from onward.supervisor.children import Role
from tests.supervisor.stand_ins import child_of, supervisor_of


def stats(stalled_s: float) -> Snapshot:
    return Snapshot(1, [], EngineStats(7, True, stalled_s, {}, {}, 1))


def test_a_worker_is_killed_for_its_own_silence_and_not_for_that_of_the_one_before() -> None:
    with supervisor_of(ServeConfig(stall_timeout_s=5)) as supervisor:
        engine, engines_end = child_of(supervisor, Role.ENGINE, "engine-1")
        worker, workers_end = child_of(supervisor, Role.WORKER, "worker-2")
        with closing(engines_end), closing(workers_end):
            now_s = supervisor._clock.now_s()
            supervisor._on_message(engine, stats(stalled_s=5.5))
            worker.started_s = now_s - 1
            supervisor._kill_the_stuck(now_s)
            assert worker.process.poll() is None, "so young that it cannot have been silent for so long"
            worker.started_s = now_s - 6
            supervisor._kill_the_stuck(now_s)
            assert worker.cause_of_death() == "signal 9 (SIGKILL)"
            assert engine.process.poll() is None
