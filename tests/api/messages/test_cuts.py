"""Messages that are cut behind any event: an attempt that resumes one sends the events that are missing, and no other."""

from typing import Any

import httpx
import msgspec
import pytest

from onward.proto.cursor import format_cursor
from onward.proto.router import ChoiceSnapshot
from tests.api.cut_streams import cuts, events_of, fresh, given_by, in_bursts, is_between, later
from tests.api.instance import Instance
from tests.api.messages.reading import (
    KINDS,
    OURS,
    PATH,
    body_of,
    built,
    check_event,
    check_message,
    data_of,
    is_event,
    told,
    without_cache_usage,
)
from tests.api.responses.reading import attempted
from tests.api.routed import heard_in
from tests.api.thinking_model import speak


def streamed(keeper: Instance, http: httpx.Client, kind: str) -> list[str]:
    speak(keeper, KINDS[kind][1])
    return events_of(http.post(PATH, json=body_of(kind, stream=True)))


def whole(keeper: Instance, http: httpx.Client, kind: str, **more: Any) -> dict[str, Any]:
    speak(keeper, KINDS[kind][1])
    answer = http.post(PATH, json=body_of(kind, **more))
    assert answer.status_code == 200, answer.text
    return without_cache_usage(answer.json())


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    """Without ids, which differ between two requests."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {name: value for name, value in message.items() if name != "id"} | {"content": content}


def client_events(events: list[str]) -> list[str]:
    return [event for event in events if not is_between(event) or event.startswith(": held\n")]


@pytest.mark.parametrize("kind", KINDS)
def test_every_event_is_as_the_anthropic_package_says_and_all_of_them_build_the_whole_message(
    keeper: Instance, http: httpx.Client, kind: str
) -> None:
    events = streamed(keeper, http, kind)
    for event in events:
        check_event(data_of(event))
    message = built(told(events))
    check_message(message, OURS)
    answer = whole(keeper, http, kind)
    check_message(answer, frozenset({"partial_json"}))
    assert comparable(message) == comparable(answer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_resumes_by_its_last_event_id(keeper: Instance, http: httpx.Client, kind: str) -> None:
    events = streamed(keeper, http, kind)
    for before, place in cuts(events):
        rest = http.get(PATH, headers={"last-event-id": format_cursor(place)})
        assert told([*before, *events_of(rest)]) == told(events)


@pytest.mark.parametrize("kind", KINDS)
def test_another_instance_continues_for_a_router(keeper: Instance, http: httpx.Client, kind: str) -> None:
    speak(keeper, KINDS[kind][1])
    first = fresh(PATH, body_of(kind, stream=True))
    events = client_events(events_of(attempted(http, first)))
    for before, _ in cuts(events):
        attempt = later(first, choices=given_by(before, 1), num_cached_tokens=3)
        with in_bursts(keeper):
            rest = client_events(events_of(attempted(http, attempt)))
        assert told([*before, *rest]) == told(events)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_message_does_not_show_where_it_was_cut(keeper: Instance, http: httpx.Client, kind: str) -> None:
    speak(keeper, KINDS[kind][1])
    asked = fresh(PATH, body_of(kind))
    first = heard_in(attempted(http, asked).text)
    tokens, end = first.tokens(1)[0], first.cursors[-1].choices[0].finish_reason
    for at in range(1, len(tokens) + 1):
        given = ChoiceSnapshot(tokens[:at], end if at == len(tokens) and at % 2 else None)
        with in_bursts(keeper):
            again = heard_in(attempted(http, later(asked, choices=[given], num_cached_tokens=3)).text)
        assert again.answer is not None and first.answer is not None
        assert msgspec.json.decode(again.answer) == msgspec.json.decode(first.answer)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_an_earlier_answer_are_returned_with_what_follows_them(
    keeper: Instance, http: httpx.Client, kind: str
) -> None:
    complete = comparable(built(told(streamed(keeper, http, kind))))
    [given] = given_by(events_of(attempted(http, fresh(PATH, body_of(kind, stream=True)))), 1)
    tokens = given.token_ids
    for at in range(1, len(tokens)):
        body = body_of(kind, generated_token_ids=tokens[:at])
        with in_bursts(keeper):
            assert comparable(whole(keeper, http, kind, generated_token_ids=tokens[:at])) == complete
            direct = events_of(http.post(PATH, json=body | {"stream": True}))
            routed = client_events(events_of(attempted(http, fresh(PATH, body | {"stream": True}))))
        for answer in (direct, [event for event in routed if is_event(event)]):
            assert comparable(built(told(answer))) == complete


def test_a_stream_ends_without_a_mark_that_is_no_json(keeper: Instance, http: httpx.Client) -> None:
    assert "[DONE]" not in "".join(streamed(keeper, http, "words"))
