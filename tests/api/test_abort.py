"""`POST /v1/abort`: exact names, every process, one clear end for those who are aborted."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from onward.proto.model import PreparedModel
from tests.api.instance import Instance, running

FIELDS = {"model": "small-model", "prompt": [97, 98, 99], "max_tokens": 200}


def abort(instance: Instance, **body: Any) -> dict[str, list[str]]:
    response = httpx.post(f"{instance.url}/v1/abort", json=body, timeout=30)
    assert response.status_code == 200, response.text
    return response.json()


@contextmanager
def waiting(instance: Instance, *bodies: dict[str, Any], label: str = "") -> Iterator[list["Future[httpx.Response]"]]:
    """Requests that the engine holds and does not advance."""
    instance.engine.paused = True
    headers = {"X-Request-Id": label} if label else {}
    num_running = sum(body.get("n", 1) for body in bodies)
    with ThreadPoolExecutor(len(bodies)) as threads:
        asking = [
            threads.submit(
                httpx.post, f"{instance.url}/v1/completions", json=FIELDS | body, headers=headers, timeout=30
            )
            for body in bodies
        ]
        instance.wait_until(lambda: len(instance.engine.running) >= num_running)
        try:
            yield asking
        finally:
            abort(instance, all=True)
            instance.engine.paused = False


def ends(answer: "Future[httpx.Response]") -> list[str]:
    """Returns the finish reasons of an answer that is not streamed."""
    response = answer.result(20)
    assert response.status_code == 200, response.text
    return [choice["finish_reason"] for choice in response.json()["choices"]]


def running_ids(instance: Instance) -> list[str]:
    return [request_id.rpartition("-")[0] for request_id in instance.engine.running]


@pytest.mark.parametrize("prefix", ["", "cmpl-", "chatcmpl-", "gen-"])
def test_a_request_is_aborted_by_its_id_and_told_so(instance: Instance, prefix: str) -> None:
    with waiting(instance, {}) as [answer]:
        [request_id] = running_ids(instance)
        name = prefix + request_id
        assert abort(instance, ids=[name, "nobody"]) == {"aborted": [name], "unknown": ["nobody"]}
        assert ends(answer) == ["abort"]
    assert not instance.engine.running


def test_a_request_is_aborted_by_its_label_with_all_its_choices(instance: Instance) -> None:
    with waiting(instance, {"n": 3}, label="my label") as [answer]:
        assert abort(instance, ids=["my label"]) == {"aborted": ["my label"], "unknown": []}
        assert ends(answer) == ["abort"] * 3
        assert not instance.engine.running


def test_nothing_but_the_whole_name_matches(instance: Instance) -> None:
    with waiting(instance, {}, label="my label"):
        [request_id] = running_ids(instance)
        near = [
            request_id[:-1],
            request_id + "-0",
            request_id + "0",
            request_id.upper() + "x",
            "cmpl-",
            "cmpl",
            "my",
            "my label ",
            "cmpl-my label",
            "*",
            "-",
        ]
        assert abort(instance, ids=near) == {"aborted": [], "unknown": near}
        assert abort(instance, ids=[]) == {"aborted": [], "unknown": []}
        assert running_ids(instance) == [request_id]


def test_all_means_all_and_names_them(instance: Instance) -> None:
    abort(instance, all=True)  # records that other tests have left
    with waiting(instance, {}, {"n": 2}, {"stream": True}) as answers:
        ids = sorted(set(running_ids(instance)))
        assert len(ids) == 3
        assert abort(instance, all=True) == {"aborted": ids, "unknown": []}
        assert [ends(one) for one in answers[:2]] == [["abort"], ["abort", "abort"]]
        assert not instance.engine.running
    assert abort(instance, all=True) == {"aborted": [], "unknown": []}


def test_a_stream_gets_its_tokens_and_one_end_for_each_choice(instance: Instance) -> None:
    with httpx.stream(
        "POST", f"{instance.url}/v1/completions", json=FIELDS | {"stream": True, "n": 2}, timeout=30
    ) as response:
        lines = response.iter_lines()
        seen = [next(lines) for _ in range(6)]
        name = "cmpl-" + response.headers["x-request-id"]
        assert abort(instance, ids=[name])["aborted"] == [name]
        seen += list(lines)
    assert not [line for line in seen if line.startswith("event:")]
    data = [line for line in seen if line.startswith("data: ")]
    assert ['"finish_reason":"abort"' in line for line in data[-3:]] == [True, True, False]
    assert data[-1] == "data: [DONE]"
    instance.wait_until(lambda: not instance.engine.running)


def test_an_abort_may_be_repeated_and_a_finished_request_is_unknown(instance: Instance) -> None:
    done = httpx.post(f"{instance.url}/v1/completions", json=FIELDS | {"max_tokens": 1}).json()["id"]
    with waiting(instance, {}):
        [request_id] = running_ids(instance)
        assert abort(instance, ids=[request_id, done]) == {"aborted": [request_id], "unknown": [done]}
        assert abort(instance, ids=[request_id, done]) == {"aborted": [], "unknown": [request_id, done]}


def test_a_name_given_twice_is_answered_once(instance: Instance) -> None:
    assert abort(instance, ids=["x", "x"]) == {"aborted": [], "unknown": ["x"]}


def test_a_request_is_aborted_through_whichever_process_is_asked(model: PreparedModel) -> None:
    with running(model, num_api=2) as instance, waiting(instance, *[{}] * 8) as answers:
        ids = sorted(running_ids(instance))
        # Each on a connection of its own, which either process may take.
        told = [abort(instance, ids=[request_id]) for request_id in ids]
        assert told == [{"aborted": [request_id], "unknown": []} for request_id in ids]
        assert [ends(one) for one in answers] == [["abort"]] * 8
        assert not instance.engine.running


def test_an_abort_is_not_undone_by_an_engine_that_dies(instance: Instance) -> None:
    with waiting(instance, {}) as [answer]:
        [request_id] = running_ids(instance)
        instance.kill_engine()
        try:
            assert abort(instance, ids=[request_id])["aborted"] == [request_id]
            assert ends(answer) == ["abort"]
        finally:
            instance.start_engine()
        assert not instance.engine.running


@pytest.mark.parametrize("by", ["id", "label"])
def test_an_abort_without_an_engine_holds_whichever_process_has_the_request(model: PreparedModel, by: str) -> None:
    with running(model, num_api=2) as instance, ThreadPoolExecutor(12) as threads:
        instance.engine.paused = True
        url, labels = f"{instance.url}/v1/completions", [f"label-{number}" for number in range(6)]
        asking = [
            threads.submit(httpx.post, url, json=FIELDS, headers={"X-Request-Id": label}, timeout=30)
            for label in labels
        ]
        instance.wait_until(lambda: len(instance.engine.running) == 6)
        names = labels if by == "label" else sorted(running_ids(instance))
        instance.kill_engine()
        aborting = [threads.submit(abort, instance, ids=[name]) for name in names]
        wait(aborting, timeout=0.5)
        instance.start_engine(lambda engine: setattr(engine, "paused", True))
        assert [ends(one) for one in asking] == [["abort"]] * 6
        for one in aborting:
            assert one.result(20)["aborted"] + one.result(20)["unknown"]
        instance.wait_until(lambda: not instance.engine.running)


def test_a_request_that_missed_its_abort_does_not_run_again(instance: Instance) -> None:
    """The engine's word to the stream is lost; the resubmission that repairs it finds the name buried."""
    assert instance.engine_thread is not None
    with waiting(instance, {}, label="lost") as [answer]:
        [held] = instance.engine.running.values()
        with instance.news.changed:
            instance.engine.buried.add(held.submit.request_id)
            del instance.engine.running[held.submit.request_id]
        assert ends(answer) == ["abort"]
        assert not instance.engine.running
