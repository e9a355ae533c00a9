"""A router that chooses by cached prefixes makes the token ids of texts and chats itself, and passes them on."""

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import uvloop

from onward.config import RouterConfig
from onward.obs.metrics import Registry
from onward.proto import SCHEMA_VERSION
from onward.proto.cursor import ChoiceCursor, Cursor
from onward.proto.router import Attempt, ChoiceSnapshot
from onward.router.client_request import stream_from_record
from onward.router.client_stream import ClientRequest, FailureCause
from onward.router.core import Dispatch, RouterCore
from onward.router.routing_tokenizer import BUSY, MAX_INLINE_BYTES, TOKENIZE_QUEUE_BOUNDS, RoutingTokenizer
from onward.router.upstream_events import TokenEvent
from tests.api.small_model import chat_prompt
from tests.router.harness import CHAT, Router, assert_seamless, running_router
from tests.router.members import registration
from tests.router.stand_in_instance import Behaviour
from tests.router.text_instance import TextInstance

COMPLETIONS, GENERATE = "/v1/completions", "/v1/generate"
CHAT_BODY: dict[str, Any] = {
    "model": "hash",
    "messages": [{"role": "user", "content": "tell me more"}],
    "seed": 7,
    "max_tokens": 4,
    "stream": True,
}
CHAT_IDS = chat_prompt("tell me more")
TEXT = "once upon a time"
TEXT_BODY: dict[str, Any] = {"model": "hash", "prompt": TEXT, "seed": 7, "max_tokens": 4, "stream": True}
BROKEN = Behaviour(fails_after=2, error={"code": "x", "message": "m", "retryable": True})


def two_instances() -> tuple[TextInstance, TextInstance]:
    return TextInstance("a"), TextInstance("b")


async def metric(router: Router, name: str, **labels: str) -> float:
    families = (await router.get("/metrics")).body.decode().splitlines()
    shown = "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}" if labels else ""
    return sum(float(line.rpartition(" ")[2]) for line in families if line.startswith(f"{name}{shown} "))


@pytest.mark.parametrize(
    ("path", "body", "ids"), [(CHAT, CHAT_BODY, CHAT_IDS), (COMPLETIONS, TEXT_BODY, [*TEXT.encode()])]
)
def test_ids_are_made_once_and_go_with_every_attempt(path: str, body: dict[str, Any], ids: list[int]) -> None:
    async def scenario() -> None:
        a, b = two_instances()
        for instance in (a, b):
            instance.behave = lambda attempt, _: BROKEN if attempt.attempt_epoch == 1 else Behaviour()
        async with running_router(a, b, policy="prefix") as router:
            answer = await router.post(body, path=path)
            attempts = sorted(a.attempts + b.attempts, key=lambda attempt: attempt.attempt_epoch)
            assert [attempt.prompt_token_ids for attempt in attempts] == [ids, ids]
            assert all(msgspec.json.decode(attempt.body) == body for attempt in attempts)
            assert_seamless(answer.stream, 7, 4)
            assert await metric(router, "onward_router_tokenize_seconds_count") == 1
            assert a.num_asked + b.num_asked == 1

    uvloop.run(scenario())


@pytest.mark.parametrize(
    ("path", "body", "ids"), [(CHAT, CHAT_BODY, CHAT_IDS), (COMPLETIONS, TEXT_BODY, [*TEXT.encode()])]
)
@pytest.mark.parametrize("knowing", ["a", "b"])
def test_a_prompt_goes_where_its_beginning_is_cached(
    path: str, body: dict[str, Any], ids: list[int], knowing: str
) -> None:
    async def scenario() -> None:
        instances = two_instances()
        for instance in instances:
            if instance.name == knowing:
                instance.cache(ids[:-4])
        async with running_router(*instances, policy="prefix") as router:
            for _ in range(3):
                assert (await router.post(body, path=path)).status == 200
            assert {one.name: len(one.attempts) for one in instances} == {"a": 0, "b": 0} | {knowing: 3}

    uvloop.run(scenario())


