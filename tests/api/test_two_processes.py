"""An instance with two api processes: a client that resumes or aborts a stream, and a router that looks for
one, may reach either of them, and cannot tell which."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest

from onward.api.lifecycle.stream_store_client import REPLY_TIMEOUT_S
from onward.proto.cursor import ChoiceCursor, Cursor, format_cursor, parse_cursor
from onward.proto.model import PreparedModel
from onward.proto.router import ATTEMPT_PATH
from tests.api.instance import Instance, running
from tests.api.reader import NO_CERTIFICATES, AnswerRead, ask, read, request
from tests.api.routed import MSGPACK_BODY, REQUEST_ID, attempt_of, error_in, find, hear, post
from tests.api.stand_in_engine import hashed_token
from tests.api.test_detached import go_on, is_all, pausing

PATH = "/v1/completions"
BODY = request(PATH, True, max_tokens=40, seed=7)
MAX_LOOKS = 1000


@pytest.fixture(scope="module")
def shared_pair(model: PreparedModel) -> Iterator[Instance]:
    with running(model, num_api=2, has_own_ports=True) as instance:
        yield instance


@pytest.fixture
def pair(shared_pair: Instance) -> Iterator[Instance]:
    yield shared_pair
    shared_pair.engine.choose, shared_pair.engine.paused = hashed_token, False


def both_ways(pair: Instance) -> list[tuple[str, str]]:
    first, second = (child.url for child in pair.children)
    return [(first, second), (second, first)]


def at(whole: AnswerRead, position: int) -> Cursor:
    assert whole.cursor is not None
    return msgspec.structs.replace(
        whole.cursor, attempt_epoch=1, choices=[ChoiceCursor(position)], new_tokens={}, usage_sent=False
    )


def test_a_stream_that_ended_in_one_process_is_gone_on_with_in_the_other(pair: Instance) -> None:
    for here, there in both_ways(pair):
        for again in (None, BODY):
            whole = ask(here, PATH, BODY)
            rest = read(go_on(there, PATH, at(whole, 5), again), BODY)
            assert rest.choices[0].token_ids == whole.choices[0].token_ids[5:]
            assert pair.engine.submits[-1].generated_token_ids == whole.choices[0].token_ids[:5]


def test_a_stream_that_lost_its_client_in_one_process_is_found_and_gone_on_with_in_the_other(pair: Instance) -> None:
    whole = ask(pair.url, PATH, BODY)
    for here, there in both_ways(pair):
        pair.engine.choose = pausing(pair, at=9)
        cursor = leave_at_the_pause(pair, here)
        pair.wait_until(lambda: not pair.engine.running)
        record = find(there, cursor.request_id)
        assert record is not None
        assert record.attempt.choices[0].token_ids == whole.choices[0].token_ids[: cursor.choices[0].position]
        pair.engine.choose, pair.engine.paused = hashed_token, False
        rest = read(go_on(there, PATH, cursor), BODY)
        told = whole.choices[0].token_ids[: cursor.choices[0].position]
        assert told + rest.choices[0].token_ids == whole.choices[0].token_ids


def leave_at_the_pause(pair: Instance, url: str) -> Cursor:
    with httpx.stream("POST", url + PATH, json=BODY, timeout=30, verify=NO_CERTIFICATES) as response:
        for line in response.iter_lines():
            if line.startswith("id: ") and is_all(pair, parse_cursor(line.removeprefix("id: "))):
                return parse_cursor(line.removeprefix("id: "))
    raise AssertionError("the stream ended before the engine paused")


def test_a_stream_that_still_runs_in_the_other_process_is_handed_over(pair: Instance) -> None:
    whole = ask(pair.url, PATH, BODY)
    for here, there in both_ways(pair):
        pair.engine.choose = pausing(pair, at=9)
        with httpx.stream("POST", here + PATH, json=BODY, timeout=30, verify=NO_CERTIFICATES) as response:
            lines = response.iter_lines()
            cursor = parse_cursor(next(line for line in lines if line.startswith("id: ")).removeprefix("id: "))
            pair.wait_until(lambda: pair.engine.paused)
            with ThreadPoolExecutor(1) as threads:
                asking = threads.submit(go_on, there, PATH, cursor)
                assert '"code":"stale_attempt"' in "".join(lines), "the old connection is told"
                pair.engine.choose, pair.engine.paused = hashed_token, False
                rest = read(asking.result(20), BODY)
        told = whole.choices[0].token_ids[: cursor.choices[0].position]
        assert told + rest.choices[0].token_ids == whole.choices[0].token_ids
        pair.wait_until(lambda: not pair.engine.running)
        later = find(here, cursor.request_id)
        assert later is not None and later.attempt.attempt_epoch == 2, "one record, of the attempt that went on"


def test_a_router_sees_a_stream_that_runs_in_the_other_process_and_does_not_end_it(pair: Instance) -> None:
    for here, there in both_ways(pair):
        pair.engine.choose = pausing(pair, at=7)
        attempt = attempt_of(PATH, request(PATH, False, max_tokens=30))
        message = msgspec.msgpack.encode(attempt)
        with httpx.stream(
            "POST",
            here + ATTEMPT_PATH,
            content=message,
            headers=MSGPACK_BODY,
            timeout=30,
            verify=NO_CERTIFICATES,
        ) as response:
            lines = response.iter_lines()
            while not is_all(pair, parse_cursor(next(one for one in lines if one.startswith("id: "))[4:])):
                pass
            live = find(there, REQUEST_ID)
            assert live is not None and len(live.attempt.choices[0].token_ids) >= 7
            pair.engine.choose, pair.engine.paused = hashed_token, False
            assert any(line == "event: answer" for line in lines)


def test_a_routers_next_attempt_takes_the_place_of_the_one_in_the_other_process(pair: Instance) -> None:
    for here, there in both_ways(pair):
        pair.engine.choose = pausing(pair, at=7)
        attempt = attempt_of(PATH, request(PATH, False, max_tokens=30))
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(post, here, attempt)
            pair.wait_until(lambda: pair.engine.paused)
            stale = msgspec.structs.replace(attempt, attempt_epoch=max(attempt.attempt_epoch - 1, 1))
            assert attempt.attempt_epoch == 1 or error_in(post(there, stale))["code"] == "stale_attempt"
            next_one = attempt_of(PATH, {}, body=attempt.body)
            second = threads_answer(pair, there, next_one)
            assert error_in(first.result(20))["code"] == "stale_attempt"
        assert second is not None


def test_nobody_takes_the_place_of_another_callers_attempt(pair: Instance) -> None:
    for here, there in both_ways(pair):
        pair.engine.choose = pausing(pair, at=7)
        attempt = attempt_of(PATH, request(PATH, False, max_tokens=30), caller="ann")
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(hear, here, attempt)
            pair.wait_until(lambda: pair.engine.paused)
            try:
                for url in (here, there):
                    assert status_of_attempt(url, attempt_of(PATH, {}, body=attempt.body, caller="bob")) == 409
            finally:
                pair.engine.choose, pair.engine.paused = hashed_token, False
            assert first.result(20).answer is not None


def status_of_attempt(url: str, attempt: Any) -> int:
    """One that is taken is left at once."""
    content = msgspec.msgpack.encode(attempt)
    with httpx.stream(
        "POST",
        url + ATTEMPT_PATH,
        content=content,
        headers=MSGPACK_BODY,
        timeout=30,
        verify=NO_CERTIFICATES,
    ) as response:
        return response.status_code


def threads_answer(pair: Instance, url: str, attempt: Any) -> bytes | None:
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(hear, url, attempt)
        pair.wait_until(lambda: pair.engine.submits[-1].epoch > 1)
        pair.engine.choose, pair.engine.paused = hashed_token, False
        return asking.result(20).answer


def _wait_until_kept(url: str, request_id: str) -> None:
    """A stream is kept when its end is told, and a moment later the other process knows."""
    assert any(find(url, request_id) is not None for _ in range(MAX_LOOKS)), "it is never kept"


def test_an_abort_through_either_process_drops_the_record_once(pair: Instance) -> None:
    for here, there in both_ways(pair):
        whole = ask(here, PATH, BODY)
        assert whole.cursor is not None
        name = f"cmpl-{whole.cursor.request_id}"
        _wait_until_kept(there, whole.cursor.request_id)
        told = [
            httpx.post(f"{url}/v1/abort", json={"ids": [name]}, verify=NO_CERTIFICATES).json()["aborted"]
            for url in (there, here)
        ]
        assert told == [[name], []]
        for url in (here, there):
            assert find(url, whole.cursor.request_id) is None
            assert go_on(url, PATH, at(whole, 5)).status_code == 404


def test_records_of_a_killed_process_survive_and_what_it_ran_is_unknown(model: PreparedModel) -> None:
    exact = msgspec.structs.replace(model, quantization="int8")
    with running(exact, num_api=2, has_own_ports=True) as instance:
        victim, other = instance.children
        whole = ask(victim.url, PATH, BODY)
        instance.engine.choose = pausing(instance, at=9)
        with httpx.stream("POST", victim.url + PATH, json=BODY, timeout=30, verify=NO_CERTIFICATES) as response:
            lines = response.iter_lines()  # held, or the connection would close
            first = next(line for line in lines if line.startswith("id: "))
            running_one = parse_cursor(first.removeprefix("id: "))
            assert find(other.url, running_one.request_id) is not None
            instance.kill_api(victim)
        instance.engine.choose, instance.engine.paused = hashed_token, False
        rest = read(go_on(other.url, PATH, at(whole, 5)), BODY)
        assert rest.choices[0].token_ids == whole.choices[0].token_ids[5:]
        assert go_on(other.url, PATH, running_one).status_code == 404
        made_again = read(go_on(other.url, PATH, running_one, BODY), BODY)
        told = whole.choices[0].token_ids[: running_one.choices[0].position]
        assert told + made_again.choices[0].token_ids == whole.choices[0].token_ids


def test_what_an_attempt_has_left_is_of_no_use_once_a_later_one_runs(model: PreparedModel) -> None:
    with running(model, num_api=2, has_own_ports=True) as instance:
        victim, other = instance.children
        whole = ask(other.url, PATH, BODY)
        instance.engine.choose = pausing(instance, at=9)
        headers = {"last-event-id": format_cursor(at(whole, 5))}
        with httpx.stream("GET", victim.url + PATH, headers=headers, timeout=30, verify=NO_CERTIFICATES) as response:
            lines = response.iter_lines()
            assert next(line for line in lines if line.startswith("id: "))
            later = find(other.url, at(whole, 5).request_id)
            assert later is not None and later.attempt.attempt_epoch == 2
            instance.kill_api(victim)
        instance.engine.paused = False
        assert find(other.url, at(whole, 5).request_id) is None


def _kept_answer(here: str, there: str) -> AnswerRead:
    """The first one that is kept: a process which has not heard of its new stream store yet has no place for one."""
    for _ in range(MAX_LOOKS):
        answer = ask(here, PATH, BODY)
        if find(there, at(answer, 5).request_id) is not None:
            return answer
    raise AssertionError("the new shelf keeps nothing")


def _told_by_shelf(url: str, place: Cursor) -> int:
    """Once the process has heard of its new stream store."""
    statuses = (go_on(url, PATH, place).status_code for _ in range(MAX_LOOKS))
    return next(status for status in statuses if status != 503)


def test_a_killed_stream_store_loses_what_it_kept_and_the_next_one_keeps_what_comes(model: PreparedModel) -> None:
    exact = msgspec.structs.replace(model, quantization="int8")
    with running(exact, num_api=2, has_own_ports=True) as instance:
        first, second = (child.url for child in instance.children)
        before = ask(first, PATH, BODY)
        instance.kill_shelf()
        assert go_on(second, PATH, at(before, 5)).status_code == 503, "the other process may run it"
        again = read(go_on(second, PATH, at(before, 5), BODY), BODY)
        assert again.choices[0].token_ids == before.choices[0].token_ids[5:], "the repeated POST does not need it"
        instance.shelf = instance.start_shelf()
        assert _told_by_shelf(second, at(before, 5)) == 404
        after = _kept_answer(first, second)
        rest = read(go_on(second, PATH, at(after, 5)), BODY)
        assert rest.choices[0].token_ids == after.choices[0].token_ids[5:]


def test_a_stream_store_that_hangs_holds_nobody_up(model: PreparedModel) -> None:
    with running(model, num_api=2, has_own_ports=True) as instance:
        first, second = (child.url for child in instance.children)
        whole = ask(first, PATH, BODY)
        assert find(second, at(whole, 5).request_id) is not None, "it has been put by now"
        os.kill(instance.shelf.process.pid, signal.SIGSTOP)
        started_s = time.monotonic()
        for body in (None, BODY):  # this model is not exact, so it cannot be made again either
            back = go_on(second, PATH, at(whole, 5), body)
            assert (back.status_code, back.headers["retry-after"]) == (503, "1"), "it may be kept"
        assert time.monotonic() - started_s >= REPLY_TIMEOUT_S
        assert ask(first, PATH, BODY).choices == whole.choices
        aborted = httpx.post(f"{first}/v1/abort", json={"ids": ["x"]}, timeout=30, verify=NO_CERTIFICATES)
        assert (aborted.status_code, aborted.json()["error"]["code"]) == (503, "unavailable")
        os.kill(instance.shelf.process.pid, signal.SIGCONT)
        assert httpx.post(f"{first}/v1/abort", json={"ids": ["x"]}, verify=NO_CERTIFICATES).json()["unknown"] == ["x"]
        rest = read(go_on(second, PATH, at(whole, 5)), BODY)
        assert rest.choices[0].token_ids == whole.choices[0].token_ids[5:]


def test_a_process_that_hangs_does_not_keep_the_other_from_going_on(model: PreparedModel) -> None:
    with running(model, num_api=2, has_own_ports=True) as instance:
        stopped, other = instance.children
        whole = ask(stopped.url, PATH, BODY)
        assert find(other.url, at(whole, 5).request_id) is not None, "it has been put by now"
        os.kill(stopped.process.pid, signal.SIGSTOP)
        try:
            rest = read(go_on(other.url, PATH, at(whole, 5)), BODY)
        finally:
            os.kill(stopped.process.pid, signal.SIGCONT)
        assert rest.choices[0].token_ids == whole.choices[0].token_ids[5:]
