"""A request that the router gives up ends with what was generated: an instance writes it, from the router's tokens."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
import uvloop

from onward.proto.router import ChoiceSnapshot, CloseAttempt, ClosedAttempt
from onward.router.client_stream import ClientRequest, ClientStream, DeliveredChoice
from onward.router.partial_output import build_partial
from tests.router.harness import running_router
from tests.router.stand_in_instance import Behaviour, StandInInstance, token
from tests.router.test_core import World

BODY: dict[str, Any] = {"model": "hash", "messages": [], "seed": 7, "max_tokens": 6}
STREAM = BODY | {"stream": True}
TOKENS = [token(7, 0, position) for position in range(6)]
CRASHED = {"code": "crashed_worker", "message": "three times", "retryable": False}
BOTH = pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "streamed"])


def run(scenario: Coroutine[Any, Any, None]) -> None:
    uvloop.run(scenario)


def resume_from(tokens: list[int]) -> dict[str, Any]:
    fields = {"seed": 7, "generated_token_ids": tokens, "generated_finish_reasons": [None]}
    return {"seed": 7, "resume": fields}


def writes(asked: CloseAttempt) -> ClosedAttempt:
    """As an instance would: it says what it was asked for."""
    said = {"said": [asked.error.code, *(len(choice.token_ids) for choice in asked.attempt.choices)], "usage": None}
    is_aborted = asked.error.code == "aborted"
    if not msgspec.json.decode(asked.attempt.body).get("stream"):
        return ClosedAttempt(200 if is_aborted else asked.error.status, msgspec.json.encode(said))
    name = b"" if is_aborted else b"event: error\n"
    fields = {"choices": []} | said if is_aborted else {"error": {"code": asked.error.code}, "partial": said}
    return ClosedAttempt(200, name + b"data: " + msgspec.json.encode(fields) + b"\n\n")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def num_told(stream: ClientStream) -> int:
    return sum(len(choice.token_ids) for choice in stream.choices)


def breaks_off(body: dict[str, Any]) -> Behaviour:
    """After a few tokens. Those of an answer that is not streamed come without chunks."""
    return Behaviour(cut_after_bytes=1500 if body is STREAM else 300)


@BOTH
@pytest.mark.parametrize("num_tokens", [0, 2])
def test_an_aborted_request_ends_as_an_instance_writes_it(body: dict[str, Any], num_tokens: int) -> None:
    async def scenario() -> None:
        instance = StandInInstance("a")
        instance.behave = lambda *_: Behaviour(silent_after=num_tokens)
        instance.closes = writes
        async with running_router(instance, stall_timeout_s=1000.0) as router:
            asking = asyncio.create_task(router.post(body))
            streams = router.process.stream_runner.core.live_streams
            await until(lambda: [num_told(route.stream) for route in streams()] == [num_tokens])
            await instance.wait_until(lambda: len(instance.attempts) == 1)
            await router.post({"all": True}, path="/v1/abort")
            answer = await asking
            assert answer.status == 200
            said = ["aborted", num_tokens] if num_tokens else ["aborted"]
            if body is STREAM:
                assert answer.stream.chunks[-1]["said"] == said
                assert (answer.stream.errors, answer.stream.num_done) == ([], 1)
            else:
                assert answer.json["said"] == said
            [asked] = instance.asked_to_close
            assert asked.attempt.choices == ([ChoiceSnapshot(TOKENS[:num_tokens])] if num_tokens else [])
            assert len(instance.attempts) == 1, "nothing is generated for it any more"

    run(scenario())


def test_an_abort_after_the_last_token_waits_for_the_whole_answer() -> None:
    """No choice is open, and what an instance writes from the tokens has no logprobs."""

    async def scenario() -> None:
        instance, gate = StandInInstance("a"), asyncio.Event()
        instance.behave = lambda *_: Behaviour(silent_after=len(TOKENS), gate=gate)
        instance.closes = writes
        async with running_router(instance, stall_timeout_s=1000.0) as router:
            asking = asyncio.create_task(router.post(BODY))
            streams = router.process.stream_runner.core.live_streams
            await until(lambda: [num_told(route.stream) for route in streams()] == [len(TOKENS)])
            await router.post({"all": True}, path="/v1/abort")
            gate.set()
            answer = await asking
            assert answer.status == 200
            assert [one["finish_reason"] for one in answer.json["choices"]] == ["length"]
            assert (instance.asked_to_close, len(instance.attempts)) == ([], 1)

    run(scenario())


def test_an_abort_after_the_last_token_ends_the_request_where_its_answer_is_lost() -> None:
    async def scenario() -> None:
        instance, gate = StandInInstance("a"), asyncio.Event()
        instance.behave = lambda *_: Behaviour(silent_after=len(TOKENS), gate=gate)
        async with running_router(instance, stall_timeout_s=1000.0) as router:
            asking = asyncio.create_task(router.post(BODY))
            streams = router.process.stream_runner.core.live_streams
            await until(lambda: [num_told(route.stream) for route in streams()] == [len(TOKENS)])
            await router.post({"all": True}, path="/v1/abort")
            await instance.stop()
            answer = await asking
            assert (answer.status, answer.json["error"]["code"]) == (409, "aborted")
            assert len(instance.attempts) == 1, "no attempt brings it back"

    run(scenario())


@BOTH
def test_when_the_last_attempt_is_lost_another_instance_writes_what_there_is(body: dict[str, Any]) -> None:
    async def scenario() -> None:
        lost, other = StandInInstance("lost"), StandInInstance("other")
        for instance in (lost, other):
            instance.closes = writes
            instance.behave = lambda *_: breaks_off(body)
        async with running_router(lost, other, preempt_retry_count=0) as router:
            answer = await router.post(body)
            [asked] = lost.asked_to_close + other.asked_to_close
            tried = [instance.name for instance in (lost, other) if instance.attempts]
            assert tried != [one.name for one in (lost, other) if one.asked_to_close], (
                "the one that broke off comes last"
            )
            num_tokens = len(asked.attempt.choices[0].token_ids)
            assert num_tokens and asked.attempt.choices[0].token_ids == TOKENS[:num_tokens]
            if body is STREAM:
                assert [one["code"] for one in answer.stream.errors] == ["upstream_lost"]
                assert answer.stream.partials == [{"said": ["upstream_lost", num_tokens], "usage": None}]
            else:
                assert (answer.status, answer.json["said"]) == (503, ["upstream_lost", num_tokens])

    run(scenario())


@BOTH
def test_where_no_instance_can_write_it_the_client_is_told_how_to_continue(body: dict[str, Any]) -> None:
    async def scenario() -> None:
        instance = StandInInstance("a")
        instance.behave = lambda *_: breaks_off(body)
        async with running_router(instance, preempt_retry_count=0) as router:
            answer = await router.post(body)
            code, partial = (
                (answer.stream.errors[0]["code"], answer.stream.partials[0])
                if body is STREAM
                else (answer.json["error"]["code"], answer.json["partial"])
            )
            assert code == "upstream_lost" and partial is not None
            num_tokens = len(partial["resume"]["generated_token_ids"])
            assert num_tokens and partial == resume_from(TOKENS[:num_tokens])

    run(scenario())


@BOTH
def test_an_aborted_request_that_no_instance_can_end_is_told_how_to_continue(body: dict[str, Any]) -> None:
    async def scenario() -> None:
        instance = StandInInstance("a")
        instance.behave = lambda *_: Behaviour(silent_after=2)
        async with running_router(instance, stall_timeout_s=1000.0) as router:
            asking = asyncio.create_task(router.post(body))
            streams = router.process.stream_runner.core.live_streams
            await until(lambda: [num_told(route.stream) for route in streams()] == [2])
            await router.post({"all": True}, path="/v1/abort")
            answer = await asking
            if body is STREAM:
                assert [one["code"] for one in answer.stream.errors] == ["aborted"]
                assert answer.stream.partials == [resume_from(TOKENS[:2])]
            else:
                assert (answer.status, answer.json["error"]["code"]) == (409, "aborted")
                assert answer.json["partial"] == resume_from(TOKENS[:2])

    run(scenario())


def test_an_error_that_an_instance_has_written_is_passed_on_with_its_part() -> None:
    async def scenario() -> None:
        instance = StandInInstance("a")
        instance.closes = writes
        instance.behave = lambda *_: Behaviour(fails_after=2, error=CRASHED)
        async with running_router(instance) as router:
            answer = await router.post(STREAM)
            assert [one["code"] for one in answer.stream.errors] == ["crashed_worker"]
            assert instance.asked_to_close == [], "the instance has said what there is"

    run(scenario())


def stream_of(body: dict[str, Any], *choices: DeliveredChoice) -> ClientStream:
    origin = ClientRequest("r", 7, 0, 0.0, "/v1/completions", msgspec.json.encode(body), is_streaming=False)
    return ClientStream(origin, 3, choices=list(choices))


def test_what_a_router_says_itself_is_only_how_to_continue() -> None:
    choices = [DeliveredChoice([1, 2], "stop"), DeliveredChoice([3]), DeliveredChoice([], "abort")]
    assert build_partial(stream_of({"n": 3}, *choices)) == {
        "seed": 7,
        "resume": {
            "seed": 7,
            "generated_token_ids": [[1, 2], [3], []],
            "generated_finish_reasons": ["stop", None, None],
        },
    }
    assert build_partial(stream_of({"n": 1, "best_of": 3}, *choices)) is None, "that cannot be continued from tokens"
    assert build_partial(stream_of({"echo": True, "max_tokens": 0}, *choices)) is None, "nor can this"
    assert build_partial(stream_of({}, DeliveredChoice())) is None
    cut = stream_of({"truncate_prompt_tokens": -1}, DeliveredChoice([1]))
    cut.max_prompt_tokens = 5
    partial = build_partial(cut)
    assert partial is not None and partial["resume"]["truncate_prompt_tokens"] == 5


@pytest.mark.parametrize(("reason", "num_kept"), [("abort", 0), (None, 1)])
def test_a_stream_that_was_aborted_at_its_instance_is_not_kept(reason: str | None, num_kept: int) -> None:
    world = World("a")
    route = world.open()
    world.start(route, tokens=2)
    route.stream.choices[0].finish_reason = reason
    world.core.close_stream(route, world.now_s, keep=True)
    assert len(world.core.resumable_streams) == num_kept
