"""Ollama's API at a real router in front of two real api processes: a stream continues when an instance is killed, and no
line is lost, repeated or cut."""

import asyncio
from typing import Any

import pytest

from onward.proto.model import PreparedModel
from tests.api.instance import Instance, running
from tests.api.ollama.reading import CHAT, GENERATE, KINDS, MODEL, TOOLS, body_of, built, lines_of
from tests.api.responses.reading import speak_until
from tests.api.responses.test_behind_router import PATIENCE_S, _is, run, until
from tests.api.thinking_model import CALL, speak, tokens_of
from tests.router.harness import Router

TEXT = tokens_of("one two thrée")


@pytest.mark.parametrize("kind", ["words", "a call behind words", "a call behind thinking", "structure"])
def test_a_routed_chat_equals_a_direct_one(two: list[Instance], kind: str) -> None:
    async def scenario(router: Router) -> None:
        for instance in two:
            speak(instance, KINDS[kind][1])
        streamed = await router.post(body_of(kind), path=CHAT)
        assert streamed.headers["content-type"] == "application/x-ndjson"
        whole = (await router.post(body_of(kind, stream=False), path=CHAT)).json
        assert built(lines_of(streamed.body)) == built([whole])

    run(two, scenario)


@pytest.mark.parametrize(
    ("kind", "at"),
    [("words", 5), ("a call behind words", 10), ("a call behind words", 45), ("a call behind thinking", 1)],
)
def test_a_stream_whose_instance_is_killed_continues(thinker: PreparedModel, kind: str, at: int) -> None:
    """Mid-text, before a call, in the middle of its arguments, and in the thinking."""
    tokens = KINDS[kind][1]
    with running(thinker, name="a") as one, running(thinker, name="b") as other:
        pair = [one, other]

        async def scenario(router: Router) -> None:
            for instance in pair:
                speak(instance, tokens)
            undisturbed = built(lines_of((await router.post(body_of(kind), path=CHAT)).body))
            for instance in pair:
                speak_until(instance, at, tokens)
            asking = asyncio.create_task(router.post(body_of(kind), path=CHAT))
            await until(lambda: _is(any(instance.engine.paused for instance in pair)))
            [victim] = [instance for instance in pair if instance.engine.paused]
            for instance in pair:
                speak(instance, tokens)
            await asyncio.to_thread(victim.kill_api, victim.children[0])
            assert built(lines_of((await asking).body)) == undisturbed
            [survivor] = [instance for instance in pair if instance is not victim]
            assert survivor.engine.submits[-1].generated_token_ids, "it has gone on, and not begun again"
            victim.engine.paused = False

        run(pair, scenario)


@pytest.mark.parametrize(("is_raw", "is_streaming"), [(False, True), (True, True), (True, False)])
def test_a_generated_text_whose_instance_is_killed_continues(
    thinker: PreparedModel, is_raw: bool, is_streaming: bool
) -> None:
    body = {"model": MODEL, "prompt": "hi", "raw": is_raw, "options": {"seed": 7}, "stream": is_streaming}
    with running(thinker, name="a") as one, running(thinker, name="b") as other:
        pair = [one, other]

        async def scenario(router: Router) -> None:
            for instance in pair:
                speak_until(instance, 6, TEXT)
            asking = asyncio.create_task(router.post(body, path=GENERATE))
            await until(lambda: _is(any(instance.engine.paused for instance in pair)))
            [victim] = [instance for instance in pair if instance.engine.paused]
            for instance in pair:
                speak(instance, TEXT)
            await asyncio.to_thread(victim.kill_api, victim.children[0])
            answer = await asking
            lines = lines_of(answer.body) if is_streaming else [answer.json]
            assert built(lines)["content"] == "one two thrée"
            victim.engine.paused = False

        run(pair, scenario)


