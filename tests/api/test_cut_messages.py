"""Answers with calls, thoughts and structure, cut behind any event: the continuation is what would have followed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from onward.config import ApiConfig
from onward.proto.cursor import format_cursor
from onward.proto.router import ChoiceSnapshot
from tests.api.cut_streams import cuts, events_of, fresh, given_by, in_bursts, is_between, later, told, uncached
from tests.api.instance import Instance
from tests.api.reader import NO_CERTIFICATES, num_choices, read
from tests.api.responses.reading import CUSTOM_CALL, LARK
from tests.api.routed import hear, post
from tests.api.small_model import END_OF_THOUGHT, THINK
from tests.api.thinking_model import (
    CALL,
    FORCED_CALL,
    SECOND_CALL,
    TOOL,
    prepare,
    speak,
    thinking_instance,
    tokens_of,
)

CHAT = "/v1/chat/completions"
TOOLS = {"tools": [TOOL]}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
SCHEMA = TOOL["function"]["parameters"]
STRUCTURE = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
LARK_FORMAT = {"type": "grammar", "grammar": {"syntax": "lark", "definition": LARK["definition"]}}
CUSTOM = {"tools": [TOOL, {"type": "custom", "custom": {"name": "p", "format": LARK_FORMAT}}]}
NAMED = {"type": "function", "function": {"name": "f"}}

KINDS: dict[str, tuple[dict[str, Any], list[list[int]]]] = {
    "a call behind words": (TOOLS, [tokens_of("né ", CALL)]),
    "two calls, scored": (TOOLS | {"logprobs": True, "top_logprobs": 1}, [tokens_of(CALL, "\n", SECOND_CALL, "!")]),
    "one call of two": (TOOLS | {"parallel_tool_calls": False}, [tokens_of(CALL, SECOND_CALL)]),
    "calls that must be": (TOOLS | {"tool_choice": "required"}, [tokens_of(f"[{FORCED_CALL}, {FORCED_CALL}]")]),
    "the call that must be": (TOOLS | {"tool_choice": NAMED}, [tokens_of(f"[{FORCED_CALL}]")]),
    "four choices with tools": (
        TOOLS | {"n": 4, "max_tokens": 60},
        [tokens_of(CALL), tokens_of("wörds"), tokens_of('<tool_call>{"x'), tokens_of("<tool_call>{}</t")],
    ),
    "a call that is cut off": (TOOLS | {"max_tokens": 40}, [tokens_of(CALL)]),
    "thoughts": (THINKING, [tokens_of("hm é", END_OF_THOUGHT, "\n\nyes")]),
    "thoughts of its own": ({"n": 2}, [tokens_of(THINK, "\na", END_OF_THOUGHT, "b"), tokens_of("a<think>b")]),
    "thoughts that do not end": (THINKING | {"max_tokens": 5}, [tokens_of("on and on")]),
    "a budget of thoughts": (THINKING | {"thinking_budget": 3}, [tokens_of("never ends")]),
    "a call behind thoughts": (THINKING | TOOLS, [tokens_of("hm", END_OF_THOUGHT, CALL)]),
    "a custom call": (CUSTOM | {"logprobs": True, "top_logprobs": 1}, [tokens_of("né ", CUSTOM_CALL, CALL)]),
    "a custom call that is cut off": (CUSTOM | {"max_tokens": 50}, [tokens_of(CUSTOM_CALL)]),
    "an input that must be": (
        CUSTOM | {"tool_choice": {"type": "custom", "custom": {"name": "p"}}},
        [tokens_of("go né")],
    ),
    "structure": (STRUCTURE | {"n": 2}, [tokens_of('{"a": 1}'), tokens_of('{"a": 2}')]),
    "structure behind thoughts": (STRUCTURE | THINKING, [tokens_of("{hm", END_OF_THOUGHT, '{"a": 1}')]),
    "structure behind a budget": (
        STRUCTURE | THINKING | {"thinking_budget": 2},
        [tokens_of("{hm", END_OF_THOUGHT, '{"a": 1}')],
    ),
}


def body_of(kind: str, **more: Any) -> dict[str, Any]:
    fields = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "seed": 7}
    return {"model": "small-model"} | fields | KINDS[kind][0] | more


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("thinking-model")


@pytest.fixture(scope="module")
def keeper(folder: Path) -> Iterator[Instance]:
    """It keeps streams whose client has gone."""
    with thinking_instance(prepare(folder)) as instance:
        yield instance


@pytest.fixture(scope="module")
def repeater(folder: Path) -> Iterator[Instance]:
    """It keeps no stream, but makes the same tokens from the same seed."""
    exact = msgspec.structs.replace(prepare(folder), quantization="int8")
    with thinking_instance(exact, ApiConfig(detach_ttl_s=0)) as instance:
        yield instance


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_comes_back_reads_on(keeper: Instance, repeater: Instance, kind: str) -> None:
    body = body_of(kind, stream=True, stream_options={"include_usage": True})
    for server, again in ((keeper, None), (repeater, body)):
        speak(server, *KINDS[kind][1])
        events = events_of(httpx.post(server.url + CHAT, json=body, timeout=30, verify=NO_CERTIFICATES))
        whole = told(events, body)
        assert all(reason in ("stop", "length", "tool_calls") for reason in whole.reasons)
        # Who makes all tokens again takes longest: it is asked at some places only.
        for before, place in list(cuts(events))[:: 1 if again is None else 4]:
            headers = {"last-event-id": format_cursor(place)}
            method, url = "GET" if again is None else "POST", server.url + CHAT
            with in_bursts(server):
                rest = httpx.request(method, url, json=again, headers=headers, timeout=30, verify=NO_CERTIFICATES)
            assert told([*before, *events_of(rest)], body) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_another_instance_goes_on_for_a_router(keeper: Instance, kind: str) -> None:
    speak(keeper, *KINDS[kind][1])
    body = body_of(kind, stream=True, stream_options={"include_usage": True})
    first = fresh(CHAT, body)
    events = [one for one in events_of(post(keeper.url, first)) if not is_between(one)]
    whole = told(events, body)
    for before, place in cuts(events):
        attempt = later(first, choices=given_by(before, num_choices(body)), usage_sent=place.usage_sent)
        with in_bursts(keeper):
            rest = [one for one in events_of(post(keeper.url, attempt)) if not is_between(one)]
        assert told([*before, *rest], body) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_answer_does_not_show_where_it_was_cut(keeper: Instance, kind: str) -> None:
    speak(keeper, *KINDS[kind][1])
    body = body_of(kind)
    asked = fresh(CHAT, body)
    first = hear(keeper.url, asked)
    tokens = first.tokens(num_choices(body))
    ends = [one.finish_reason for one in first.cursors[-1].choices]
    assert "tool_calls" not in ends, "a word for clients, and for nobody else"
    for at in range(1, max(map(len, tokens)) + 1):
        is_told = bool(at % 2)
        choices = [
            ChoiceSnapshot(one[:at], end if is_told and at >= len(one) else None)
            for one, end in zip(tokens, ends, strict=True)
        ]
        with in_bursts(keeper):
            again = hear(keeper.url, later(asked, choices=choices, num_cached_tokens=3))
        assert uncached(again.answer) == uncached(first.answer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_and_a_whole_answer_say_the_same(keeper: Instance, kind: str) -> None:
    speak(keeper, *KINDS[kind][1])
    told_in = []
    for more in ({"stream": True}, {}):
        body = body_of(kind, **more)
        response = httpx.post(keeper.url + CHAT, json=body, timeout=30, verify=NO_CERTIFICATES)
        assert response.status_code == 200, response.text
        choices = read(response, body).choices
        calls = [[(call["name"], call["arguments"]) for call in one.calls.values()] for one in choices]
        told_in.append((calls, [(one.text, one.reasoning, one.finish_reason) for one in choices]))
    assert told_in[0] == told_in[1]
