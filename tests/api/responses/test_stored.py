"""Responses by their ids: which process is asked does not matter, who asks does, and none is kept for ever."""

from typing import Any

import httpx
import msgspec
import openai
import pytest

from onward.config import ApiConfig
from onward.proto.model import PreparedModel
from onward.proto.router import RESPONSE_PATH, QueryResponse, StreamRecord
from onward.web.openai_api.response_ids import PREFIX
from tests.api.cut_streams import events_of
from tests.api.instance import Instance, running
from tests.api.reader import NO_CERTIFICATES
from tests.api.responses.reading import PATH, ask, body_of, check_items, check_response, speak_until, told
from tests.api.routed import MSGPACK_BODY, attempt_of, find
from tests.api.test_roles import keyed, until
from tests.api.thinking_model import speak, tokens_of
from tests.web import route_access

BACKGROUND = {"background": True}
TEXT = tokens_of("one two three")


def status_of(http: httpx.Client, response_id: str) -> str:
    response = ask(http, "GET", f"/{response_id}").json()
    check_response(response)
    return response["status"]


def test_a_response_is_found_by_every_process(pair: tuple[Instance, list[httpx.Client]]) -> None:
    instance, (here, there) = pair
    speak(instance, TEXT)
    made = ask(here, "POST", json=body_of("words")).json()
    for http in (here, there):
        assert ask(http, "GET", f"/{made['id']}").json() == made
    items = ask(there, "GET", f"/{made['id']}/input_items").json()
    assert check_items(items).data[0].type == "message"
    goes_on = ask(there, "POST", json=body_of("words", previous_response_id=made["id"]))
    assert goes_on.json()["previous_response_id"] == made["id"]


def test_spaces_in_a_body_are_not_stored(keeper: Instance, http: httpx.Client) -> None:
    speak(keeper, TEXT)
    lean = msgspec.json.encode(body_of("words", stream=True))
    padded = lean.replace(b"{", b"{" + b" " * 200_000, 1).replace(b",", b"\n, ") + b" " * 200_000
    streamed = ask(http, "POST", content=padded, headers={"content-type": "application/json"})
    [cursor, *_] = [line.removeprefix("id: ") for line in streamed.text.split("\n") if line.startswith("id: ")]
    record = find(keeper.url, cursor.split(";")[1])
    assert record is not None and record.attempt.body == lean
    again = ask(http, "POST", content=padded, headers={"last-event-id": cursor})
    assert told(events_of(again)) == told(events_of(streamed))[-len(events_of(again)) :], "known by its padded body too"


def test_an_item_whose_id_was_left_open_is_listed_with_one(keeper: Instance, http: httpx.Client) -> None:
    speak(keeper, TEXT)
    given = [
        {"type": "message", "role": "user", "content": "hi", "id": None, "status": None},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": None, "status": None},
        {"type": "function_call_output", "call_id": "c", "output": "1", "id": None, "status": None},
    ]
    made = ask(http, "POST", json=body_of("words", input=given)).json()
    items = check_items(ask(http, "GET", f"/{made['id']}/input_items?order=asc").json())
    assert [item.type for item in items.data] == [item["type"] for item in given]
    assert len({item.id for item in items.data}) == len(given)


def test_a_background_response_is_seen_while_it_runs_and_when_it_is_over(
    pair: tuple[Instance, list[httpx.Client]],
) -> None:
    instance, (here, there) = pair
    speak_until(instance, 5, TEXT)
    begun = ask(here, "POST", json=body_of("words", **BACKGROUND)).json()
    assert check_response(begun).status in ("queued", "in_progress") and begun["background"]
    instance.wait_until(lambda: instance.engine.paused)
    for http in (here, there):
        until(lambda http=http: ask(http, "GET", f"/{begun['id']}").json()["output"])
        assert status_of(http, begun["id"]) == "in_progress"
    refused = ask(there, "POST", json=body_of("words", previous_response_id=begun["id"]))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")
    instance.engine.paused = False
    until(lambda: status_of(there, begun["id"]) == "completed")
    whole = ask(here, "GET", f"/{begun['id']}").json()
    assert whole["output"][0]["content"][0]["text"] == "one two three"