def test_when_no_instance_is_left_the_stream_ends_with_the_error(thinker: PreparedModel) -> None:
    with running(thinker, name="a") as instance:

        async def scenario(router: Router) -> None:
            speak_until(instance, 6, TEXT)
            asking = asyncio.create_task(router.post(body_of("words", deadline_ms=3000), path=CHAT))
            await until(lambda: _is(instance.engine.paused))
            await asyncio.to_thread(instance.kill_api, instance.children[0])
            answer = await asyncio.wait_for(asking, PATIENCE_S)
            *begun, last = answer.body.splitlines()
            assert b"".join(begun).count(b'"done":false') == len(begun) > 0
            assert last.startswith(b'{"error":"') and b"deadline" in last

        run([instance], scenario)


@pytest.mark.parametrize("is_streaming", [True, False])
def test_an_aborted_chat_says_so(two: list[Instance], is_streaming: bool) -> None:
    async def scenario(router: Router) -> None:
        for instance in two:
            speak_until(instance, 6, TEXT)
        body = body_of("words", stream=is_streaming)
        asking = asyncio.create_task(router.post(body, path=CHAT, headers={"x-request-id": "label"}))
        await until(lambda: _is(any(instance.engine.paused for instance in two)))
        assert (await router.post({"ids": ["label"]}, path="/v1/abort")).json["aborted"] == ["label"]
        answer = await asking
        lines = lines_of(answer.body) if is_streaming else [answer.json]
        assert (answer.status, built(lines)["done_reason"]) == (200, "abort")

    run(two, scenario)


def test_a_router_that_makes_the_prompt_makes_the_same_one(two: list[Instance]) -> None:
    instance = two[0]
    talk: list[Any] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "thinking": "hm", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "tool_name": "f", "content": "ok"},
    ]
    prompts: list[list[int]] = []

    async def scenario(router: Router) -> None:
        speak(instance, tokens_of(CALL))
        assert (await router.post(body_of("words", messages=talk, **TOOLS), path=CHAT)).status == 200
        prompts.append(instance.engine.submits[-1].prompt_token_ids)

    for policy in ("least_loaded", "prefix"):
        run([instance], scenario, policy)
    assert prompts[0] == prompts[1]


def test_models_and_vectors_are_those_of_an_instance(two: list[Instance]) -> None:
    async def scenario(router: Router) -> None:
        for path in ("/api/tags", "/api/ps", "/api/version"):
            direct = await _get(router, two[0].url + path)
            assert (await router.get(path)).json == direct
        assert [one["name"] for one in (await router.get("/api/tags")).json["models"]] == [MODEL]
        shown = (await router.post({"model": f"{MODEL}:latest"}, path="/api/show")).json
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        vectors = (await router.post({"model": MODEL, "input": ["a", "b"]}, path="/v1/embeddings")).json["data"]
        embedded = (await router.post({"model": MODEL, "input": ["a", "b"]}, path="/api/embed")).json
        assert embedded["embeddings"] == [one["embedding"] for one in vectors]
        assert (await router.post({"model": MODEL}, path=CHAT)).json["done_reason"] == "load"

    run(two, scenario)


def test_refusals_have_ollama_s_form(two: list[Instance]) -> None:
    async def scenario(router: Router) -> None:
        for path, body, status, start in (
            (CHAT, body_of("words", options={"temperature": 9}), 400, "options.temperature: "),
            (CHAT, {"messages": []}, 400, "model: "),
            (GENERATE, {"model": MODEL, "prompt": "a", "format": {"type": "odd"}}, 400, "format: "),
            (CHAT, body_of("words", model="other"), 404, "model: "),
            ("/api/show", {"model": "other"}, 404, "model: "),
            ("/api/embed", {"model": MODEL, "input": "a", "dimensions": 0}, 400, "dimensions: "),
            ("/api/pull", {}, 404, "there is nothing"),
        ):
            refused = await router.post(body, path=path)
            assert (refused.status, list(refused.json)) == (status, ["error"]), refused.body
            assert refused.json["error"].startswith(start)

    run(two, scenario)


async def _get(router: Router, url: str) -> Any:
    async with router.session.get(url) as response:
        return await response.json()
