"""Whatever a request asks for, a stream that is cut behind any event and gone on with says what it would have said uncut.

The first stream's own events say what its client had by then, so nothing here knows how an answer comes about."""

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from onward.config import ApiConfig
from onward.proto.cursor import format_cursor
from onward.proto.model import PreparedModel
from onward.proto.router import ChoiceSnapshot
from onward.proto.sampling_params import SamplingParams
from tests.api.cut_streams import cuts, events_of, fresh, given_by, in_bursts, is_between, later, told, uncached
from tests.api.instance import Instance, running
from tests.api.reader import NO_CERTIFICATES, num_choices
from tests.api.routed import hear, post
from tests.api.small_model import EOS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = {"messages": [{"role": "user", "content": "hé"}]}
# A stop string with a false start before it, an end token behind characters of several bytes, no end at all.
OUTPUTS = [list("né st😀 stop!".encode()), [*"日本".encode(), *b" st", EOS], list(b"goes on"), list(b"a\nstop")]
ENDS = {"stop": "stop", "max_tokens": 14, "seed": 7}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5, "min_tokens": 3}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "four choices with penalties": (CHAT, MESSAGES | PENALTIES | {"n": 4, "logprobs": True, "top_logprobs": 2}),
    "a chat with its stop strings": (CHAT, MESSAGES | {"n": 4, "include_stop_str_in_output": True}),
    "a chat with token ids": (CHAT, MESSAGES | {"n": 2, "return_token_ids": True}),
    "a chat of token ids": (CHAT, {"messages": [], "prompt_token_ids": [97, 98]}),
    "an open message": (CHAT, MESSAGES | {"continue_final_message": True, "chat_template_kwargs": {"x": 1}}),
    "a chat with stop patterns": (CHAT, MESSAGES | {"n": 4, "stop_regex": ["[o-t]{2,4}!", "e. o"], "stop": ["a\nst"]}),
    "shown matches of stop patterns": (
        COMPLETIONS,
        {"prompt": "x", "n": 4, "stop_regex": "s.o", "include_stop_str_in_output": True},
    ),
    "a chat with echo": (
        CHAT,
        {"messages": [*MESSAGES["messages"], {"role": "assistant", "content": "né"}], "echo": True},
    ),
    "echo of a message that goes on": (
        CHAT,
        {
            "messages": [*MESSAGES["messages"], {"role": "assistant", "content": "né"}],
            "echo": True,
            "continue_final_message": True,
            "n": 2,
        },
    ),
    "several prompts": (COMPLETIONS, {"prompt": ["one", "two"], "n": 2, "prompt_logprobs": 1}),
    "several prompts as ids": (COMPLETIONS, {"prompt": [[97, 98], [99]], "logprobs": 2, "return_token_ids": True}),
    "echo": (COMPLETIONS, {"prompt": "où ", "echo": True, "n": 2}),
    "echo of several, scored": (COMPLETIONS, {"prompt": ["où", "x"], "echo": True, "logprobs": 2, "n": 2}),
    "echo with both kinds of logprobs": (
        COMPLETIONS,
        {"prompt": ["où", "x"], "echo": True, "logprobs": 1, "prompt_logprobs": 3, "n": 2},
    ),
    "echo alone": (COMPLETIONS, {"prompt": ["où", "x"], "echo": True, "max_tokens": 0, "n": 2}),
    "echo alone, scored": (COMPLETIONS, {"prompt": "où", "echo": True, "max_tokens": 0, "logprobs": 2}),
    "a stop token that is shown": (
        COMPLETIONS,
        {"prompt": "x", "n": 4, "stop_token_ids": [10], "include_stop_str_in_output": True},
    ),
}
USAGE = {"include_usage": True}
WHOLE_ONLY: dict[str, tuple[str, dict[str, Any]]] = {
    "the best of several": (COMPLETIONS, {"prompt": ["one", "two"], "best_of": 2, "prompt_logprobs": 1}),
    "the best, scored, echoed": (COMPLETIONS, {"prompt": "one", "n": 2, "best_of": 4, "logprobs": 1, "echo": True}),
}


def recite(prompt: Any, sampling: SamplingParams, tokens: Any) -> int:
    output = OUTPUTS[sampling.choice_index]
    return output[len(tokens)] if len(tokens) < len(output) else 33


def body_of(fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "small-model"} | ENDS | fields | more


@pytest.fixture(scope="module")
def exact_instance(model: PreparedModel) -> Iterator[Instance]:
    """It keeps no stream, but makes the same tokens from the same seed."""
    exact = msgspec.structs.replace(model, quantization="int8")
    with running(exact, ApiConfig(detach_ttl_s=0)) as instance:
        instance.engine.choose = recite
        yield instance


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_comes_back_reads_on(instance: Instance, exact_instance: Instance, kind: str) -> None:
    instance.engine.choose = recite
    path, fields = KINDS[kind]
    body = body_of(fields, stream=True, stream_options=USAGE | {"continuous_usage_stats": True})
    for server, again in ((instance, None), (exact_instance, body)):
        url = server.url + path
        events = events_of(httpx.post(url, json=body, timeout=30, verify=NO_CERTIFICATES))
        whole = told(events, body)
        assert all(reason in ("stop", "length") for reason in whole.reasons)
        for before, place in cuts(events):
            headers = {"last-event-id": format_cursor(place)}
            method = "GET" if again is None else "POST"
            with in_bursts(server):
                rest = httpx.request(method, url, json=again, headers=headers, timeout=30, verify=NO_CERTIFICATES)
            assert told([*before, *events_of(rest)], body) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_another_instance_goes_on_for_a_router(instance: Instance, kind: str) -> None:
    instance.engine.choose = recite
    path, fields = KINDS[kind]
    body = body_of(fields, stream=True, stream_options=USAGE)
    first = fresh(path, body)
    events = [one for one in events_of(post(instance.url, first)) if not is_between(one)]
    whole = told(events, body)
    for before, place in cuts(events):
        choices = given_by(before, num_choices(body))
        attempt = later(first, choices=choices, usage_sent=place.usage_sent)
        with in_bursts(instance):
            rest = [one for one in events_of(post(instance.url, attempt)) if not is_between(one)]
        assert told([*before, *rest], body) == whole


@pytest.mark.parametrize("kind", KINDS | WHOLE_ONLY)
def test_a_whole_answer_does_not_show_where_it_was_cut(instance: Instance, kind: str) -> None:
    instance.engine.choose = recite
    path, fields = (KINDS | WHOLE_ONLY)[kind]
    body = body_of(fields)
    asked = fresh(path, body)
    first = hear(instance.url, asked)
    num = num_choices(body) * body.get("best_of", 1) // (body.get("n", 1) if "best_of" in body else 1)
    assert first.answer is not None and len(first.cursors[0].choices) == num
    tokens = first.tokens(num)
    ends = [one.finish_reason for one in first.cursors[-1].choices]
    for at in range(1, max(map(len, tokens)) + 1):
        for is_told in (False, True):
            choices = [
                ChoiceSnapshot(one[:at], end if is_told and at >= len(one) else None)
                for one, end in zip(tokens, ends, strict=True)
            ]
            with in_bursts(instance):
                again = hear(instance.url, later(asked, choices=choices, num_cached_tokens=3))
            assert uncached(again.answer) == uncached(first.answer)
