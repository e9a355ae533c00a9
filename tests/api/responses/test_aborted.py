"""An aborted response is cancelled and has its output so far, for every reader, in every form and at any later time."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
import pytest

from onward.proto.engine import ErrorInfo
from onward.proto.model import PreparedModel
from onward.proto.router import ATTEMPT_PATH, RESPONSE_PATH, ChoiceSnapshot, QueryResponse, StreamRecord
from tests.api.cut_streams import events_of, fresh, given_by, later
from tests.api.instance import Instance, running
from tests.api.reader import NO_CERTIFICATES
from tests.api.responses.reading import (
    PATH,
    SCORED,
    ask,
    attempted,
    body_of,
    check_event,
    check_response,
    data_of,
    speak_until,
    told,
)
from tests.api.routed import MSGPACK_BODY
from tests.api.test_roles import until
from tests.api.thinking_model import speak, tokens_of

TEXT = tokens_of("né, wörds")
SHOWN = ["", "n", "n", "né", "né,", "né, ", "né, w", "né, w", "né, wö"]
"""The text that is shown after each of the first tokens. Each token is a byte."""
LABEL = "mine"
NAMED = {"X-Request-Id": LABEL}
FORMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
STORES = pytest.mark.parametrize("store", [True, False], ids=["stored", "not stored"])


@contextmanager
def paused_at(
    instance: Instance, http: httpx.Client, num_tokens: int, **more: Any
) -> "Iterator[Future[httpx.Response]]":
    """A response that has so many tokens, and gets no more."""
    engine = instance.engine
    if num_tokens:
        speak_until(instance, num_tokens, TEXT)
    else:
        speak(instance, TEXT)
        engine.paused = True
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask, http, "POST", json=body_of("words", **more), headers=NAMED)
        instance.wait_until(lambda: [len(one.tokens) for one in engine.running.values()] == [num_tokens])
        yield asking
        engine.paused = False


def abort(http: httpx.Client, name: str = LABEL) -> dict[str, list[str]]:
    return http.post("/v1/abort", json={"ids": [name]}).json()


def id_of(instance: Instance) -> str:
    [held] = instance.engine.running.values()
    return f"resp_{held.submit.request_id.rpartition('-')[0]}"


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def check_cancelled(response: dict[str, Any], num_tokens: int) -> None:
    """The newest token may have been on its way when the abort came."""
    assert check_response(response).status == "cancelled"
    assert response["error"] is None and response["incomplete_details"] is None
    made = response["usage"]["output_tokens"]
    assert max(0, num_tokens - 1) <= made <= num_tokens
    assert text_of(response) == SHOWN[made], "the text of its tokens, and never half a character"


def check_events(events: list[str], num_tokens: int) -> list[dict[str, Any]]:
    for event in events:
        check_event(data_of(event))
    fields = told(events)
    assert [one["sequence_number"] for one in fields] == list(range(len(fields)))
    assert [one["type"] for one in fields].count("response.incomplete") == 1
    assert fields[-1]["type"] == "response.incomplete"
    check_cancelled(data_of(events[-1])["response"], num_tokens)
    deltas = "".join(one["delta"] for one in fields if one["type"] == "response.output_text.delta")
    assert deltas == text_of(fields[-1]["response"])
    return fields


@STORES
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 7])
def test_a_whole_response_that_is_aborted_is_cancelled_and_has_its_output(
    pair: tuple[Instance, list[httpx.Client]], num_tokens: int, store: bool
) -> None:
    instance, (here, there) = pair
    with paused_at(instance, here, num_tokens, store=store) as asking:
        assert abort(there) == {"aborted": [LABEL], "unknown": []}
        answer = asking.result(20)
    assert answer.status_code == 200, answer.text
    check_cancelled(answer.json(), num_tokens)
    for http in (here, there):
        kept = ask(http, "GET", f"/{answer.json()['id']}")
        assert (kept.status_code, kept.json() == answer.json()) == ((200, True) if store else (404, False))
    assert abort(there) == {"aborted": [], "unknown": [LABEL]}, "it has ended"


@pytest.mark.parametrize("more", [{}, SCORED, {"model": None}], ids=["plain", "scored", "without model"])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 7])
def test_a_streamed_response_that_is_aborted_ends_as_one_that_is_cancelled_and_is_told_again_the_same(
    pair: tuple[Instance, list[httpx.Client]], num_tokens: int, more: dict[str, Any]
) -> None:
    instance, (here, there) = pair
    with paused_at(instance, here, num_tokens, stream=True, **more) as asking:
        assert abort(there)["aborted"] == [LABEL]
        events = events_of(asking.result(20))
    fields = check_events(events, num_tokens)
    response_id = fields[-1]["response"]["id"]
    for http in (here, there):
        for after in range(-1, len(fields)):
            query = {"stream": "true"} | ({"starting_after": str(after)} if after >= 0 else {})
            assert told(events_of(ask(http, "GET", f"/{response_id}", params=query))) == fields[after + 1 :]
    body = body_of("words", stream=True, **more)
    cursors = [(index, line[4:]) for index, one in enumerate(events) for line in one.split("\n") if line[:4] == "id: "]
    assert cursors[-1][0] == len(events) - 1
    for index, cursor in cursors:
        for method, given in (("GET", {}), ("POST", {"json": body})):
            again = ask(there, method, headers={"Last-Event-ID": cursor}, **given)
            assert again.status_code == 200, again.text
            assert told(events_of(again)) == fields[index + 1 :], "what it does not have yet"


@FORMS
def test_an_aborted_response_that_is_not_stored_does_not_come_back(
    pair: tuple[Instance, list[httpx.Client]], stream: bool
) -> None:
    instance, (here, there) = pair
    with paused_at(instance, here, 4, stream=stream, store=False) as asking:
        abort(there)
        answer = asking.result(20)
    if not stream:
        check_cancelled(answer.json(), 4)
        return
    events = events_of(answer)
    fields = check_events(events, 4)
    assert ask(there, "GET", f"/{fields[0]['response']['id']}").status_code == 404
    cursor = next(line[4:] for event in events for line in event.split("\n") if line.startswith("id: "))
    assert ask(there, "GET", headers={"Last-Event-ID": cursor}).status_code == 404


@pytest.mark.parametrize("by_id", [False, True], ids=["by label", "by id"])
@pytest.mark.parametrize("num_tokens", [0, 3, 7])
def test_a_background_response_that_is_aborted_is_cancelled(
    pair: tuple[Instance, list[httpx.Client]], num_tokens: int, by_id: bool
) -> None:
    instance, (here, there) = pair
    with paused_at(instance, here, num_tokens, background=True) as asking:
        begun = asking.result(20).json()
        path = f"/{begun['id']}"
        with ThreadPoolExecutor(2) as threads:
            following = [threads.submit(ask, one, "GET", path, params={"stream": "true"}) for one in (here, there)]
            name = begun["id"] if by_id else LABEL
            assert abort(there, name) == {"aborted": [name], "unknown": []}
            shown = ask(there, "GET", path).json()
            check_cancelled(shown, num_tokens)
            for one in following:
                fields = check_events(events_of(one.result(20)), num_tokens)
                assert fields[-1]["response"]["output"] == shown["output"]
        instance.wait_until(lambda: not instance.engine.running)
    for http in (here, there):
        assert ask(http, "GET", path).json() == shown
        assert ask(http, "POST", path + "/cancel").json() == shown


def test_a_stored_stream_whose_client_has_gone_is_cancelled_by_an_abort(
    pair: tuple[Instance, list[httpx.Client]],
) -> None:
    instance, (here, there) = pair
    speak_until(instance, 5, TEXT)
    with here.stream("POST", PATH, json=body_of("words", stream=True), headers=NAMED) as response:
        lines, cursor = response.iter_lines(), ""
        while not cursor:
            line = next(lines)
            cursor = line.removeprefix("id: ") if line.startswith("id: ") else ""
        instance.wait_until(lambda: instance.engine.paused)
        path = "/" + id_of(instance)
    instance.wait_until(lambda: not instance.engine.running)
    until(lambda: ask(there, "GET", path).json()["status"] == "incomplete")
    instance.engine.paused = False
    assert abort(there) == {"aborted": [LABEL], "unknown": []}
    shown = ask(here, "GET", path).json()
    check_cancelled(shown, 5)
    events = told(events_of(ask(here, "GET", headers={"Last-Event-ID": cursor})))
    assert events[-1]["response"]["status"] == "cancelled" and not instance.engine.running
    assert abort(there) == {"aborted": [], "unknown": [LABEL]}


def test_an_abort_leaves_a_response_that_is_complete(pair: tuple[Instance, list[httpx.Client]]) -> None:
    instance, (here, there) = pair
    speak(instance, TEXT)
    made = ask(here, "POST", json=body_of("words"), headers=NAMED).json()
    for name in (LABEL, made["id"]):
        assert abort(there, name) == {"aborted": [], "unknown": [name]}
    assert ask(there, "GET", f"/{made['id']}").json() == made


def test_a_response_that_is_deleted_while_it_runs_is_not_kept_as_cancelled(
    pair: tuple[Instance, list[httpx.Client]],
) -> None:
    instance, (here, there) = pair
    for more in ({"background": True}, {"stream": True}):
        with paused_at(instance, here, 5, **more) as asking:
            path = "/" + id_of(instance)
            assert ask(there, "DELETE", path).json()["deleted"]
            asking.result(20)
            instance.wait_until(lambda: not instance.engine.running)
        for http in (here, there):
            assert ask(http, "GET", path).status_code == 404
        assert abort(there) == {"aborted": [], "unknown": [LABEL]}


def test_a_background_response_whose_process_has_died_is_cancelled_by_an_abort(thinker: PreparedModel) -> None:
    with running(thinker, num_api=2, has_own_ports=True) as instance:
        victim, other = instance.children
        speak_until(instance, 5, TEXT)
        begun = httpx.post(
            victim.url + PATH, json=body_of("words", background=True), headers=NAMED, verify=NO_CERTIFICATES
        ).json()
        instance.wait_until(lambda: instance.engine.paused)
        instance.kill_api(victim)
        instance.engine.paused = False
        with httpx.Client(base_url=other.url, timeout=30, verify=NO_CERTIFICATES) as http:
            assert abort(http) == {"aborted": [LABEL], "unknown": []}
            shown = ask(http, "GET", f"/{begun['id']}").json()
            assert check_response(shown).status == "cancelled"
            assert "né, wörds".startswith(text_of(shown))
            follow = told(events_of(ask(http, "GET", f"/{begun['id']}", params={"stream": "true"})))
            assert follow[-1]["response"]["output"] == shown["output"]


@pytest.mark.parametrize("way", ["GET", "POST", "by number", "router"])
def test_a_response_that_is_aborted_after_its_client_came_back_is_told_again_with_its_logprobs(
    pair: tuple[Instance, list[httpx.Client]], way: str
) -> None:
    """Although the next token has not come: until then, an attempt that was given tokens alone has no logprobs."""
    instance, (here, there) = pair
    speak_until(instance, 8, TEXT)
    body = body_of("words", stream=True, **SCORED)
    first = fresh(PATH, body)
    request = (
        {"url": ATTEMPT_PATH, "content": msgspec.msgpack.encode(first), "headers": MSGPACK_BODY}
        if way == "router"
        else {"url": PATH, "json": body}
    )
    events = _cut_behind(here, 5, request)
    instance.wait_until(lambda: not instance.engine.running)
    instance.engine.paused = True
    before = told(_of_the_response(events))
    response_id = before[0]["response"]["id"]
    with ThreadPoolExecutor(1) as threads:
        place = {"headers": {"Last-Event-ID": _last_cursor(events)}}
        match way:
            case "by number":
                asking = threads.submit(ask, there, "GET", f"/{response_id}?stream=true")
            case "router":
                attempt = later(first, choices=given_by(events, 1))
                asking = threads.submit(attempted, there, attempt)
            case _:
                asking = threads.submit(ask, there, way, **place, **({"json": body} if way == "POST" else {}))
        instance.wait_until(lambda: bool(instance.engine.running))
        assert abort(here, response_id)["aborted"] == [response_id]
        rest = told(_of_the_response(events_of(asking.result(20))))
    instance.engine.paused = False
    again = told(events_of(ask(here, "GET", f"/{response_id}", params={"stream": "true"})))
    assert any(one.get("logprobs") for one in before)
    assert again[: len(before)] == before, "what it was told before it was cut off"
    assert (again if way == "by number" else again[len(before) :]) == rest
    [part] = again[-1]["response"]["output"][0]["content"]
    scores = [entry["logprob"] for one in again if one["type"].endswith(".delta") for entry in one["logprobs"]]
    assert [entry["logprob"] for entry in part["logprobs"]] == scores, "and so is the response"


@pytest.mark.parametrize(
    "end",
    [{"is_cancelled": True}, {"error": ErrorInfo("crashed_worker", "the worker is down", 500, False)}],
    ids=["cancelled", "failed"],
)
def test_a_response_that_a_router_ends_keeps_the_logprobs_that_its_instance_has(
    pair: tuple[Instance, list[httpx.Client]], end: dict[str, Any]
) -> None:
    """The router knows of tokens that another instance has made since, and of no logprobs."""
    instance, (here, there) = pair
    speak_until(instance, 8, TEXT)
    first = fresh(PATH, body_of("words", stream=True, **SCORED))
    message = msgspec.msgpack.encode(first)
    events = _cut_behind(here, 5, {"url": ATTEMPT_PATH, "content": message, "headers": MSGPACK_BODY})
    instance.wait_until(lambda: not instance.engine.running)
    instance.engine.paused = False
    before = told(_of_the_response(events))
    record = StreamRecord(attempt=later(first, choices=[ChoiceSnapshot(TEXT[:9])]), **end)
    query = msgspec.msgpack.encode(QueryResponse(action="keep", record=record))
    assert there.post(RESPONSE_PATH, content=query, headers=MSGPACK_BODY).status_code == 200
    again = told(events_of(ask(here, "GET", f"/{before[0]['response']['id']}", params={"stream": "true"})))
    assert again[-1]["response"]["status"] in ("cancelled", "failed")
    assert text_of(again[-1]["response"]) == "né, wör"
    assert again[: len(before)] == before, "also those that have logprobs"


def _cut_behind(http: httpx.Client, num_places: int, request: dict[str, Any]) -> list[str]:
    """The events up to the one with that many `id:` lines; then the connection ends."""
    events = [""]
    with http.stream("POST", **request) as response:
        lines = response.iter_lines()
        while num_places or events[-1]:
            line = next(lines)
            num_places -= line.startswith("id: ")
            events[-1:] = [events[-1] + line + "\n"] if line else [events[-1], ""]
    return [event.rstrip("\n") for event in events[:-1]]


def _of_the_response(events: list[str]) -> list[str]:
    """Without those that are for a router alone."""
    return [event for event in events if "event: response." in event]


def _last_cursor(events: list[str]) -> str:
    return [line[4:] for event in events for line in event.split("\n") if line.startswith("id: ")][-1]
