"""A queue that was full a moment ago is full: a request that comes now is refused at once, without asking the engine."""

import re

import httpx
import msgspec

from onward.api.engine_link.engine_client import LoadShedder
from onward.clock import Clock
from onward.obs.metrics import Registry
from onward.proto.engine import ErrorInfo
from onward.proto.router import ATTEMPT_PATH, Attempt
from onward.web.error_format import RequestFailed
from tests.api.instance import Instance
from tests.api.reader import NO_CERTIFICATES, PATHS, request
from tests.api.routed import MSGPACK_BODY, attempt_of

FULL = ErrorInfo("overloaded", "9 requests are waiting already", 429, True, retry_after_s=3.0)
OWN_LIMIT = ErrorInfo("rate_limited", "3 requests of this caller are in flight already", 429, True, retry_after_s=1.0)


class ManualClock(Clock):
    def __init__(self) -> None:
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s

    def wall_s(self) -> float:
        return self.time_s


def told(fullness: LoadShedder) -> ErrorInfo | None:
    try:
        fullness.check()
    except RequestFailed as failure:
        return failure.info
    return None


def test_a_refusal_holds_for_a_moment_and_no_longer() -> None:
    clock = ManualClock()
    fullness = LoadShedder(clock, Registry(), hold_s=0.5)
    assert told(fullness) is None
    fullness.record_refusal(FULL)
    assert told(fullness) == FULL
    clock.time_s += 0.5
    assert told(fullness) is None


def test_what_is_one_caller_s_limit_is_nobody_else_s() -> None:
    fullness = LoadShedder(ManualClock(), Registry(), hold_s=0.5)
    fullness.record_refusal(OWN_LIMIT)
    assert told(fullness) is None


def test_a_flood_reaches_the_engine_as_a_trickle_and_all_are_told_the_same(instance: Instance) -> None:
    instance.engine.refusal = FULL
    path = PATHS[0]
    with httpx.Client(base_url=instance.url, verify=NO_CERTIFICATES, timeout=30) as client:
        before = early_refusals(client)
        answers = [client.post(path, json=request(path, False)) for _ in range(200)]
        assert {(one.status_code, one.headers["retry-after"]) for one in answers} == {(429, "3")}
        assert early_refusals(client) > before


def test_a_routers_new_attempts_hear_of_a_full_queue_and_those_that_were_taken_before_do_not(
    instance: Instance,
) -> None:
    instance.engine.refusal = FULL
    path = PATHS[0]
    body = request(path, False)
    with httpx.Client(base_url=instance.url, verify=NO_CERTIFICATES, timeout=30) as client:
        before, asked_before = early_refusals(client), len(instance.engine.submits)
        answers = [post_attempt(client, attempt_of(path, body)) for _ in range(200)]
        assert {(one.status_code, one.headers["retry-after"]) for one in answers} == {(429, "3")}
        num_early, num_asked = early_refusals(client) - before, len(instance.engine.submits) - asked_before
        assert num_early + num_asked == 200 and num_early > 0
        num_asked = len(instance.engine.submits)
        assert post_attempt(client, attempt_of(path, body, was_accepted=True)).status_code == 429
        assert len(instance.engine.submits) == num_asked + 1, "the engine itself has said so"


def test_embeddings_note_a_full_queue_and_are_told_of_it(instance: Instance) -> None:
    instance.engine.refusal = FULL
    body = {"model": "small-model", "input": "x"}
    with httpx.Client(base_url=instance.url, verify=NO_CERTIFICATES, timeout=30) as client:
        before, asked_before = early_refusals(client), len(instance.engine.submits)
        answers = [client.post("/v1/embeddings", json=body) for _ in range(200)]
        assert {(one.status_code, one.headers["retry-after"]) for one in answers} == {(429, "3")}
        num_asked = len(instance.engine.submits) - asked_before
        assert early_refusals(client) - before == 200 - num_asked > 0


def post_attempt(client: httpx.Client, attempt: Attempt) -> httpx.Response:
    return client.post(ATTEMPT_PATH, content=msgspec.msgpack.encode(attempt), headers=MSGPACK_BODY)


def early_refusals(client: httpx.Client) -> float:
    """As the api process itself counts them."""
    found = re.search(r"^onward_early_refusals_total(?:{.*})? (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0
