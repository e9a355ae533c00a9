"""What an operator reads about an instance and one router."""

import logging

import pytest

from onward.api.router_standing import PATIENCE_S, RegistrationLog
from tests.api.test_load_shedder import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def standing(clock: ManualClock, caplog: pytest.LogCaptureFixture) -> RegistrationLog:
    caplog.set_level(logging.INFO, "onward.api.router_standing")
    return RegistrationLog("http://r:1", clock)


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage().split(" url=")[0]) for record in caplog.records]


NOT_TAKEN, TAKEN_AGAIN = ("WARNING", "router does not take us"), ("INFO", "registered")


def test_a_router_that_was_there_and_falls_silent_is_told_only_when_it_stays_so(
    standing: RegistrationLog, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    standing.accepted()
    clock.time_s += PATIENCE_S
    standing.unreachable("Connection refused")
    assert told(caplog) == [], "it may be stopping, and we are next"
    clock.time_s += 0.1
    standing.unreachable("Connection refused")
    standing.unreachable("Connection refused")
    assert told(caplog) == [NOT_TAKEN]
    standing.accepted()
    standing.accepted()
    assert told(caplog) == [NOT_TAKEN, TAKEN_AGAIN]


def test_a_router_that_never_answered_is_told_at_once(
    standing: RegistrationLog, caplog: pytest.LogCaptureFixture
) -> None:
    standing.unreachable("Name or service not known")
    assert told(caplog) == [NOT_TAKEN]
    assert "Name or service not known" in caplog.text


def test_a_router_that_says_no_is_told_at_once(standing: RegistrationLog, caplog: pytest.LogCaptureFixture) -> None:
    standing.accepted()
    standing.refused("another model")
    standing.refused("another model")
    assert told(caplog) == [NOT_TAKEN]
