"""A queue that was full a moment ago is full: whoever comes now is told so at once, and the engine is not asked."""

import re

import httpx

from onward.api.fullness import Fullness
from onward.clock import Clock
from onward.obs.metrics import Registry
from onward.proto.request import ErrorInfo
from onward.web.failures import RequestFailed
from tests.api.instance import Instance
from tests.api.reader import NO_CERTIFICATES, PATHS, request

FULL = ErrorInfo("overloaded", "9 requests are waiting already", 429, True, retry_after_s=3.0)
OWN_LIMIT = ErrorInfo("rate_limited", "3 requests of this caller are in flight already", 429, True, retry_after_s=1.0)


class ManualClock(Clock):
    def __init__(self) -> None:
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s

    def wall_s(self) -> float:
        return self.time_s


def told(fullness: Fullness) -> ErrorInfo | None:
    try:
        fullness.check()
    except RequestFailed as failure:
        return failure.info
    return None


def test_a_refusal_holds_for_a_moment_and_no_longer() -> None:
    clock = ManualClock()
    fullness = Fullness(clock, Registry(), hold_s=0.5)
    assert told(fullness) is None
    fullness.note(FULL)
    assert told(fullness) == FULL
    clock.time_s += 0.5
    assert told(fullness) is None


def test_what_is_one_caller_s_limit_is_nobody_else_s() -> None:
    fullness = Fullness(ManualClock(), Registry(), hold_s=0.5)
    fullness.note(OWN_LIMIT)
    assert told(fullness) is None


def test_a_flood_reaches_the_engine_as_a_trickle_and_all_are_told_the_same(instance: Instance) -> None:
    instance.engine.refusal = FULL
    path = PATHS[0]
    with httpx.Client(base_url=instance.url, verify=NO_CERTIFICATES, timeout=30) as client:
        before = early_refusals(client)
        answers = [client.post(path, json=request(path, False)) for _ in range(200)]
        assert {(one.status_code, one.headers["retry-after"]) for one in answers} == {(429, "3")}
        assert early_refusals(client) > before


def early_refusals(client: httpx.Client) -> float:
    """As the api process itself counts them."""
    found = re.search(r"^onward_early_refusals_total(?:{.*})? (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0
