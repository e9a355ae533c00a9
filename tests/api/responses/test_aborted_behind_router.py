"""A response that is aborted at a router, or at an instance behind it: cancelled, with its output so far, and once."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest

from onward.proto.engine import ErrorInfo
from onward.proto.model import PreparedModel
from onward.proto.router import RESPONSE_PATH, QueryResponse, StreamRecord
from onward.router.response_store import ClusterResponseStore
from onward.web.auth.api_key_table import ANONYMOUS
from tests.api.instance import Instance, running
from tests.api.reader import NO_CERTIFICATES
from tests.api.responses.reading import PATH, SCORED, body_of, check_response, speak_until, told
from tests.api.responses.test_aborted import LABEL, NAMED, SHOWN, TEXT, check_cancelled, check_events, text_of
from tests.api.responses.test_behind_router import PATIENCE_S, ask, events_in, router_of, run, until
from tests.api.routed import find
from tests.api.thinking_model import speak
from tests.router.harness import Answer, Router

AT = pytest.mark.parametrize("at", ["router", "instance", "another router"])
NUM_TOKENS = pytest.mark.parametrize("num_tokens", [0, 2, 7])
Abort = Callable[[str], Awaitable[dict[str, list[str]]]]


async def paused_at(two: list[Instance], router: Router, num_tokens: int, **more: Any) -> "asyncio.Task[Answer]":
    """A response that has so many tokens, and gets no more."""
    for instance in two:
        if num_tokens:
            speak_until(instance, num_tokens, TEXT)
        else:
            speak(instance, TEXT)
            instance.engine.paused = True
    asking = asyncio.create_task(router.post(body_of("words", **more), path=PATH, headers=NAMED))

    async def has_them() -> bool:
        held = [len(running.tokens) for one in two for running in one.engine.running.values()]
        told_tokens = [one.stream for one in router.process.stream_runner.core.live_streams() if one.stream.has_tokens]
        return held == [num_tokens] and bool(told_tokens) == bool(num_tokens)

    await until(has_them)
    return asking


async def aborted(at: str, two: list[Instance], router: Router, name: str = LABEL) -> dict[str, list[str]]:
    if at == "instance":
        [runner] = [one for one in two if one.engine.running]
        async with httpx.AsyncClient(verify=NO_CERTIFICATES) as http:
            return (await http.post(f"{runner.url}/v1/abort", json={"ids": [name]})).json()
    if at == "another router":
        async with router_of(two, "round_robin") as other:
            return (await other.post({"ids": [name]}, path="/v1/abort")).json
    return (await router.post({"ids": [name]}, path="/v1/abort")).json


async def all_rest(two: list[Instance]) -> None:
    for instance in two:
        await asyncio.to_thread(instance.wait_until, lambda instance=instance: not instance.engine.running)
        instance.engine.paused = False


@AT
@NUM_TOKENS
@pytest.mark.parametrize("store", [True, False], ids=["stored", "not stored"])
def test_a_whole_response_is_cancelled_and_has_its_output(
    two: list[Instance], at: str, num_tokens: int, store: bool
) -> None:
    async def scenario(router: Router) -> None:
        asking = await paused_at(two, router, num_tokens, store=store)
        assert (await aborted(at, two, router))["aborted"] == [LABEL]
        answer = await asyncio.wait_for(asking, PATIENCE_S)
        assert answer.status == 200, answer.body
        check_cancelled(answer.json, num_tokens)
        await all_rest(two)
        kept = await ask(router, "GET", f"/{answer.json['id']}")
        assert (kept.status, kept.json == answer.json) == ((200, True) if store else (404, False))

    run(two, scenario)


@AT
@NUM_TOKENS
@pytest.mark.parametrize("more", [{}, SCORED], ids=["plain", "scored"])
def test_a_stream_ends_as_one_that_is_cancelled_and_is_told_again_the_same(
    two: list[Instance], at: str, num_tokens: int, more: dict[str, Any]
) -> None:
    async def scenario(router: Router) -> None:
        asking = await paused_at(two, router, num_tokens, stream=True, **more)
        assert (await aborted(at, two, router))["aborted"] == [LABEL]
        events = events_in(await asyncio.wait_for(asking, PATIENCE_S))
        fields = check_events(events, num_tokens)
        await all_rest(two)
        path = f"/{fields[-1]['response']['id']}"
        for after in (-1, 1, len(fields) - 1):
            query = "?stream=true" + (f"&starting_after={after}" if after >= 0 else "")
            assert told(events_in(await ask(router, "GET", path + query))) == fields[after + 1 :]
        cursors = [(at, line[4:]) for at, one in enumerate(events) for line in one.split("\n") if line[:4] == "id: "]
        for index, cursor in cursors:
            for method in ("GET", "POST"):
                body = {} if method == "GET" else {"json": body_of("words", stream=True, **more)}
                again = await ask(router, method, headers={"Last-Event-ID": cursor}, **body)
                assert told(events_in(again)) == fields[index + 1 :], "what it does not have yet"

    run(two, scenario)


@AT
@NUM_TOKENS
@pytest.mark.parametrize("stream", [False, True], ids=["polled", "streamed"])
def test_a_response_in_the_background_is_cancelled(two: list[Instance], at: str, num_tokens: int, stream: bool) -> None:
    async def scenario(router: Router) -> None:
        asking = await paused_at(two, router, num_tokens, background=True, stream=stream)
        [request_id] = [held.submit.request_id[:-2] for one in two for held in one.engine.running.values()]
        path = f"/resp_{request_id}"
        following = asyncio.create_task(ask(router, "GET", path + "?stream=true"))
        assert (await aborted(at, two, router, f"resp_{request_id}"))["aborted"] == [f"resp_{request_id}"]
        fields = check_events(events_in(await asyncio.wait_for(following, PATIENCE_S)), num_tokens)
        shown = (await ask(router, "GET", path)).json
        check_cancelled(shown, num_tokens)
        assert shown["output"] == fields[-1]["response"]["output"]
        if stream:
            assert told(events_in(await asyncio.wait_for(asking, PATIENCE_S))) == fields
        await all_rest(two)
        assert (await ask(router, "POST", path + "/cancel")).json == shown

    run(two, scenario)


def test_an_aborted_response_is_kept_at_all_instances(thinker: PreparedModel) -> None:
    with running(thinker, name="a") as one, running(thinker, name="b") as other:
        pair = [one, other]

        async def scenario(router: Router) -> None:
            asking = await paused_at(pair, router, 5)
            [runner] = [one for one in pair if one.engine.running]
            await aborted("router", pair, router)
            made = (await asyncio.wait_for(asking, PATIENCE_S)).json
            await asyncio.to_thread(runner.kill_api, runner.children[0])
            assert (await ask(router, "GET", f"/{made['id']}")).json == made

        run(pair, scenario)


def test_a_response_is_cancelled_with_the_same_tokens_at_all_instances(thinker: PreparedModel) -> None:
    """Also where its instance has gone on since the router has found it."""
    with running(thinker, name="a") as one, running(thinker, name="b") as other:
        pair = [one, other]

        async def scenario(router: Router) -> None:
            begun = (await asyncio.wait_for(await paused_at(pair, router, 3, background=True), PATIENCE_S)).json
            [runner] = [one for one in pair if one.engine.running]
            found = ClusterResponseStore(router.process.stream_runner)
            record = await found.find(ANONYMOUS, begun["id"])
            assert len(record.attempt.choices[0].token_ids) == 3
            speak_until(runner, 5, TEXT)
            runner.engine.paused = False
            await asyncio.to_thread(runner.wait_until, lambda: runner.engine.paused)
            await found.cancel(record)
            cancelled = (await ask(router, "GET", f"/{begun['id']}")).json
            assert cancelled["status"] == "cancelled" and cancelled["usage"]["output_tokens"] == 5
            await asyncio.to_thread(runner.kill_api, runner.children[0])
            assert (await ask(router, "GET", f"/{begun['id']}")).json == cancelled

        run(pair, scenario)


def test_an_abort_of_a_completed_response_does_not_cancel_an_older_record_of_it(thinker: PreparedModel) -> None:
    """As there is one where an instance took it up from another one and completed it."""
    with running(thinker, name="a") as one, running(thinker, name="b") as other:
        speak(one, TEXT)

        async def scenario(router: Router) -> None:
            async with router_of([one], "round_robin") as first:
                made = (await first.post(body_of("words"), path=PATH)).json
            complete = find(one.url, made["id"].removeprefix("resp_"))
            assert complete is not None and complete.is_finished
            attempt = msgspec.structs.replace(complete.attempt, attempt_epoch=0, choices=[])
            older = QueryResponse(action="keep", record=StreamRecord(attempt=attempt))
            await router.process.stream_runner.upstream.forward(other.url, RESPONSE_PATH, msgspec.msgpack.encode(older))
            assert find(other.url, attempt.request_id) is not None
            assert await aborted("router", [one, other], router, made["id"]) == {"aborted": [], "unknown": [made["id"]]}
            assert (await ask(router, "GET", f"/{made['id']}")).json == made

        run([one, other], scenario)


def test_an_abort_of_a_response_that_nothing_runs_cancels_all_records_of_it(thinker: PreparedModel) -> None:
    with running(thinker, name="a") as one, running(thinker, name="b") as other:
        pair = [one, other]

        async def scenario(router: Router) -> None:
            async with router_of(pair, "round_robin") as first:
                asking = await paused_at(pair, first, 5, stream=True)
                [request_id] = [held.submit.request_id[:-2] for at in pair for held in at.engine.running.values()]
                asking.cancel()
                await all_rest(pair)
            assert (await aborted("router", pair, router))["aborted"] == [LABEL]
            kept = [find(at.url, request_id) for at in pair]
            assert [at is not None and at.is_cancelled for at in kept] == [True, True]
            check_cancelled((await ask(router, "GET", f"/resp_{request_id}")).json, 5)

        run(pair, scenario)


def test_a_response_that_is_deleted_while_it_runs_is_gone(two: list[Instance]) -> None:
    async def scenario(router: Router) -> None:
        for more in ({"background": True}, {"stream": True}, {}):
            asking = await paused_at(two, router, 5, **more)
            [request_id] = [held.submit.request_id[:-2] for one in two for held in one.engine.running.values()]
            path = f"/resp_{request_id}"
            assert (await ask(router, "DELETE", path)).json["deleted"]
            await asyncio.wait_for(asking, PATIENCE_S)
            await all_rest(two)
            assert (await ask(router, "GET", path)).status == 404
            assert (await aborted("router", two, router))["aborted"] == []

    run(two, scenario)


@pytest.mark.parametrize("store", [True, False], ids=["stored", "not stored"])
def test_a_whole_response_that_a_router_gives_up_has_failed_and_has_its_output(
    thinker: PreparedModel, store: bool
) -> None:
    with running(thinker, name="a") as one, running(thinker, name="b") as other:

        async def scenario(router: Router) -> None:
            # The other one can tell what there is of it, and never takes it.
            other.engine.refusal = ErrorInfo("overloaded", "full", 429, True, retry_after_s=1.0)
            asking = await paused_at([one], router, 6, store=store, deadline_ms=5000)
            await asyncio.to_thread(one.kill_api, one.children[0])
            answer = await asyncio.wait_for(asking, PATIENCE_S)
            assert (answer.status, answer.json["error"]["code"]) == (504, "deadline_exceeded")
            partial = answer.json["partial"]
            assert check_response(partial).status == "failed"
            assert text_of(partial) == SHOWN[partial["usage"]["output_tokens"]] != ""

        run([one, other], scenario)
