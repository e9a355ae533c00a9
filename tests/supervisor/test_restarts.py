import logging
from contextlib import closing

import pytest

from onward.config import ServeConfig
from onward.proto.control import IsolatedRequestRunning
from onward.proto.engine import CRASHES_TO_ISOLATE
from onward.supervisor.children import ProcessRole
from onward.supervisor.restart_policy import COOL_DOWN_S, MAX_DEATHS, RestartPolicy
from tests.supervisor.stand_ins import child_of, kill_and_reap, supervisor_of

SHARED: list[str | None] = [None] * CRASHES_TO_ISOLATE
"""Deaths without a known cause. The requests that were part of all of them run alone from then on."""


def restart_delays(isolated_request_ids: list[str | None]) -> list[float]:
    """The delays after deaths that are a second apart: for each, the request that ran alone, or None."""
    policy = RestartPolicy()
    return [policy.record_death(float(i), 0, request_id) for i, request_id in enumerate(isolated_request_ids)]


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


def test_the_deaths_that_one_isolated_request_explains_count_as_one() -> None:
    """Two requests that kill every engine, and one that kills every worker, are found without a cool-down."""
    delays = restart_delays([*SHARED, "a-0", "a-0", *SHARED, "b-0", "b-0", *SHARED, "c-0"])
    assert COOL_DOWN_S not in delays
    assert delays[2] == 0.0, "the cause of the first three deaths is known"


def test_five_isolated_requests_that_die_one_after_the_other_bring_a_cool_down() -> None:
    """Then it is the instance that is broken, and not the requests."""
    delays = restart_delays([*SHARED, *(f"{i}-0" for i in range(MAX_DEATHS))])
    assert delays.index(COOL_DOWN_S) == len(delays) - 1


def test_an_isolated_request_explains_no_deaths_a_second_time() -> None:
    delays = restart_delays([*SHARED, "a-0", *SHARED, "a-0", *SHARED])
    assert delays.index(COOL_DOWN_S) == len(delays) - 1


def test_an_isolated_request_explains_only_the_deaths_that_made_it_a_suspect() -> None:
    delays = restart_delays([None, None, *SHARED, "a-0", None, None])
    assert delays.index(COOL_DOWN_S) == len(delays) - 1


def test_the_engine_s_announcement_is_read_before_the_death_of_its_worker_is_judged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with supervisor_of(ServeConfig()) as supervisor:
        supervisor._core.was_ready = supervisor._has_announced_readiness = True
        _, engines_end = child_of(supervisor, ProcessRole.ENGINE, "engine-1")
        with closing(engines_end), caplog.at_level(logging.WARNING):
            for number in range(CRASHES_TO_ISOLATE + 1):
                if number == CRASHES_TO_ISOLATE:
                    engines_end.send(IsolatedRequestRunning("a-0"))
                worker, workers_end = child_of(supervisor, ProcessRole.WORKER, f"worker-{number}")
                with closing(workers_end):
                    kill_and_reap(supervisor, worker)
    delays = [line for line in caplog.messages if line.startswith("restart delayed")]
    assert len(delays) == 1, "after the second death; the request explains all three"