def test_without_the_policy_nothing_is_fetched_and_nothing_made() -> None:
    async def scenario() -> None:
        a, b = two_instances()
        async with running_router(a, b, policy="least_loaded") as router:
            assert (await router.post(CHAT_BODY)).status == 200
            assert [attempt.prompt_token_ids for attempt in a.attempts + b.attempts] == [None]
            assert a.num_asked + b.num_asked == 0
            assert b"tokenize" not in (await router.get("/metrics")).body

    uvloop.run(scenario())


def test_one_role_with_the_policy_is_enough() -> None:
    async def scenario() -> None:
        a = TextInstance("a")
        async with running_router(a, prefill_policy="prefix") as router:
            assert (await router.post(CHAT_BODY)).status == 200
            assert a.attempts[0].prompt_token_ids == CHAT_IDS

    uvloop.run(scenario())


def test_where_instances_have_different_tokenizers_the_text_is_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        a, b = two_instances()
        b.announced = b.told = msgspec.structs.replace(a.told, chat_template="{{ messages[0].content }}")
        async with running_router(a, b, policy="prefix") as router:
            for _ in range(3):
                assert (await router.post(CHAT_BODY)).status == 200
            assert [attempt.prompt_token_ids for attempt in a.attempts + b.attempts] == [None] * 3
            assert await metric(router, "onward_router_untokenized_total", reason="differs") == 3

    with caplog.at_level(logging.WARNING, "onward.router.tokenizer_fetcher"):
        uvloop.run(scenario())
    assert [record.getMessage() for record in caplog.records] == [
        'texts are not tokenized here, and are sent by load model=hash cause="the instances have different tokenizers '
        'or chat templates"'
    ]


def test_a_tokenizer_that_is_not_as_it_was_announced_is_not_used() -> None:
    async def scenario() -> None:
        a = TextInstance("a")
        a.told = msgspec.structs.replace(a.announced, chat_template="{{ messages[0].content }}")
        async with running_router(a, policy="prefix") as router:
            assert (await router.post(CHAT_BODY)).status == 200
            assert a.attempts[0].prompt_token_ids is None and a.num_asked == 1
            assert await metric(router, "onward_router_untokenized_total", reason="missing") == 1

    uvloop.run(scenario())


def test_when_all_instances_have_a_new_tokenizer_it_is_the_one_that_counts() -> None:
    async def scenario() -> None:
        a = TextInstance("a")
        async with running_router(a, policy="prefix") as router:
            assert (await router.post(TEXT_BODY, path=COMPLETIONS)).status == 200
            await a.stop_registering()
            again = TextInstance("a, started again")
            again.announced = again.told = msgspec.structs.replace(a.told, chat_template="{{ messages[0].content }}")
            await again.start()
            try:
                await again.register_once(router.session, router.url)
                a.state = "leaving"
                await a.register_once(router.session, router.url)
                assert (await router.post(CHAT_BODY)).status == 200
                assert again.attempts[-1].prompt_token_ids == [*b"tell me more"]
            finally:
                await again.stop()

    uvloop.run(scenario())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, CHAT_BODY | {"messages": "hi"}),
        (CHAT, CHAT_BODY | {"messages": [{"role": 5, "content": "hi"}]}),
        (CHAT, {"model": "hash", "stream": True}),
        (COMPLETIONS, TEXT_BODY | {"prompt": ""}),
        (COMPLETIONS, TEXT_BODY | {"prompt": 7}),
    ],
)
def test_what_has_no_ids_is_passed_on_for_the_instance_to_refuse(path: str, body: dict[str, Any]) -> None:
    async def scenario() -> None:
        a = TextInstance("a")
        error = {"code": "invalid_request", "message": "in the instance's own words"}
        a.behave = lambda attempt, _: Behaviour(status=400, error=error)
        async with running_router(a, policy="prefix") as router:
            answer = await router.post(body, path=path)
            assert (answer.status, answer.json) == (400, {"error": error})
            (attempt,) = a.attempts
            assert attempt.prompt_token_ids is None and msgspec.json.decode(attempt.body) == body
            assert await metric(router, "onward_router_untokenized_total", reason="refused") == 1

    uvloop.run(scenario())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, CHAT_BODY),
        (COMPLETIONS, TEXT_BODY),
        (GENERATE, {"model": "hash", "prompt_token_ids": [1] * 20, "stream": True}),
    ],
)
@pytest.mark.parametrize("policy", ["prefix", "least_loaded"])
def test_a_prompt_that_nobody_can_hold_is_for_an_instance_to_refuse(
    path: str, body: dict[str, Any], policy: str
) -> None:
    async def scenario() -> None:
        a = TextInstance("a")
        a.max_tokens = 8
        error = {"code": "context_length_exceeded", "message": "in the instance's own words"}
        a.behave = lambda attempt, _: Behaviour(status=400, error=error)
        async with running_router(a, policy=policy) as router:
            answer = await asyncio.wait_for(router.post(body, path=path), 10)
            assert (answer.status, answer.json) == (400, {"error": error})
            assert len(a.attempts) == 1

    uvloop.run(scenario())


