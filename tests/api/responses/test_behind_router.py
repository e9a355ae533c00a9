"""Responses at a real router in front of two real api processes: each is found and continued."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
import uvloop

from onward.proto.engine import ErrorInfo
from onward.proto.model import PreparedModel
from onward.router.response_store import ClusterResponseStore
from onward.web.openai_api.response_endpoint import MAX_POLL_INTERVAL_S, pause_after
from tests.api.instance import Instance, running
from tests.api.reader import NO_CERTIFICATES
from tests.api.responses.reading import (
    KINDS,
    PATH,
    TOOLS,
    body_of,
    check_event,
    check_items,
    check_response,
    data_of,
    speak_until,
    told,
)
from tests.api.thinking_model import CALL, speak, tokens_of
from tests.router.harness import Answer, Router, running_router

TEXT = tokens_of("one two thrée")
MANY_TRIES = 600
EVERY_S = 0.05
PATIENCE_S = 25.0
"""Less than a question that a client has asked may take at an instance that does not answer."""


@asynccontextmanager
async def router_of(instances: list[Instance], policy: str, **more: Any) -> AsyncIterator[Router]:
    urls = ",".join(instance.url for instance in instances)
    async with running_router(instances=urls, settle_s=0.5, stall_timeout_s=5.0, policy=policy, **more) as router:
        serving = router.process.stream_runner
        while len(serving.core.serving_instances(serving.clock.now_s())) < len(instances):
            await serving.wait_for_change(1.0)
        yield router


def run(
    instances: list[Instance],
    scenario: Callable[[Router], Coroutine[Any, Any, None]],
    policy: str = "round_robin",
    **more: Any,
) -> None:
    async def work() -> None:
        async with router_of(instances, policy, **more) as router:
            await scenario(router)

    uvloop.run(work())


async def ask(router: Router, method: str, path: str = "", **more: Any) -> Answer:
    async with router.session.request(method, router.url + PATH + path, **more) as response:
        return Answer(response.status, {}, await response.read())


async def until(condition: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    for _ in range(MANY_TRIES):
        if await condition():
            return
        await asyncio.sleep(EVERY_S)
    raise AssertionError("it did not happen in time")


def events_in(answer: Answer) -> list[str]:
    assert answer.status == 200, answer.body
    *events, rest = answer.body.decode().split("\n\n")
    assert rest == "", "whole events only"
    return [event for event in events if not event.startswith(": ")]


def test_every_kind_is_streamed_and_kept_as_at_an_instance(two: list[Instance]) -> None:
    async def scenario(router: Router) -> None:
        for kind, (_, output) in KINDS.items():
            for instance in two:
                speak(instance, output)
            streamed = events_in(await router.post(body_of(kind, stream=True), path=PATH))
            for event in streamed:
                check_event(data_of(event))
            events = told(streamed)
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            made = (await router.post(body_of(kind), path=PATH)).json
            check_response(made)
            assert (await ask(router, "GET", f"/{made['id']}")).json == made
            again = events_in(await ask(router, "GET", f"/{events[0]['response']['id']}?stream=true&starting_after=2"))
            assert told(again) == events[3:]

    run(two, scenario)


def test_a_talk_goes_on_whichever_instance_answers(two: list[Instance]) -> None:
    async def scenario(router: Router) -> None:
        for instance in two:
            speak(instance, tokens_of(CALL))
        last = (await router.post(body_of("words", **TOOLS), path=PATH)).json
        for turn in range(4):
            for instance in two:
                speak(instance, tokens_of(f"answer {turn}"))
            goes_on = body_of("words", input=f"turn {turn}", previous_response_id=last["id"])
            last = (await router.post(goes_on, path=PATH)).json
            assert last["status"] == "completed"
        items = (await ask(router, "GET", f"/{last['id']}/input_items?order=asc&limit=100")).json
        said = [str(item.to_dict()) for item in check_items(items).data]
        assert "function_call" in said[1] and ["turn 3" in said[-1], "answer 2" in said[-2]] == [True, True]

    run(two, scenario)
    assert all(instance.engine.submits for instance in two), "both have had a part in it"


def test_a_router_that_makes_the_prompt_makes_the_same_one(two: list[Instance]) -> None:
    instance = two[0]
    words = {
        "instructions": "be brief",
        "reasoning": {"effort": "low"},
        "chat_template_kwargs": {"enable_thinking": True},
    }
    prompts: list[list[list[int]]] = []

    async def scenario(router: Router) -> None:
        num_before = len(instance.engine.submits)
        speak(instance, tokens_of(CALL))
        first = (await router.post(body_of("words", **TOOLS), path=PATH)).json
        await router.post(body_of("words", previous_response_id=first["id"], **TOOLS, **words), path=PATH)
        prompts.append([one.prompt_token_ids for one in instance.engine.submits[num_before:]])

    for policy in ("least_loaded", "prefix"):
        run([instance], scenario, policy)
    assert len(prompts[0]) == 2
    assert prompts[0] == prompts[1]


def test_a_stream_whose_instance_dies_goes_on_with_the_next_event(thinker: PreparedModel) -> None:
    with running(thinker, name="a") as one, running(thinker, name="b") as other:
        pair = [one, other]

        async def scenario(router: Router) -> None:
            for instance in pair:
                speak_until(instance, 6, TEXT)
            asking = asyncio.create_task(router.post(body_of("words", stream=True), path=PATH))
            await until(lambda: _is(any(one.engine.paused for one in pair)))
            [victim] = [one for one in pair if one.engine.paused]
            for instance in pair:
                speak(instance, TEXT)
            await asyncio.to_thread(victim.kill_api, victim.children[0])
            events = told(events_in(await asking))
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
            assert "".join(deltas) == "one two thrée" and len(deltas) == len("one two thrée")
            assert events[-1]["type"] == "response.completed"
            [survivor] = [one for one in pair if one is not victim]
            assert survivor.engine.submits[-1].generated_token_ids, "it has gone on, and not begun again"
            victim.engine.paused = False

        run(pair, scenario)


async def _is(value: bool) -> bool:
    return value


def test_what_runs_in_the_background_is_followed_and_found(two: list[Instance]) -> None:
    async def scenario(router: Router) -> None:
        for instance in two:
            speak_until(instance, 5, TEXT)
        begun = (await router.post(body_of("words", background=True), path=PATH)).json
        assert check_response(begun).status in ("queued", "in_progress")
        await until(lambda: _is(any(one.engine.paused for one in two)))
        following = asyncio.create_task(ask(router, "GET", f"/{begun['id']}?stream=true"))
        assert (await ask(router, "GET", f"/{begun['id']}")).json["status"] in ("queued", "in_progress")
        for instance in two:
            instance.engine.paused = False
        events = told(events_in(await following))
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.completed"
        assert (await ask(router, "GET", f"/{begun['id']}")).json["output"] == events[-1]["response"]["output"]
        assert (await ask(router, "DELETE", f"/{begun['id']}")).json["deleted"]
        assert (await ask(router, "GET", f"/{begun['id']}")).status == 404

    run(two, scenario)


def test_who_follows_a_long_response_leaves_its_instance_most_of_its_time() -> None:
    every_s = ClusterResponseStore.poll_interval_s
    assert pause_after(0.001, every_s) == every_s, "of a short one events come soon"
    for took_s in (0.02, 0.05, 0.15):
        assert took_s / (took_s + pause_after(took_s, every_s)) < 0.1
    assert pause_after(100.0, every_s) == MAX_POLL_INTERVAL_S, "and in any case they come"


def test_a_cancel_ends_the_work_and_is_remembered(two: list[Instance]) -> None:
    async def scenario(router: Router) -> None:
        for instance in two:
            speak_until(instance, 5, TEXT)
        begun = (await router.post(body_of("words", background=True), path=PATH)).json
        await until(lambda: _is(any(one.engine.paused for one in two)))
        cancelled = (await ask(router, "POST", f"/{begun['id']}/cancel")).json
        assert check_response(cancelled).status == "cancelled"
        for instance in two:
            await asyncio.to_thread(instance.wait_until, lambda instance=instance: not instance.engine.running)
            instance.engine.paused = False
        assert (await ask(router, "GET", f"/{begun['id']}")).json == cancelled
        assert (await ask(router, "POST", f"/{begun['id']}/cancel")).json == cancelled

    run(two, scenario)


def test_what_has_ended_is_found_although_the_instance_that_finished_it_has_gone(thinker: PreparedModel) -> None:
    with running(thinker, name="a") as one, running(thinker, name="b") as other:
        pair = [one, other]

        async def scenario(router: Router) -> None:
            for instance in pair:
                speak(instance, TEXT)
            begun = (await router.post(body_of("words", background=True), path=PATH)).json

            async def is_over() -> bool:
                return (await ask(router, "GET", f"/{begun['id']}")).json["status"] == "completed"

            await until(is_over)
            whole = (await ask(router, "GET", f"/{begun['id']}")).json
            [finisher] = [one for one in pair if one.engine.submits]
            await asyncio.to_thread(finisher.kill_api, finisher.children[0])
            assert (await ask(router, "GET", f"/{begun['id']}")).json == whole

        run(pair, scenario)


def test_a_router_that_has_just_started_waits_for_instances_before_it_says_unknown(two: list[Instance]) -> None:
    made: list[dict[str, Any]] = []

    async def make(router: Router) -> None:
        speak(two[0], TEXT)
        made.append((await router.post(body_of("words"), path=PATH)).json)

    run(two[:1], make)

    async def work() -> None:
        async with running_router(settle_s=60.0) as router:
            asking = asyncio.create_task(ask(router, "GET", f"/{made[0]['id']}"))
            await asyncio.wait((asking,), timeout=1.0)
            router.process.stream_runner.core.instances.add_static(two[0].url)
            assert (await asking).json == made[0]

    uvloop.run(work())


@pytest.mark.parametrize("kind", ["streamed", "whole", "background"])
def test_a_response_keeps_the_time_of_its_completion_when_its_instance_is_gone(
    thinker: PreparedModel, kind: str
) -> None:
    """The router has put it at the other instance, with the time that its client was told."""
    with running(thinker, name="a") as one, running(thinker, name="b") as other:
        pair = [one, other]

        async def scenario(router: Router) -> None:
            for instance in pair:
                speak(instance, TEXT)
            fields = {"streamed": {"stream": True}, "whole": {}, "background": {"background": True}}[kind]
            answer = await router.post(body_of("words", **fields), path=PATH)
            told_response = data_of(events_in(answer)[-1])["response"] if kind == "streamed" else answer.json
            path = f"/{told_response['id']}"

            async def is_at_both() -> bool:
                found = [
                    await asyncio.to_thread(httpx.get, f"{instance.url}{PATH}{path}", verify=NO_CERTIFICATES)
                    for instance in pair
                ]
                return all(one.status_code == 200 and one.json()["status"] == "completed" for one in found)

            await until(is_at_both)
            shown = (await ask(router, "GET", path)).json
            check_response(shown)
            if kind != "background":
                assert shown["completed_at"] == told_response["completed_at"]
            [first] = [instance for instance in pair if instance.engine.submits]
            await asyncio.to_thread(first.kill_api, first.children[0])
            again = await ask(router, "GET", path)
            assert again.status == 200 and again.json["completed_at"] == shown["completed_at"]

        run(pair, scenario)


def test_the_tokens_of_a_prompt_with_an_earlier_response_are_counted(two: list[Instance]) -> None:
    async def scenario(router: Router) -> None:
        for instance in two:
            speak(instance, TEXT)
        first = (await router.post(body_of("words"), path=PATH)).json
        body = {"model": "small-model", "input": "and then?", "previous_response_id": first["id"]}
        response = (await router.post(body, path=PATH)).json
        count = (await router.post(body, path=PATH + "/input_tokens")).json
        assert count == {"object": "response.input_tokens", "input_tokens": response["usage"]["input_tokens"]}
        refused = await router.post(body | {"onward_context": []}, path=PATH + "/input_tokens")
        assert (refused.status, refused.json["error"]["param"]) == (400, "onward_context")

    run(two, scenario)


def test_when_nobody_is_left_the_stream_ends_with_what_has_failed(thinker: PreparedModel) -> None:
    with running(thinker, name="a") as instance:

        async def scenario(router: Router) -> None:
            speak_until(instance, 6, TEXT)
            body = body_of("words", stream=True, deadline_ms=3000)
            asking = asyncio.create_task(router.post(body, path=PATH))
            await until(lambda: _is(instance.engine.paused))
            await asyncio.to_thread(instance.kill_api, instance.children[0])
            streamed = events_in(await asyncio.wait_for(asking, PATIENCE_S))
            check_event(data_of(streamed[-1]))
            events = told(streamed)
            assert events[-1]["type"] == "response.failed"
            assert events[-1]["sequence_number"] == len(events) - 1
            assert events[-1]["response"]["error"]["type"] == "deadline_exceeded"

        run([instance], scenario)


def test_a_wrong_request_is_refused_in_the_instances_words(two: list[Instance]) -> None:
    async def scenario(router: Router) -> None:
        for more in ({}, {"background": True}):
            refused = await router.post(body_of("words", temperature=9, **more), path=PATH)
            assert (refused.status, refused.json["error"]["param"]) == (400, "temperature")
        own = await router.post(body_of("words", onward_context=[]), path=PATH)
        assert (own.status, own.json["error"]["param"]) == (400, "onward_context")
        assert (await ask(router, "GET", f"/resp_{'0' * 32}")).status == 404
        broken = await router.session.post(router.url + PATH, data=b"{")
        assert msgspec.json.decode(await broken.read())["error"]["code"] == "invalid_json"

    run(two, scenario)


def test_who_has_the_last_event_and_comes_back_reads_an_empty_stream(two: list[Instance]) -> None:
    async def scenario(router: Router) -> None:
        for instance in two:
            speak(instance, TEXT)
        streamed = events_in(await router.post(body_of("words", stream=True), path=PATH))
        [last] = [line.removeprefix("id: ") for line in streamed[-1].split("\n") if line.startswith("id: ")]
        for method in ("GET", "POST"):
            body = {} if method == "GET" else {"json": body_of("words", stream=True)}
            again = await ask(router, method, "", headers={"Last-Event-ID": last}, **body)
            assert (again.status, again.body) == (200, b"")

    run(two, scenario)


def test_signs_of_life_do_not_make_a_failure_repeat_what_was_told(thinker: PreparedModel) -> None:
    with running(thinker, name="a") as one, running(thinker, name="b") as other:

        async def scenario(router: Router) -> None:
            speak_until(one, 6, TEXT)
            # The other one can tell what there is of it, and never takes it.
            other.engine.refusal = ErrorInfo("overloaded", "full", 429, True, retry_after_s=1.0)
            body = body_of("words", stream=True, deadline_ms=6000)
            asking = asyncio.create_task(router.post(body, path=PATH))
            await until(lambda: _is(one.engine.paused))
            await asyncio.to_thread(one.kill_api, one.children[0])
            answer = await asking
            assert b": waiting" in answer.body, "it was silent for a while"
            events = told(events_in(answer))
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert events[-1]["type"] == "response.failed"
            one.engine.paused = False

        run([one, other], scenario, keep_alive_s=0.2)


def test_who_follows_waits_with_the_response_until_there_is_an_instance_again(thinker: PreparedModel) -> None:
    with running(thinker, name="a") as one, running(thinker, name="b") as other:

        async def scenario(router: Router) -> None:
            speak_until(one, 6, TEXT)
            speak(other, TEXT)
            begun = (await router.post(body_of("words", background=True), path=PATH)).json
            await until(lambda: _is(one.engine.paused))
            url = f"{router.url}{PATH}/{begun['id']}?stream=true"
            async with router.session.get(url) as response:
                read = await response.content.readany()
                await asyncio.to_thread(one.kill_api, one.children[0])
                shown = await ask(router, "GET", f"/{begun['id']}")
                assert (shown.status, shown.json["error"]["code"]) == (503, "unavailable")
                reading = asyncio.create_task(response.content.read())
                await asyncio.wait(
                    (reading,), timeout=3 * ClusterResponseStore.poll_interval_s
                )  # it asks, and no instance answers
                router.process.stream_runner.core.instances.add_static(other.url)
                read += await reading
            events = told(events_in(Answer(200, {}, read)))
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert events[-1]["type"] == "response.completed"
            one.engine.paused = False

        run([one], scenario)


def test_a_finished_response_outlives_its_instance_and_no_other_is_unknown_meanwhile(thinker: PreparedModel) -> None:
    with running(thinker, name="a") as one, running(thinker, name="b") as other:
        pair = [one, other]

        async def scenario(router: Router) -> None:
            for instance in pair:
                speak(instance, TEXT)
            made = (await router.post(body_of("words"), path=PATH)).json
            assert (await ask(router, "GET", f"/resp_{'0' * 32}")).status == 404, "all of them say so"
            [finisher] = [one for one in pair if one.engine.submits]
            await asyncio.to_thread(finisher.kill_api, finisher.children[0])
            assert (await ask(router, "GET", f"/{made['id']}")).json == made
            asked = await ask(router, "GET", f"/resp_{'1' * 32}")
            assert (asked.status, asked.json["error"]["code"]) == (503, "unavailable"), "the other one may have it"

        run(pair, scenario)