def test_a_background_response_is_followed_in_another_process(pair: tuple[Instance, list[httpx.Client]]) -> None:
    instance, (here, there) = pair
    speak_until(instance, 5, TEXT)
    begun = ask(here, "POST", json=body_of("words", **BACKGROUND)).json()
    instance.wait_until(lambda: instance.engine.paused)
    query = {"stream": "true", "starting_after": "2"}
    with there.stream("GET", f"{PATH}/{begun['id']}", params=query) as response:
        chunks = response.iter_text()
        early = next(chunks)
        instance.engine.paused = False
        events = "".join([early, *chunks]).split("\n\n")[:-1]
    numbers = [one["sequence_number"] for one in told(events)]
    assert numbers == list(range(3, 3 + len(numbers)))
    again = events_of(ask(here, "GET", f"/{begun['id']}", params={"stream": "true", "starting_after": "2"}))
    assert told(events) == told(again)


def test_a_reader_in_another_process_does_not_notice_that_the_stream_store_is_restarted(
    pair: tuple[Instance, list[httpx.Client]],
) -> None:
    instance, (here, there) = pair
    speak_until(instance, 5, TEXT)
    begun = ask(here, "POST", json=body_of("words", **BACKGROUND)).json()
    instance.wait_until(lambda: instance.engine.paused)
    with there.stream("GET", f"{PATH}/{begun['id']}", params={"stream": "true"}) as response:
        chunks = response.iter_text()
        read = next(chunks)
        instance.kill_shelf()
        with httpx.Client(base_url=there.base_url, timeout=30, verify=NO_CERTIFICATES) as poller:
            for _ in range(20):
                polled = ask(poller, "GET", f"/{begun['id']}")
                assert (polled.status_code, polled.json()["error"]["code"]) == (503, "unavailable")
                assert polled.headers["retry-after"] == "1"
            instance.shelf = instance.start_shelf()
            until(lambda: ask(poller, "GET", f"/{begun['id']}").status_code == 200)
        instance.engine.paused = False
        read += "".join(chunks)
    events = told(read.split("\n\n")[:-1])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"


def test_a_stream_in_the_background_outlives_its_reader(pair: tuple[Instance, list[httpx.Client]]) -> None:
    instance, (here, there) = pair
    speak_until(instance, 5, TEXT)
    with here.stream("POST", PATH, json=body_of("words", stream=True, **BACKGROUND)) as response:
        first = next(response.iter_lines())
        assert first == "event: response.created"
        instance.wait_until(lambda: instance.engine.paused)
        [held] = instance.engine.running.values()
        response_id = f"resp_{held.submit.request_id.rpartition('-')[0]}"
    instance.engine.paused = False
    until(lambda: status_of(there, response_id) == "completed")


def test_a_background_response_is_cancelled_from_either_process(pair: tuple[Instance, list[httpx.Client]]) -> None:
    instance, clients = pair
    for http in clients:
        speak_until(instance, 5, TEXT)
        begun = ask(clients[0], "POST", json=body_of("words", **BACKGROUND)).json()
        instance.wait_until(lambda: instance.engine.paused)
        until(lambda begun=begun: ask(clients[0], "GET", f"/{begun['id']}").json()["output"])
        cancelled = ask(http, "POST", f"/{begun['id']}/cancel").json()
        assert check_response(cancelled).status == "cancelled"
        assert "one two".startswith(cancelled["output"][0]["content"][0]["text"])
        instance.wait_until(lambda: not instance.engine.running)
        instance.engine.paused = False
        for other in clients:
            assert ask(other, "POST", f"/{begun['id']}/cancel").json() == cancelled, "once is enough"
            assert ask(other, "GET", f"/{begun['id']}").json() == cancelled
        last = told(events_of(ask(http, "GET", f"/{begun['id']}", params={"stream": "true"})))[-1]
        assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")


