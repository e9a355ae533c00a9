"""Several models behind one router: each request gets the model that it names, and each stream keeps to its version."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest
import uvloop

from onward.proto.cursor import ChoiceCursor, Cursor, format_cursor, model_tag
from onward.proto.router import EMBED_PATH, RESPONSE_PATH, TOKENIZE_PATH, ClosedAttempt, StreamRecord
from onward.router.response_store import ClusterResponseStore
from tests.api.routed import attempt_of
from tests.router.harness import CHAT, Received, Router, running_router
from tests.router.stand_in_instance import Behaviour, StandInInstance, text_of, token

SEED = 7
CANARY: dict[str, Any] = {"route": ("m=m-v1:0.5,m-v2:0.5",)}
BODY: dict[str, Any] = {"model": "m", "messages": [], "seed": SEED, "max_tokens": 6, "stream": True}
LOST = {"code": "x", "message": "gone", "retryable": True}


def text_by(model: str, num_tokens: int = 6) -> str:
    return text_of([token(SEED, 0, position, model) for position in range(num_tokens)])


def models_of(received: Received) -> set[str]:
    return {chunk["model"] for chunk in received.chunks}


def assert_whole(received: Received, model: str) -> None:
    assert received.errors == [] and received.num_done == 1
    assert models_of(received) == {model}
    assert received.text() == text_by(model)


def two_versions() -> tuple[StandInInstance, StandInInstance]:
    return StandInInstance("one", model="m-v1"), StandInInstance("two", model="m-v2")


async def ask_until(router: Router, model: str) -> Received:
    """A stream under the route that falls to this version: each request has another id."""
    for _ in range(200):
        received = (await router.post(BODY)).stream
        if models_of(received) == {model}:
            return received
    raise AssertionError(f"no request falls to {model}")


def test_each_request_gets_the_model_that_it_names() -> None:
    async def scenario() -> None:
        one, two = two_versions()
        async with running_router(one, two) as router:
            for model in ("m-v1", "m-v2", "m-v1"):
                assert_whole((await router.post(BODY | {"model": model})).stream, model)
            assert len(one.attempts) == 2 and len(two.attempts) == 1
            assert [attempt.model_tag for attempt in (*one.attempts, *two.attempts)] == ["", "", ""]

    uvloop.run(scenario())


def test_an_unknown_model_is_refused_with_the_field_and_what_is_served() -> None:
    async def scenario() -> None:
        one, two = StandInInstance("one", model="a", model_aliases=("other",)), StandInInstance("two", model="b")
        async with running_router(one, two, route=("r=a:0.9,b:0.1",)) as router:
            for path in (CHAT, "/v1/embeddings", "/tokenize"):
                answer = await router.post(BODY | {"model": "c"}, path=path)
                error = answer.json["error"]
                assert (answer.status, error["code"], error["param"]) == (404, "model_not_found", "model")
                assert error["message"] == "model: 'c' is not served here; 'a', 'b', 'other', 'r' are"
            assert one.attempts == [] and two.attempts == []

    uvloop.run(scenario())


def test_without_a_model_the_only_one_answers_and_of_several_none() -> None:
    async def scenario() -> None:
        one, two = two_versions()
        one.answers["/internal/tokenize"] = 200, b'{"tokens": [1]}'
        async with running_router(one) as router:
            assert (await router.post({"prompt": "x"}, path="/tokenize")).json == {"tokens": [1]}
        one, two = two_versions()
        async with running_router(one, two) as router:
            answer = await router.post({"prompt": "x"}, path="/tokenize")
            assert (answer.status, answer.json["error"]["param"]) == (400, "model")
            assert "'m-v1', 'm-v2'" in answer.json["error"]["message"]

    uvloop.run(scenario())


def test_a_stream_without_a_model_goes_to_the_only_one_and_its_cursors_name_it() -> None:
    async def scenario() -> None:
        one, two = two_versions()
        unnamed = {name: value for name, value in BODY.items() if name != "model"}
        async with running_router(one) as router:
            for body in (unnamed, unnamed | {"model": None}, unnamed | {"model": ""}):
                received = (await router.post(body)).stream
                assert_whole(received, "m-v1")
                assert {cursor.model_tag for cursor in received.cursors} == {model_tag("m-v1")}
            assert {msgspec.json.decode(attempt.body)["model"] for attempt in one.attempts} == {"m-v1"}
        one, two = two_versions()
        async with running_router(one, two) as router:
            answer = await router.post(unnamed)
            assert (answer.status, answer.json["error"]["param"]) == (400, "model")
            assert one.attempts == [] and two.attempts == []

    uvloop.run(scenario())


def test_models_aliases_and_routes_are_listed() -> None:
    async def scenario() -> None:
        one, two = StandInInstance("one", model="a", model_aliases=("other",)), StandInInstance("two", model="b")
        async with running_router(one, two, route=("r=a:0.9,b:0.1", "nowhere=c")) as router:
            cards = {card["id"]: card for card in (await router.get("/v1/models")).json["data"]}
            assert list(cards) == ["a", "b", "other", "r"], "a route that leads to no model is not listed"
            assert (cards["other"]["root"], cards["r"]["max_model_len"]) == ("a", 1000)
            assert (await router.get("/v1/models/other")).json == cards["other"]
            missing = await router.get("/v1/models/c")
            assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")
            info = (await router.get("/info")).json
            assert info["routes"] == {"r": {"a": 0.9, "b": 0.1}, "nowhere": {"c": 1.0}}
            assert {shown["id"]: shown["model"] for shown in info["instances"]} == {"one": "a", "two": "b"}
            metrics = (await router.get("/metrics")).body.decode()
            assert 'onward_router_instances{model_name="b",role="mixed",state="ready"} 1' in metrics

    uvloop.run(scenario())


def test_an_alias_leads_to_its_model_and_answers_name_the_model() -> None:
    async def scenario() -> None:
        one, two = StandInInstance("one", model="a", model_aliases=("other",)), StandInInstance("two", model="b")
        async with running_router(one, two, route=("latest=b",)) as router:
            assert_whole((await router.post(BODY | {"model": "other"})).stream, "a")
            received = (await router.post(BODY | {"model": "latest"})).stream
            assert_whole(received, "b")
            assert {cursor.model_tag for cursor in received.cursors} == {model_tag("b")}

    uvloop.run(scenario())


def test_the_model_of_a_name_answers_and_no_instance_that_has_it_as_an_alias() -> None:
    async def scenario() -> None:
        one, two = StandInInstance("one", model="a", model_aliases=("b",)), StandInInstance("two", model="b")
        for instance in (one, two):
            answer = 200, msgspec.json.encode({"by": instance.name})
            instance.answers = {EMBED_PATH: answer, TOKENIZE_PATH: answer}
        async with running_router(one, two) as router:
            for path in ("/v1/embeddings", "/tokenize"):
                replies = [(await router.post({"model": "b", "input": "x"}, path=path)).json for _ in range(8)]
                assert replies == [{"by": "two"}] * 8

    uvloop.run(scenario())


def test_a_stored_response_is_looked_up_at_the_instances_of_its_model() -> None:
    async def scenario() -> None:
        one, two = StandInInstance("one", model="a", model_aliases=("b", "c")), StandInInstance("two", model="b")
        for instance in (one, two):
            instance.answers = {RESPONSE_PATH: (200, msgspec.json.encode({"by": instance.name}))}
        async with running_router(one, two, route=("b=a:0.5,b:0.5",)) as router:
            store = ClusterResponseStore(router.process.stream_runner)
            for name, owner in (("b", b"two"), ("a", b"one"), ("c", b"one")):
                attempt = attempt_of("/v1/responses", {"model": name, "input": "x"})
                record = StreamRecord(attempt=attempt)
                for _ in range(4):
                    assert await store.show(record) == b'{"by":"%s"}' % owner

    uvloop.run(scenario())


def test_a_stream_that_is_given_up_is_ended_by_an_instance_of_its_model() -> None:
    async def scenario() -> None:
        one, two = StandInInstance("a-one", model="a", model_aliases=("b",)), StandInInstance("two", model="b")
        two.behave = lambda attempt, _: Behaviour(silent_after=2, gate=asyncio.Event())
        for instance in (one, two):
            instance.closes = lambda _: ClosedAttempt(200, b'data: {"choices": []}\n\n')
        async with running_router(one, two, stall_timeout_s=1000.0) as router:
            asking = asyncio.create_task(router.post(BODY | {"model": "b"}))
            streams = router.process.stream_runner.core.live_streams
            async with asyncio.timeout(10):
                while [routing.stream.num_tokens for routing in streams()] != [2]:
                    await asyncio.sleep(0.01)
            await router.post({"all": True}, path="/v1/abort")
            await asking
            assert (len(one.asked_to_close), len(two.asked_to_close)) == (0, 1)

    uvloop.run(scenario())


def test_a_body_whose_model_cannot_be_replaced_is_refused_and_the_byte_is_named() -> None:
    """The name of a field is no UTF-8, and the model that the client names is an alias."""

    async def scenario() -> None:
        one = StandInInstance("one", model="a", model_aliases=("other",))
        body = b'{"model": "other", "messages": [], "input": "x", "\xff": 1}'
        async with running_router(one) as router:
            for path in (CHAT, "/v1/embeddings", "/tokenize"):
                async with router.session.post(router.url + path, data=body) as response:
                    error = (await response.json())["error"]
                    assert (response.status, error["code"]) == (400, "invalid_json"), path
                    assert "invalid UTF-8 (byte " in error["message"]
            assert one.attempts == []

    uvloop.run(scenario())


def test_tokens_that_a_client_sends_are_continued_by_the_model_that_it_names() -> None:
    """Also where a route has the name of one of its versions: its shares are for new answers."""

    async def scenario() -> None:
        one, two = two_versions()
        async with running_router(one, two, route=("m-v1=m-v1:0.01,m-v2:0.99",)) as router:
            for _ in range(8):
                tokens = {"generated_token_ids": [token(SEED, 0, 0, "m-v1")]}
                received = (await router.post(BODY | {"model": "m-v1"} | tokens)).stream
                assert models_of(received) == {"m-v1"}
            assert two.attempts == []

    uvloop.run(scenario())


def test_a_stream_whose_model_is_not_served_is_refused_when_its_client_comes_back() -> None:
    async def scenario() -> None:
        one = StandInInstance("one", model="a")
        cursor = format_cursor(Cursor("ab" * 16, SEED, 1, [ChoiceCursor(1)], {0: [5]}))
        async with running_router(one) as router:
            answer = await router.post(BODY | {"model": "c"}, headers={"last-event-id": cursor})
            assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")

    uvloop.run(scenario())


def test_a_canary_gets_its_share_and_the_metrics_show_it() -> None:
    async def scenario() -> None:
        one, two = two_versions()
        async with running_router(one, two, route=("m=m-v1:0.9,m-v2:0.1",)) as router:
            answers = await asyncio.gather(*(router.post(BODY) for _ in range(200)))
            shares = Counter(model for answer in answers for model in models_of(answer.stream))
            assert 5 <= shares["m-v2"] <= 45 and shares.total() == 200
            counted = {model: router.metric("model_requests", model, "m") for model in ("m-v1", "m-v2")}
            assert counted == {model: float(count) for model, count in shares.items()}

    uvloop.run(scenario())


@pytest.mark.parametrize("fails_after", [0, 1, 3, 5])
def test_a_stream_that_breaks_goes_on_with_its_version_only(fails_after: int) -> None:
    """Whichever instance of the version is left; the other version stands by all the while."""

    async def scenario() -> None:
        instances = [
            StandInInstance(f"{model}-{number}", model=model) for model in ("m-v1", "m-v2") for number in (0, 1)
        ]
        for instance in instances:
            instance.behave = lambda attempt, _: Behaviour(
                fails_after=fails_after if attempt.attempt_epoch == 1 else None, error=LOST
            )
        async with running_router(*instances, retry_budget=10.0, **CANARY) as router:
            answers = await asyncio.gather(*(router.post(BODY) for _ in range(30)))
            for answer in answers:
                [model] = models_of(answer.stream)
                assert_whole(answer.stream, model)
            epochs = [attempt.attempt_epoch for instance in instances for attempt in instance.attempts]
            assert epochs.count(2) == 30

    uvloop.run(scenario())


def test_before_the_first_token_another_version_may_answer() -> None:
    async def scenario() -> None:
        one, two = two_versions()
        async with running_router(one, two, **CANARY) as router:
            await ask_until(router, "m-v1")
            await one.stop()
            for _ in range(20):
                assert_whole((await router.post(BODY)).stream, "m-v2")

    uvloop.run(scenario())


def test_after_the_first_token_no_other_version_goes_on_and_the_error_names_its_own() -> None:
    async def scenario() -> None:
        one, two = two_versions()
        for instance in (one, two):
            instance.behave = lambda attempt, _: Behaviour(silent_after=2, gate=asyncio.Event())
        async with running_router(one, two, **CANARY) as router:
            async with router.session.post(router.url + CHAT, json=BODY | {"deadline_ms": 5000}) as response:
                body = b""
                while body.count(b"id: ") < 2:
                    body += await response.content.readany()
                owner, other = (one, two) if one.attempts else (two, one)
                await owner.stop()
                received = Received.of(body + await response.content.read())
            assert models_of(received) == {owner.model} and received.text() == text_by(owner.model, 2)
            [error] = received.errors
            assert error["code"] == "deadline_exceeded"
            assert other.attempts == []

    uvloop.run(scenario())


def test_a_client_comes_back_to_another_router_and_gets_its_version() -> None:
    """Its own request names the route. The record at the instance, or else the cursor, says which version it was; the new
    router has other shares."""

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            one, two = two_versions()
            first = await stack.enter_async_context(running_router(one, two, **CANARY))
            received = await ask_until(first, "m-v1")
            last_id = next(format_cursor(cursor) for cursor in received.cursors if cursor.choices[0].position == 2)
            fresh = [StandInInstance("three", model="m-v1"), StandInInstance("four", model="m-v2")]
            second = await stack.enter_async_context(running_router(*fresh, route=("m=m-v1:0,m-v2:1",)))
            again = (await second.post(BODY, headers={"last-event-id": last_id})).stream
            assert models_of(again) == {"m-v1"}
            assert again.text() == text_of([token(SEED, 0, position, "m-v1") for position in range(2, 6)])
            assert fresh[1].attempts == []
            assert fresh[0].attempts[-1].model_tag == model_tag("m-v1")

    uvloop.run(scenario())


def test_a_stream_without_a_model_keeps_its_model_where_another_one_is_served_later() -> None:
    async def scenario() -> None:
        unnamed = {name: value for name, value in BODY.items() if name != "model"}
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(running_router(StandInInstance("one", model="m-v1")))
            received = (await first.post(unnamed)).stream
            last_id = next(format_cursor(cursor) for cursor in received.cursors if cursor.choices[0].position == 2)
            fresh = [StandInInstance("three", model="m-v1"), StandInInstance("four", model="m-v2")]
            second = await stack.enter_async_context(running_router(*fresh))
            again = (await second.post(unnamed, headers={"last-event-id": last_id})).stream
            assert again.text() == text_of([token(SEED, 0, position, "m-v1") for position in range(2, 6)])
            assert fresh[1].attempts == []

    uvloop.run(scenario())


def test_a_model_whose_instances_are_gone_is_waited_for_and_not_unknown() -> None:
    async def scenario() -> None:
        one, two = two_versions()
        async with running_router(one, two) as router:
            await one.stop()
            registry = router.process.stream_runner.core.instances
            leaving = msgspec.structs.replace(one.registration(), state="leaving")
            registry.register(leaving, router.process.stream_runner.clock.now_s())
            assert "m-v1" in registry.known_models()
            asked = asyncio.create_task(router.post(BODY | {"model": "m-v1"}))
            again = StandInInstance("one-again", model="m-v1")
            await again.start()
            try:
                reply = await again.register_once(router.session, router.url)
                assert reply.error == ""
                assert_whole((await asked).stream, "m-v1")
            finally:
                await again.stop()

    uvloop.run(scenario())