def test_a_long_prompt_is_tokenized_aside() -> None:
    async def scenario() -> None:
        a, words = TextInstance("a"), "word " * MAX_INLINE_BYTES
        async with running_router(a, policy="prefix") as router:
            assert (await router.post(TEXT_BODY | {"prompt": words}, path=COMPLETIONS)).status == 200
            assert a.attempts[0].prompt_token_ids == [*words.encode()]

    uvloop.run(scenario())


def test_when_too_many_long_prompts_of_a_caller_wait_the_instances_share_the_work() -> None:
    async def scenario(threads: ThreadPoolExecutor, gate: threading.Event) -> None:
        a = TextInstance("a")
        async with running_router(a, policy="prefix") as router:
            tokenizing = RoutingTokenizer(router.process.stream_runner, Registry(), threads)
            assert (await tokenizing.add_token_ids(origin(b'{"prompt":"short"}'))).prompt_token_ids == [*b"short"]
            threads.submit(gate.wait, 10)
            long = origin(msgspec.json.encode({"prompt": "long " * MAX_INLINE_BYTES}))
            waiting = [
                asyncio.create_task(tokenizing.add_token_ids(long))
                for _ in range(1 + TOKENIZE_QUEUE_BOUNDS.waiting_per_caller)
            ]
            await asyncio.sleep(0)
            assert (await tokenizing.add_token_ids(long)) is long
            assert tokenizing.untokenized.value(BUSY) == 1
            another = asyncio.create_task(tokenizing.add_token_ids(replace(long, caller="another")))
            await asyncio.sleep(0)
            assert tokenizing.untokenized.value(BUSY) == 1
            gate.set()
            assert (await another).prompt_token_ids
            assert all(one.prompt_token_ids for one in await asyncio.gather(*waiting))
            assert (await tokenizing.add_token_ids(long)).prompt_token_ids

    gate = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        try:
            uvloop.run(scenario(threads, gate))
        finally:
            gate.set()


@pytest.mark.parametrize(
    ("fields", "ids"),
    [
        ({"truncate_prompt_tokens": 50}, [*(b"1" * 47 + b"end")]),
        ({"truncate_prompt_tokens": 50, "truncation_side": "right"}, [*(b"is" + b"1" * 48)]),
        ({"truncate_prompt_tokens": -1}, None),
    ],
)
def test_a_prompt_is_cut_as_its_request_says_also_where_it_is_longer_than_any_context(
    fields: dict[str, Any], ids: list[int] | None
) -> None:
    async def scenario() -> None:
        a = TextInstance("a")
        a.max_tokens = 100
        async with running_router(a, policy="prefix") as router:
            await router.post(TEXT_BODY | {"prompt": "is" + "1" * 10_000 + "end"} | fields, path=COMPLETIONS)
            assert [attempt.prompt_token_ids for attempt in a.attempts] == [ids]

    uvloop.run(scenario())


