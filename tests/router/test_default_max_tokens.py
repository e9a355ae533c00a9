"""The limit of a completion without max_tokens is the router's, and the same in every attempt at it."""

import msgspec
import uvloop

from onward.proto import SCHEMA_VERSION
from onward.proto.router import Attempt
from onward.router.client_request import stream_from_record
from tests.router.harness import running_router
from tests.router.stand_in_instance import Behaviour, StandInInstance

BODY = {"model": "hash", "prompt": [1, 2, 3], "seed": 7, "max_tokens": 4, "stream": True}


def test_every_attempt_has_the_limit_of_the_router_that_the_request_came_to() -> None:
    async def scenario() -> None:
        seen: list[Attempt] = []

        def behave(attempt: Attempt, _: int) -> Behaviour:
            seen.append(attempt)
            return Behaviour(fails_after=2) if len(seen) == 1 else Behaviour()

        instance = StandInInstance("a")
        instance.behave = behave
        async with running_router(instance, default_max_tokens=5) as router:
            await router.post(BODY, path="/v1/completions")
        assert [attempt.default_max_tokens for attempt in seen] == [5, 5]

    uvloop.run(scenario())


def test_a_stream_that_an_instance_has_kept_keeps_its_limit_at_another_router() -> None:
    attempt = Attempt(
        schema_version=SCHEMA_VERSION,
        path="/v1/completions",
        body=msgspec.json.encode(BODY),
        request_id="r" * 32,
        attempt_epoch=1,
        seed=7,
        created_s=1,
        default_max_tokens=9,
    )
    assert stream_from_record(attempt, 0.0).build_attempt(0.0, []).default_max_tokens == 9
