from contextlib import closing

from onward.config import ServeConfig
from onward.proto.control import MetricsSnapshot
from onward.proto.stats import EngineStats
from onward.supervisor.child_process import ProcessRole
from onward.supervisor.restart_policy import COOL_DOWN_S, MAX_DEATHS, RestartPolicy
from tests.supervisor.stand_ins import child_of, supervisor_of


def test_the_first_death_is_answered_at_once_and_later_ones_more_slowly() -> None:
    policy = RestartPolicy()
    delays = [policy.record_death(now_s=float(i), progress=0) for i in range(MAX_DEATHS - 1)]
    assert delays[0] == 0
    assert delays == sorted(delays)
    assert len(set(delays)) > 2


def test_five_deaths_in_a_minute_without_a_step_between_them_bring_a_cool_down() -> None:
    policy = RestartPolicy()
    delays = [policy.record_death(now_s=float(i), progress=0) for i in range(MAX_DEATHS)]
    assert delays[-1] == COOL_DOWN_S


def test_deaths_with_progress_between_them_are_bad_luck() -> None:
    policy = RestartPolicy()
    assert [policy.record_death(now_s=float(i), progress=i + 1) for i in range(20)] == [0.0] * 20


def test_deaths_that_are_long_past_do_not_count() -> None:
    policy = RestartPolicy()
    assert {policy.record_death(now_s=i * 61.0, progress=0) for i in range(20)} == {0.0}


def test_steps_that_are_heard_of_only_after_a_death_end_the_waiting() -> None:
    """An engine tells of them once a second, and its worker may have died in between."""

    def said(step: int) -> MetricsSnapshot:
        return MetricsSnapshot(1, [], EngineStats(step, False, 0.0, {}, {}, 1))

    with supervisor_of(ServeConfig()) as supervisor:
        engine, engines_end = child_of(supervisor, ProcessRole.ENGINE, "engine-1")
        with closing(engines_end):
            supervisor._on_message(engine, said(step=7))
            now_s = supervisor._clock.now_s()
            late = {
                (ProcessRole.WORKER, 0): now_s + 60,
                (ProcessRole.API, 1): now_s + 60,
                (ProcessRole.STREAM_STORE, 0): now_s + 60,
            }
            supervisor._restart_at_s = dict(late)
            supervisor._on_message(engine, said(step=7))
            assert supervisor._restart_at_s == late, "nothing was done since"
            supervisor._on_message(engine, said(step=8))
            due = {key for key, at_s in supervisor._restart_at_s.items() if at_s <= supervisor._clock.now_s()}
            assert due == {(ProcessRole.WORKER, 0), (ProcessRole.API, 1)}
