"""A router passes on what instances say about unknown fields, and asks them to refuse those where it is strict."""

import uvloop

from onward.proto.router import EMBED_PATH, IGNORED_FIELDS_HEADER
from tests.router.harness import running_router
from tests.router.stand_in_instance import Behaviour, StandInInstance

BODY = {"model": "hash", "messages": [{"role": "user", "content": "hi"}], "seed": 7, "max_tokens": 3, "x": 1}


def test_a_client_is_told_the_fields_that_an_instance_ignored() -> None:
    async def scenario() -> None:
        instance = StandInInstance("a")
        instance.behave = lambda attempt, _: Behaviour(headers={IGNORED_FIELDS_HEADER: "x"})
        async with running_router(instance) as router:
            for body in (BODY, BODY | {"stream": True}):
                answer = await router.post(body)
                assert (answer.status, answer.headers[IGNORED_FIELDS_HEADER]) == (200, "x")
            assert not instance.attempts[0].strict_fields

    uvloop.run(scenario())


def test_a_strict_router_asks_instances_to_refuse_unknown_fields() -> None:
    async def scenario() -> None:
        instance = StandInInstance("a")
        async with running_router(instance, strict_fields=True) as router:
            await router.post(BODY)
            assert [attempt.strict_fields for attempt in instance.attempts] == [True]

    uvloop.run(scenario())


def test_a_client_of_embeddings_is_told_too() -> None:
    async def scenario() -> None:
        instance = StandInInstance("a")
        instance.answers[EMBED_PATH] = (200, b"{}")
        instance.answer_headers = {IGNORED_FIELDS_HEADER: "x"}
        async with running_router(instance) as router:
            answer = await router.post({"model": "hash", "input": "y", "x": 1}, path="/v1/embeddings")
            assert (answer.status, answer.headers[IGNORED_FIELDS_HEADER]) == (200, "x")

    uvloop.run(scenario())
