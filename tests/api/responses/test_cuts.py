"""Responses that are cut behind any event: the continuation has the same events, with the same numbers and ids."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import pytest

from onward.proto.cursor import format_cursor
from onward.proto.engine import ErrorInfo
from onward.proto.router import ChoiceSnapshot
from tests.api.cut_streams import cuts, events_of, fresh, given_by, in_bursts, is_between, later
from tests.api.instance import Instance
from tests.api.responses.reading import (
    KINDS,
    PATH,
    ask,
    attempted,
    body_of,
    check_event,
    check_response,
    data_of,
    speak_until,
    told,
)
from tests.api.routed import heard_in
from tests.api.thinking_model import speak, tokens_of


def streamed(keeper: Instance, http: httpx.Client, kind: str) -> list[str]:
    speak(keeper, KINDS[kind][1])
    return events_of(ask(http, "POST", json=body_of(kind, stream=True)))


@pytest.mark.parametrize("kind", KINDS)
def test_every_event_is_as_the_openai_package_says_and_the_last_one_has_the_response(
    keeper: Instance, http: httpx.Client, kind: str
) -> None:
    events = streamed(keeper, http, kind)
    fields = [data_of(event) for event in events]
    for one in fields:
        check_event(one)
    assert [one["sequence_number"] for one in fields] == list(range(len(fields)))
    response = check_response(fields[-1]["response"])
    assert fields[-1]["type"] == f"response.{response.status}"
    done = [one["item"] for one in fields if one["type"] == "response.output_item.done"]
    assert fields[-1]["response"]["output"] == done
    assert fields[-1]["response"] == ask(http, "GET", f"/{response.id}").json(), "and it is kept"


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_response_is_what_the_last_event_has(keeper: Instance, http: httpx.Client, kind: str) -> None:
    last = data_of(streamed(keeper, http, kind)[-1])["response"]
    whole = ask(http, "POST", json=body_of(kind)).json()
    check_response(whole)
    own, other = whole.pop("id").removeprefix("resp_"), last.pop("id").removeprefix("resp_")
    for response in (whole, last):
        del response["created_at"], response["completed_at"]
    for item in [*whole["output"], *last["output"]]:
        item.pop("call_id", None)
        item["id"] = item["id"].replace(own, "").replace(other, "")
    assert whole == last


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_comes_back_is_told_the_events_behind_its_last_one(
    keeper: Instance, http: httpx.Client, kind: str
) -> None:
    events = streamed(keeper, http, kind)
    whole = told(events)
    response_id = whole[0]["response"]["id"]
    for at in range(len(whole)):
        query = {"stream": "true", "starting_after": str(at)}
        rest = events_of(ask(http, "GET", f"/{response_id}", params=query))
        assert told(rest) == whole[at + 1 :]
    assert told(events_of(ask(http, "GET", f"/{response_id}", params={"stream": "true"}))) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_goes_on_by_its_last_event_id(keeper: Instance, http: httpx.Client, kind: str) -> None:
    events = streamed(keeper, http, kind)
    whole = told(events)
    for before, place in cuts(events):
        rest = ask(http, "GET", headers={"last-event-id": format_cursor(place)})
        assert told([*before, *events_of(rest)]) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_another_instance_goes_on_for_a_router(keeper: Instance, http: httpx.Client, kind: str) -> None:
    speak(keeper, KINDS[kind][1])
    first = fresh(PATH, body_of(kind, stream=True))
    events = [one for one in events_of(attempted(http, first)) if not is_between_for_responses(one)]
    whole = told(events)
    for before, _ in cuts(events):
        attempt = later(first, choices=given_by(before, 1), num_cached_tokens=3)
        with in_bursts(keeper):
            rest = [one for one in events_of(attempted(http, attempt)) if not is_between_for_responses(one)]
        assert told([*before, *rest]) == whole


def is_between_for_responses(event: str) -> bool:
    return is_between(event) and not event.startswith(": held\n")


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_response_does_not_show_where_it_was_cut(keeper: Instance, http: httpx.Client, kind: str) -> None:
    speak(keeper, KINDS[kind][1])
    asked = fresh(PATH, body_of(kind))
    first = heard_in(attempted(http, asked).text)
    tokens, end = first.tokens(1)[0], first.cursors[-1].choices[0].finish_reason
    for at in range(1, len(tokens) + 1):
        given = ChoiceSnapshot(tokens[:at], end if at == len(tokens) and at % 2 else None)
        with in_bursts(keeper):
            again = heard_in(attempted(http, later(asked, choices=[given], num_cached_tokens=3)).text)
        assert again.answer is not None and first.answer is not None
        answers = [msgspec.json.decode(heard.answer) for heard in (again, first)]
        for answer in answers:
            del answer["completed_at"]  # each of the two was completed at its own time
        assert answers[0] == answers[1]


def test_a_stream_ends_without_a_mark_that_is_no_json(keeper: Instance, http: httpx.Client) -> None:
    response = ask(http, "POST", json=body_of("words", stream=True))
    assert "[DONE]" not in response.text


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    ("kind", "store"),
    [("words", True), ("words, scored", True), ("words, scored", False)],
    ids=["words", "words, scored", "words, scored, not stored"],
)
def test_a_stream_that_fails_after_a_client_came_back_has_the_next_number_and_the_output_so_far(
    keeper: Instance, http: httpx.Client, kind: str, method: str, store: bool
) -> None:
    """Also before the logprobs of the tokens that the client has are computed again, which are kept with stored
    responses only."""
    request = body_of(kind, stream=True, store=store)
    speak_until(keeper, 8, tokens_of("one two three"))
    events, num_places = [""], 0
    with http.stream("POST", PATH, json=request) as first:
        lines = first.iter_lines()
        while num_places < 4 or events[-1]:
            line = next(lines)
            num_places += line.startswith("id: ")
            events[-1:] = [events[-1] + line + "\n"] if line else [events[-1], ""]
    events = [event.rstrip("\n") for event in events[:-1]]
    cursor = next(line[4:] for line in events[-1].split("\n") if line.startswith("id: "))
    keeper.wait_until(lambda: not keeper.engine.running)
    keeper.engine.paused = True
    with ThreadPoolExecutor(1) as threads:
        body = {"json": request} if method == "POST" else {}
        asking = threads.submit(ask, http, method, headers={"Last-Event-ID": cursor}, **body)
        keeper.wait_until(lambda: bool(keeper.engine.running))
        keeper.lose_requests(1, ErrorInfo("crashed_worker", "the worker is down", 500, False))
        fields = [data_of(event) for event in events_of(asking.result(20))]
    keeper.engine.refusal, keeper.engine.paused = None, False
    text = "".join(one["delta"] for one in [*map(data_of, events), *fields] if one["type"].endswith("text.delta"))
    numbers = [data_of(event)["sequence_number"] for event in events] + [one["sequence_number"] for one in fields]
    assert numbers == list(range(len(numbers)))
    assert fields[-1]["type"] == "response.failed"
    [item] = fields[-1]["response"]["output"]
    assert item["content"][0]["text"] == text != ""
