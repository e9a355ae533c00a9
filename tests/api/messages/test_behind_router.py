"""Messages at a real router in front of two real api processes: a stream continues when an instance is killed, and every
error has Anthropic's form."""

import asyncio
from typing import Any

import pytest

from onward.proto.model import PreparedModel
from tests.api.instance import Instance, running
from tests.api.messages.reading import (
    COUNT_PATH,
    KINDS,
    MODEL,
    PATH,
    THINKING,
    TOOLS,
    body_of,
    built,
    check_error_body,
    check_event,
    check_message,
    data_of,
    told,
    without_cache_usage,
)
from tests.api.responses.reading import speak_until
from tests.api.responses.test_behind_router import PATIENCE_S, _is, events_in, run, until
from tests.api.thinking_model import CALL, speak, tokens_of
from tests.router.harness import Router

TEXT = tokens_of("one two thrée")


@pytest.mark.parametrize("kind", ["words", "a call behind words", "a call behind thinking", "calls that must be"])
def test_a_routed_message_equals_a_direct_one(two: list[Instance], kind: str) -> None:
    async def scenario(router: Router) -> None:
        for instance in two:
            speak(instance, KINDS[kind][1])
        answer = await router.post(body_of(kind, stream=True), path=PATH)
        assert b"[DONE]" not in answer.body, "every event is JSON"
        events = told(events_in(answer))
        for event in events:
            check_event(event)
        whole = without_cache_usage((await router.post(body_of(kind), path=PATH)).json)
        check_message(whole)
        streamed = built(events)
        for message in (whole, streamed):
            message.pop("id")
            for block in message["content"]:
                block.pop("id", None)
        assert streamed == whole

    run(two, scenario)


def test_a_message_with_options_of_a_chat_stream_ends_as_any_other(two: list[Instance]) -> None:
    """Messages have no usage chunk, whatever the options ask for, so the router must not wait for one."""

    async def scenario(router: Router) -> None:
        for instance in two:
            speak(instance, TEXT)
        body = body_of("words", stream=True, stream_options={"include_usage": True})
        events = told(events_in(await router.post(body, path=PATH)))
        assert built(events)["content"] == [{"type": "text", "text": "one two thrée", "citations": None}]

    run(two, scenario)


@pytest.mark.parametrize(
    ("kind", "at"),
    [("words", 5), ("a call behind words", 10), ("a call behind words", 45), ("a call behind thinking", 1)],
)
def test_a_stream_whose_instance_is_killed_continues_with_the_next_event(
    thinker: PreparedModel, kind: str, at: int
) -> None:
    """Mid-text, before a call, in the middle of its arguments, and in the thinking."""
    tokens = KINDS[kind][1]
    with running(thinker, name="a") as one, running(thinker, name="b") as other:
        pair = [one, other]

        async def scenario(router: Router) -> None:
            for instance in pair:
                speak(instance, tokens)
            undisturbed = built(told(events_in(await router.post(body_of(kind, stream=True), path=PATH))))
            for instance in pair:
                speak_until(instance, at, tokens)
            asking = asyncio.create_task(router.post(body_of(kind, stream=True), path=PATH))
            await until(lambda: _is(any(instance.engine.paused for instance in pair)))
            [victim] = [instance for instance in pair if instance.engine.paused]
            for instance in pair:
                speak(instance, tokens)
            await asyncio.to_thread(victim.kill_api, victim.children[0])
            message = built(told(events_in(await asking)))
            for answer in (message, undisturbed):
                answer.pop("id")
                for block in answer["content"]:
                    block.pop("id", None)
            assert message == undisturbed
            [survivor] = [instance for instance in pair if instance is not victim]
            assert survivor.engine.submits[-1].generated_token_ids, "it has gone on, and not begun again"
            victim.engine.paused = False

        run(pair, scenario)


def test_a_router_that_makes_the_prompt_makes_the_same_one(two: list[Instance]) -> None:
    instance = two[0]
    talk: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "ok"}]},
    ]
    body = body_of("words", messages=talk, system="be brief", **TOOLS, **THINKING)
    prompts: list[list[int]] = []

    async def scenario(router: Router) -> None:
        speak(instance, tokens_of(CALL))
        assert (await router.post(body, path=PATH)).status == 200
        prompts.append(instance.engine.submits[-1].prompt_token_ids)
        count = await router.post({**body, "max_tokens": None}, path=COUNT_PATH)
        assert count.json == {"input_tokens": len(prompts[-1])}

    for policy in ("least_loaded", "prefix"):
        run([instance], scenario, policy)
    assert prompts[0] == prompts[1]


def test_when_no_instance_is_left_the_stream_ends_with_the_error(thinker: PreparedModel) -> None:
    with running(thinker, name="a") as instance:

        async def scenario(router: Router) -> None:
            speak_until(instance, 6, TEXT)
            asking = asyncio.create_task(router.post(body_of("words", stream=True, deadline_ms=3000), path=PATH))
            await until(lambda: _is(instance.engine.paused))
            await asyncio.to_thread(instance.kill_api, instance.children[0])
            *events, last = events_in(await asyncio.wait_for(asking, PATIENCE_S))
            error = data_of(last)
            assert check_error_body(error)["code"] == "deadline_exceeded"
            assert error["error"]["type"] == "timeout_error"
            assert error["partial"]["resume"]["generated_token_ids"] == TEXT[: len(events) - 3]

        run([instance], scenario)


@pytest.mark.parametrize("is_streaming", [True, False])
def test_an_aborted_message_has_no_stop_reason_and_can_be_resumed(two: list[Instance], is_streaming: bool) -> None:
    async def scenario(router: Router) -> None:
        for instance in two:
            speak_until(instance, 6, TEXT)
        headers = {"x-request-id": "label"}
        body = body_of("words", stream=is_streaming)
        asking = asyncio.create_task(router.post(body, path=PATH, headers=headers))
        await until(lambda: _is(any(instance.engine.paused for instance in two)))
        assert (await router.post({"ids": ["label"]}, path="/v1/abort")).json["aborted"] == ["label"]
        answer = await asking
        message = built(told(events_in(answer))) if is_streaming else answer.json
        assert answer.status == 200 and message["stop_reason"] is None
        generated = message["resume"]["generated_token_ids"]
        assert generated == TEXT[: len(generated)] != []
        for instance in two:
            instance.engine.paused = False
            speak(instance, TEXT)
        again = await router.post(body_of("words", **message["resume"]), path=PATH)
        assert again.json["content"] == [{"type": "text", "text": "one two thrée", "citations": None}]

    run(two, scenario)


def test_refusals_have_anthropic_s_form(two: list[Instance]) -> None:
    async def scenario(router: Router) -> None:
        for refused in (
            await router.post(body_of("words", temperature=9), path=PATH),
            await router.post({"messages": []}, path=PATH),
            await router.post({"model": MODEL, "messages": []}, path=COUNT_PATH),
            await router.post(body_of("words"), path=PATH, headers={"anthropic-version": "1"}),
        ):
            assert refused.status == 400
            assert check_error_body(refused.json)["type"] == "invalid_request_error"
        lost = await router.get(PATH, headers={"Last-Event-ID": "1;" + "0" * 32 + ";1600000000;7;1;3;0:1"})
        assert (lost.status, check_error_body(lost.json)["type"]) == (404, "not_found_error")

    run(two, scenario)
