"""What bounds the router's attempts, over real sockets: the budget, deadlines, and the instance that is left out."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from tests.router.harness import CHAT, Answer, Received, Router, assert_seamless, running_router
from tests.router.stand_in_instance import Behaviour, StandInInstance

BODY: dict[str, Any] = {"model": "hash", "messages": [], "seed": 7, "max_tokens": 6}
STREAM = BODY | {"stream": True}
PREEMPTED = {"code": "pd_preempted", "message": "PD Error: no blocks", "retryable": True}
BROKEN = {"code": "internal_error", "message": "something went wrong", "retryable": True}


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    uvloop.run(scenario())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def moving(number: int) -> str:
    """Returns the events of a request that is queued, or computed, and has no token yet."""
    return f"e {number} 0 3"


async def ask_all(router: Router, num_streams: int) -> list["asyncio.Task[Answer]"]:
    return [asyncio.create_task(router.post(STREAM if number % 2 else BODY)) for number in range(num_streams)]


@pytest.mark.parametrize("answers", [True, False])
def test_none_of_the_streams_fails_whose_instance_dies_before_their_first_token(answers: bool) -> None:
    """Three times as many as the budget has for attempts that are not owed."""

    async def scenario() -> None:
        dying, other = StandInInstance("dying"), StandInInstance("other")
        dying.behave = lambda *_: Behaviour(silent_after=0, progress=moving, answers=answers)
        async with running_router(dying, retry_budget=0.0) as router:
            asking = await ask_all(router, 30)
            await until(lambda: len(dying.attempts) == 30)
            await other.start()
            await other.register_once(router.session, router.url)
            other.register_with(router.url)
            await dying.stop()
            try:
                for number, answer in enumerate(await asyncio.gather(*asking)):
                    assert answer.status == 200, answer.body
                    if number % 2:
                        assert_seamless(answer.stream, 7, 6)
                assert router.metric("budget_refusals") == 0
            finally:
                await other.stop()

    run(scenario)


@pytest.mark.parametrize("fails_after", [0, 2])
def test_what_instances_answer_with_an_error_costs_the_budget(fails_after: int) -> None:
    async def scenario() -> None:
        instances = [StandInInstance("a"), StandInInstance("b")]
        for instance in instances:
            instance.behave = lambda attempt, _: Behaviour(
                fails_after=fails_after if attempt.attempt_epoch == 1 else 0, error=BROKEN
            )
        async with running_router(*instances, retry_budget=0.0, preempt_retry_count=1000) as router:
            asking = [asyncio.create_task(router.post(STREAM | {"deadline_ms": 800})) for _ in range(20)]
            answers = await asyncio.gather(*asking)
            owed = 20 if fails_after else 0
            assert sum(len(instance.attempts) for instance in instances) == 20 + owed + 10
            for answer in answers:
                if fails_after:
                    assert len(answer.stream.errors) == 1 and answer.stream.num_done == 1
                else:
                    assert answer.status in (503, 504, 500)

    run(scenario)


@pytest.mark.parametrize("excludes", [True, False])
def test_the_last_decode_instance_is_kept_out_of_the_next_attempt_where_that_is_asked_for(excludes: bool) -> None:
    async def scenario() -> None:
        instances = [StandInInstance(name, role="decode") for name in ("a", "b", "c")]
        for instance in instances:
            instance.behave = lambda attempt, _: Behaviour(fails_after=1, error=PREEMPTED)
        config = {"preempt_retry_exclude_decode": excludes, "policy": "session"}
        async with running_router(*instances, **config) as router:
            answer = await router.post(STREAM, headers={"X-Session-Id": "one"})
            assert_seamless(answer.stream, 7, 6)
            order = [name for _, name in sorted((a.attempt_epoch, i.name) for i in instances for a in i.attempts)]
            assert len(order) >= 6
            stays = [one == other for one, other in itertools.pairwise(order)]
            assert not any(stays) if excludes else all(stays)

    run(scenario)


def test_the_only_decode_instance_is_taken_again_although_it_should_be_kept_out() -> None:
    async def scenario() -> None:
        only = StandInInstance("only", role="decode")
        only.behave = lambda attempt, _: Behaviour(
            fails_after=2 if attempt.attempt_epoch == 1 else None, error=PREEMPTED
        )
        async with running_router(only, preempt_retry_exclude_decode=True) as router:
            assert_seamless((await router.post(STREAM)).stream, 7, 6)
            assert [attempt.attempt_epoch for attempt in only.attempts] == [1, 2]

    run(scenario)


@pytest.mark.parametrize("tokens", [0, 2])
def test_a_deadline_ends_a_stream_that_its_instance_does_not_end(tokens: int) -> None:
    async def scenario() -> None:
        slow = StandInInstance("slow")
        slow.behave = lambda *_: Behaviour(silent_after=tokens, progress=moving)
        async with running_router(slow) as router:
            answers = [await router.post(body | {"deadline_ms": 200}) for body in (STREAM, BODY)]
            assert len(slow.attempts) == len(slow.cancelled) == 2, "it is told that nobody waits any more"
            streamed, whole = answers
            assert (whole.status, whole.json["error"]["code"]) == (504, "deadline_exceeded")
            if tokens:
                received = Received.of(streamed.body)
                assert [error["code"] for error in received.errors] == ["deadline_exceeded"]
                assert (len(received.cursors), received.num_done) == (tokens, 1)
            else:
                assert (streamed.status, streamed.json["error"]["code"]) == (504, "deadline_exceeded")

    run(scenario)


def test_the_time_that_is_left_goes_along_with_every_attempt() -> None:
    async def scenario() -> None:
        a = StandInInstance("a")
        a.behave = lambda attempt, _: Behaviour(fails_after=1 if attempt.attempt_epoch < 3 else None, error=PREEMPTED)
        async with running_router(a) as router:
            assert (await router.post(STREAM | {"deadline_ms": 9000}, path=CHAT)).stream.num_done == 1
            left = [attempt.deadline_in_s for attempt in a.attempts if attempt.deadline_in_s is not None]
            assert len(left) == 3 and left == sorted(left, reverse=True) and 0 < left[-1] < left[0] <= 9

    run(scenario)