def test_only_what_runs_in_the_background_can_be_cancelled(keeper: Instance, client: openai.OpenAI) -> None:
    speak(keeper, TEXT)
    made = client.responses.create(model="small-model", input="hi")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(made.id)
    over = client.responses.create(model="small-model", input="hi", background=True)
    until(lambda: client.responses.retrieve(over.id).status == "completed")
    assert client.responses.cancel(over.id).status == "completed"


def test_a_deleted_response_is_gone_and_so_is_its_work(pair: tuple[Instance, list[httpx.Client]]) -> None:
    instance, (here, there) = pair
    speak_until(instance, 5, TEXT)
    begun = ask(here, "POST", json=body_of("words", **BACKGROUND)).json()
    instance.wait_until(lambda: instance.engine.paused)
    deleted = ask(there, "DELETE", f"/{begun['id']}").json()
    assert deleted == {"id": begun["id"], "object": "response", "deleted": True}
    instance.wait_until(lambda: not instance.engine.running)
    instance.engine.paused = False
    for http in (here, there):
        assert ask(http, "GET", f"/{begun['id']}").status_code == 404
        assert ask(http, "DELETE", f"/{begun['id']}").status_code == 404


def test_what_is_not_to_be_stored_is_not(keeper: Instance, http: httpx.Client) -> None:
    speak(keeper, TEXT)
    for more in ({}, {"stream": True}):
        answer = ask(http, "POST", json=body_of("words", store=False, **more))
        response_id = answer.text.split('"id":"')[1].split('"')[0]
        assert response_id.startswith("resp_")
        assert ask(http, "GET", f"/{response_id}").status_code == 404
        assert ask(http, "DELETE", f"/{response_id}").status_code == 404


def test_a_client_that_was_cut_off_comes_back_by_the_number_of_its_last_event(
    keeper: Instance, http: httpx.Client
) -> None:
    speak_until(keeper, 5, TEXT)
    with http.stream("POST", PATH, json=body_of("words", stream=True)) as response:
        lines = response.iter_lines()
        while "output_text.delta" not in next(lines):
            pass
        keeper.wait_until(lambda: keeper.engine.paused)
        [held] = keeper.engine.running.values()
        response_id = f"resp_{held.submit.request_id.rpartition('-')[0]}"
    keeper.wait_until(lambda: not keeper.engine.running)
    keeper.engine.paused = False
    assert status_of(http, response_id) == "incomplete", "it has stopped, for nobody reads it"
    rest = told(events_of(ask(http, "GET", f"/{response_id}", params={"stream": "true", "starting_after": "4"})))
    assert rest[0]["sequence_number"] == 5 and rest[-1]["type"] == "response.completed"
    assert rest[-1]["response"]["output"][0]["content"][0]["text"] == "one two three"
    assert status_of(http, response_id) == "completed"


@pytest.mark.parametrize("named", [{"model": "small-model"}, {"model": None}, {"model": ""}, {}])
def test_a_cut_stream_goes_on_although_what_it_goes_on_from_is_deleted(
    keeper: Instance, http: httpx.Client, named: dict[str, str | None]
) -> None:
    speak(keeper, TEXT)
    earlier = ask(http, "POST", json=body_of("words")).json()
    speak_until(keeper, 5, TEXT)
    body = body_of("words", stream=True, previous_response_id=earlier["id"])
    del body["model"]
    body |= named
    with http.stream("POST", PATH, json=body) as response:
        lines, line = response.iter_lines(), ""
        while not (line.startswith("id: ") and line.rpartition(";")[0].endswith(";4")):
            line = next(lines)
        keeper.wait_until(lambda: keeper.engine.paused)
    cursor = line.removeprefix("id: ")
    assert ask(http, "DELETE", f"/{earlier['id']}").json()["deleted"]
    keeper.engine.paused = False
    again = ask(http, "POST", json=body, headers={"Last-Event-ID": cursor})
    assert again.status_code == 200, again.text
    events = told(events_of(again))
    assert events[-1]["type"] == "response.completed"
    other = ask(http, "POST", json=body | {"input": "else"}, headers={"Last-Event-ID": cursor})
    assert other.status_code == 404, "another request is no part of that stream"


