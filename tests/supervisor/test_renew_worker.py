"""The engine may ask for a new worker; what follows is the way of any dead worker."""

from contextlib import closing

from onward.config import ServeConfig
from onward.proto.control import ReplaceWorker
from onward.supervisor.child_process import ProcessRole
from tests.supervisor.stand_ins import child_of, supervisor_of


def test_a_worker_is_ended_at_its_engines_word_and_another_one_is_not() -> None:
    with supervisor_of(ServeConfig()) as supervisor:
        engine, engines_end = child_of(supervisor, ProcessRole.ENGINE, "engine-1")
        worker, workers_end = child_of(supervisor, ProcessRole.WORKER, "worker-2")
        with closing(engines_end), closing(workers_end):
            supervisor._on_message(engine, ReplaceWorker("worker-1", "said too late"))
            assert worker.process.poll() is None
            supervisor._on_message(engine, ReplaceWorker("worker-2", "too much is quarantined"))
            assert worker.exit_cause() == "signal 9 (SIGKILL)"
            assert engine.process.poll() is None
