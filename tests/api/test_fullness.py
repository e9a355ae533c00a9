"""A queue that was full a moment ago is full: whoever comes now is told so at once, and the engine is not asked."""

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
        answers = [client.post(path, json=request(path, False)) for _ in range(200)]
        assert {(one.status_code, one.headers["retry-after"]) for one in answers} == {(429, "3")}
        assert len(instance.engine.submits) < 200
        instance.engine.refusal = None
        while client.post(path, json=request(path, False, max_tokens=2)).status_code != 200:
            pass