def test_a_background_response_whose_process_dies_is_taken_up_by_the_next_that_is_asked(
    thinker: PreparedModel,
) -> None:
    with running(thinker, num_api=2, has_own_ports=True) as instance:
        victim, other = instance.children
        speak_until(instance, 5, TEXT)
        begun = httpx.post(victim.url + PATH, json=body_of("words", **BACKGROUND), verify=NO_CERTIFICATES).json()
        instance.wait_until(lambda: instance.engine.paused)
        instance.kill_api(victim)
        instance.engine.paused = False
        with httpx.Client(base_url=other.url, timeout=30, verify=NO_CERTIFICATES) as http:
            until(lambda: status_of(http, begun["id"]) == "completed")
            whole = ask(http, "GET", f"/{begun['id']}").json()
    assert whole["output"][0]["content"][0]["text"] == "one two three"


def test_what_is_taken_up_again_is_kept_as_long_as_any_response_until_an_engine_comes(thinker: PreparedModel) -> None:
    # Nothing is kept here of a stream that is only left.
    with running(thinker, ApiConfig(detach_ttl_s=0.0), has_engine=False) as instance:
        attempt = attempt_of(PATH, body_of("words", max_output_tokens=5, **BACKGROUND))
        left = QueryResponse(action="take_up", record=StreamRecord(attempt=attempt))
        asked = httpx.post(
            instance.url + RESPONSE_PATH,
            content=msgspec.msgpack.encode(left),
            headers=MSGPACK_BODY,
            timeout=30,
            verify=NO_CERTIFICATES,
        )
        assert asked.status_code == 200, asked.text
        assert find(instance.url, attempt.request_id) == left.record
        instance.start_engine()
        with httpx.Client(base_url=instance.url, timeout=30, verify=NO_CERTIFICATES) as http:
            until(lambda: status_of(http, PREFIX + attempt.request_id) == "incomplete")


def test_a_response_is_kept_for_a_while_only(thinker: PreparedModel) -> None:
    with running(thinker, ApiConfig(response_ttl_s=0.2)) as instance:
        speak(instance, TEXT)
        with httpx.Client(base_url=instance.url, timeout=30, verify=NO_CERTIFICATES) as http:
            made = ask(http, "POST", json=body_of("words")).json()
            until(lambda: ask(http, "GET", f"/{made['id']}").status_code == 404)


def test_each_caller_has_its_own_responses(thinker: PreparedModel) -> None:
    with keyed(thinker) as instance, httpx.Client(base_url=instance.url, timeout=30, verify=NO_CERTIFICATES) as http:
        speak(instance, TEXT)
        made = ask(http, "POST", json=body_of("words"), headers=route_access.header("user")).json()
        path = f"/{made['id']}"
        unknown: dict[str, Any] = ask(http, "GET", f"/resp_{'ab' * 16}", headers=route_access.header("other")).json()
        for method, more in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            theirs = ask(http, method, path + more, headers=route_access.header("other"))
            assert theirs.status_code == 404
            assert theirs.text.replace(made["id"], "") == str_of(unknown).replace(f"resp_{'ab' * 16}", "")
        goes_on = body_of("words", previous_response_id=made["id"])
        assert ask(http, "POST", json=goes_on, headers=route_access.header("other")).status_code == 404
        for name in ("user", "admin"):
            assert ask(http, "GET", path, headers=route_access.header(name)).json() == made


def str_of(answer: dict[str, Any]) -> str:
    return httpx.Response(200, json=answer).text