def test_a_text_that_no_instance_can_hold_is_passed_on_as_it_came() -> None:
    async def scenario() -> None:
        a, b = two_instances()
        a.max_tokens, b.max_tokens = 100, 200
        async with running_router(a, b, policy="prefix") as router:
            await router.post(TEXT_BODY | {"prompt": "1" * 10_000}, path=COMPLETIONS)
            assert [attempt.prompt_token_ids for attempt in a.attempts + b.attempts] == [None]
            assert await metric(router, "onward_router_untokenized_total", reason="refused") == 1
            await router.post(TEXT_BODY, path=COMPLETIONS)
            made = [attempt.prompt_token_ids for attempt in a.attempts + b.attempts]
            assert sorted(made, key=bool) == [None, [*TEXT.encode()]]

    uvloop.run(scenario())


def origin(body: bytes = b"{}", **fields: Any) -> ClientRequest:
    fixed: dict[str, Any] = {"request_id": "0" * 32, "seed": 1, "created_s": 1, "arrived_at_s": 1.0}
    return ClientRequest(**(fixed | {"path": COMPLETIONS, "body": body, "is_streaming": True} | fields))


def dispatched(core: RouterCore, route: Any) -> Attempt:
    step = core.next_action(route, 0.0)
    assert isinstance(step, Dispatch)
    return step.attempt


def test_an_instance_that_comes_later_gets_no_ids_of_another_tokenizer() -> None:
    core = RouterCore(RouterConfig(policy="prefix"), "router-1", Registry(), lambda n: 0)
    core.register(registration("a", tokenizer_hash="another"), 0.0)
    route = core.open_stream(origin(prompt_token_ids=[1, 2], routing_token_ids=[1, 2], tokenizer_hash="ours"), 0.0)
    assert dispatched(core, route).prompt_token_ids is None


def test_a_stream_that_has_begun_with_ids_goes_on_with_them_anywhere() -> None:
    core = RouterCore(RouterConfig(policy="prefix"), "router-1", Registry(), lambda n: 0)
    core.register(registration("a", tokenizer_hash="ours"), 0.0)
    route = core.open_stream(origin(prompt_token_ids=[1, 2], routing_token_ids=[1, 2], tokenizer_hash="ours"), 0.0)
    assert dispatched(core, route).prompt_token_ids == [1, 2]
    core.on_accepted(route, 0.0)
    route.stream.on_event(TokenEvent(b"", Cursor("0" * 32, 1, 1, [ChoiceCursor(1)], {0: [5]}), True), 0.0)
    core.register(registration("a", state="leaving"), 0.0)
    core.register(registration("b", tokenizer_hash="another"), 0.0)
    route.stream.fail_lost(FailureCause.LOST, "the connection was lost")
    core.on_attempt_ended(route, 0.0)
    attempt = dispatched(core, route)
    assert (attempt.prompt_token_ids, attempt.choices) == ([1, 2], [ChoiceSnapshot([5])])


def test_a_record_is_taken_up_with_the_ids_that_it_has() -> None:
    attempt = Attempt(
        schema_version=SCHEMA_VERSION,
        path=CHAT,
        body=msgspec.json.encode(CHAT_BODY),
        request_id="0" * 32,
        attempt_epoch=1,
        seed=7,
        created_s=1,
        choices=[ChoiceSnapshot([5])],
        prompt_token_ids=CHAT_IDS,
    )
    taken = stream_from_record(attempt, 0.0).request
    assert taken.prompt_token_ids == taken.routing_token_ids == CHAT_IDS
