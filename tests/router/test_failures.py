"""Failures that other routers had, each as a case for this one. The numbers are those of the failure list."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from onward.proto.engine import ErrorInfo
from onward.proto.router import Registration
from onward.router.client_stream import ClientStream, FailureCause
from onward.router.core import ABORTED, GiveUp
from onward.router.upstream_events import CompleteBody
from tests.router.harness import assert_seamless, expected_text, running_router
from tests.router.stand_in_instance import Behaviour, StandInInstance
from tests.router.test_core import World

CHAT_BODY: dict[str, Any] = {"model": "hash", "messages": [], "seed": 3, "max_tokens": 5}
LOST = {"code": "upstream", "message": "gone", "retryable": True}
FULL = Behaviour(status=429, error={"code": "overloaded", "message": "full"}, headers={"retry-after": "2"})
PATIENCE_S = 20.0


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Runs the scenario. A stream that does not end fails its test."""
    uvloop.run(asyncio.wait_for(scenario, PATIENCE_S))


def pair(behaviour: Behaviour) -> tuple[StandInInstance, StandInInstance]:
    """Two instances of which whichever comes first fails."""
    instances = (StandInInstance("a"), StandInInstance("b"))
    for instance in instances:
        instance.behave = lambda attempt, _: behaviour if attempt.attempt_epoch == 1 else Behaviour()
    return instances


def failing(behaviour: Behaviour) -> tuple[StandInInstance, StandInInstance]:
    instances = (StandInInstance("a"), StandInInstance("b"))
    for instance in instances:
        instance.behave = lambda *_: behaviour
    return instances


def test_f40_after_a_retry_the_whole_answer_comes_back_and_after_the_last_one_an_error() -> None:
    async def scenario() -> None:
        async with running_router(*pair(Behaviour(fails_after=3, error=LOST))) as router:
            whole = (await router.post(CHAT_BODY)).json
            assert whole["choices"][0]["message"]["content"] == expected_text(3, 5)
            assert whole["usage"]["completion_tokens"] == 5
            assert_seamless((await router.post(CHAT_BODY | {"stream": True})).stream, 3, 5)
        async with running_router(*failing(Behaviour(fails_after=0, error=LOST)), preempt_retry_count=1) as router:
            for body in (CHAT_BODY, CHAT_BODY | {"stream": True}):
                answer = await router.post(body)
                assert (answer.status, answer.json["error"]["code"]) == (503, "upstream")

    run(scenario())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/generate"])
@pytest.mark.parametrize("streams", [True, False])
def test_f41_all_choices_all_endpoints_and_both_modes_are_carried_on(path: str, streams: bool) -> None:
    async def scenario() -> None:
        behaviour = Behaviour(error=LOST)
        a, b = pair(behaviour)
        async with running_router(a, b) as router:
            for fails_after in range(12):
                behaviour.fails_after = fails_after
                answer = await router.post(CHAT_BODY | {"n": 3, "max_tokens": 4, "stream": streams}, path=path)
                if streams:
                    assert_seamless(answer.stream, 3, 4, num_choices=3)
                else:
                    texts = [choice["message"]["content"] for choice in answer.json["choices"]]
                    assert texts == [expected_text(3, 4, index) for index in range(3)]
                assert len(a.attempts) + len(b.attempts) == 2 * (fails_after + 1)

    run(scenario())


def test_f45_a_live_connection_that_brings_nothing_is_left() -> None:
    async def scenario() -> None:
        stuck = Behaviour(silent_after=2, progress=lambda _: "e 5 9 0")
        instances = pair(stuck)
        async with running_router(*instances, stall_timeout_s=0.4) as router:
            assert_seamless((await router.post(CHAT_BODY | {"stream": True})).stream, 3, 5)
            assert router.metric("resumes", "stall", "exact") == 1
            assert sum(len(instance.cancelled) for instance in instances) == 1

    run(scenario())


def test_f45_an_instance_that_accepts_and_never_answers_is_left() -> None:
    async def scenario() -> None:
        async with running_router(*pair(Behaviour(answers=False)), stall_timeout_s=0.3) as router:
            assert_seamless((await router.post(CHAT_BODY | {"stream": True})).stream, 3, 5)

    run(scenario())


@pytest.mark.parametrize("moves", ["e {} 0 3", "e 5 {} 0", "e 5 0 {}"])
def test_f45_a_long_queue_or_prefill_is_no_stall(moves: str) -> None:
    async def scenario() -> None:
        slow = Behaviour(silent_after=0, progress=lambda number: moves.format(1000 - number), num_progress=14)
        instances = pair(slow)
        async with running_router(*instances, stall_timeout_s=0.3) as router:
            assert_seamless((await router.post(CHAT_BODY | {"stream": True})).stream, 3, 5)
            assert sum(len(instance.attempts) for instance in instances) == 1

    run(scenario())


def test_f46_when_all_attempts_fail_mid_stream_there_is_an_error_and_an_end() -> None:
    async def scenario() -> None:
        instances = (StandInInstance("a"), StandInInstance("b"))
        for instance in instances:
            instance.behave = lambda attempt, _: Behaviour(
                fails_after=2 if attempt.attempt_epoch == 1 else 0, error=LOST
            )
        async with running_router(*instances, preempt_retry_count=2) as router:
            answer = await router.post(CHAT_BODY | {"stream": True})
            received = answer.stream
            assert answer.status == 200 and received.text() == expected_text(3, 2)
            assert [error["code"] for error in received.errors] == ["upstream"]
            assert (received.num_done, received.finish_reasons()) == (1, [])
            assert answer.body.rstrip().endswith(b"data: [DONE]")
            assert sum(len(instance.attempts) for instance in instances) == 3

    run(scenario())


def test_f47_a_429_is_not_retried_against_the_same_instance_and_retries_do_not_multiply() -> None:
    async def scenario() -> None:
        instances = failing(FULL)
        async with running_router(*instances) as router:
            answer = await router.post(CHAT_BODY | {"stream": True})
            assert (answer.status, answer.headers["retry-after"]) == (429, "2")
            assert [len(instance.attempts) for instance in instances] == [1, 1]

    run(scenario())


def test_f47_an_outage_does_not_become_a_storm() -> None:
    async def scenario() -> None:
        broken = failing(Behaviour(fails_after=0, error=LOST))
        async with running_router(*broken, preempt_retry_count=1000, retry_budget=0.0) as router:
            asking = [asyncio.create_task(router.post(CHAT_BODY | {"deadline_ms": 700})) for _ in range(20)]
            answers = await asyncio.gather(*asking)
            assert {answer.status for answer in answers} <= {503, 504}
            # How many of the ten are tried before the deadlines depends on the machine; test_retry_budget counts them.
            assert sum(len(instance.attempts) for instance in broken) <= 20 + 10, "ten retries are free in a minute"

    run(scenario())


def test_f48_an_abort_by_id_reaches_the_instance_that_has_it_now_and_both_sides_stop() -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        instances = (StandInInstance("a"), StandInInstance("b"))
        for instance in instances:
            instance.behave = lambda attempt, _: (
                Behaviour(fails_after=2, error=LOST)
                if attempt.attempt_epoch == 1
                else Behaviour(silent_after=1, gate=gate)
            )
        async with running_router(*instances, stall_timeout_s=1000.0) as router:
            asking = asyncio.create_task(router.post(CHAT_BODY | {"stream": True}, headers={"x-request-id": "mine"}))
            while sum(len(instance.attempts) for instance in instances) < 2:
                await asyncio.sleep(0.01)
            (request_id,) = {attempt.request_id for instance in instances for attempt in instance.attempts}
            now_at = next(one for one in instances if any(attempt.attempt_epoch == 2 for attempt in one.attempts))
            answer = await router.post({"ids": [f"chatcmpl-{request_id}", "nobody"]}, path="/v1/abort")
            assert answer.json == {"aborted": [f"chatcmpl-{request_id}"], "unknown": ["nobody"]}
            received = (await asking).stream
            assert [error["code"] for error in received.errors] == ["aborted"]
            assert received.num_done == 1
            await now_at.wait_until(lambda: now_at.cancelled == [request_id])
            assert any(request_id in ids for ids in now_at.aborted)
            back = await router.get("/v1/chat/completions", {"Last-Event-ID": received.last_id})
            assert back.status == 404
            again = await router.post({"ids": ["mine"]}, path="/v1/abort")
            assert again.json == {"aborted": [], "unknown": ["mine"]}

    run(scenario())


class Probed(StandInInstance):
    """Counts how often it was asked how it is."""

    num_probes = 0

    def registration(self) -> Registration:
        self.num_probes += 1
        return super().registration()


def test_f49_an_instance_that_answers_no_probe_holds_up_nobody_else() -> None:
    async def scenario() -> None:
        unanswered: list[asyncio.StreamWriter] = []

        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            unanswered.append(writer)
            await reader.read()
            writer.close()

        well = Probed("well")
        await well.start()
        async with await asyncio.start_server(hang, "127.0.0.1", 0) as hung:
            urls = f"http://127.0.0.1:{hung.sockets[0].getsockname()[1]},{well.url}"
            async with running_router(well, registers=False, instances=urls) as router:
                while well.num_probes < 2:
                    await asyncio.sleep(0.01)
                assert len(unanswered) == 1, "still waited for"
                assert_seamless((await router.post(CHAT_BODY | {"stream": True})).stream, 3, 5)

    run(scenario())


def test_f50_how_an_aborted_stream_ends_is_decided_once() -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        instance = StandInInstance("a")
        instance.behave = lambda attempt, _: Behaviour(silent_after=2, gate=gate)
        async with running_router(instance, stall_timeout_s=1000.0) as router:
            asking = asyncio.create_task(router.post(CHAT_BODY))
            await instance.wait_until(lambda: len(instance.attempts) == 1)
            await router.post({"all": True}, path="/v1/abort")
            gate.set()
            answer = await asking
            assert (answer.status, answer.json["error"]["code"]) == (409, "aborted")
            assert len(instance.attempts) == 1, "no attempt brings it back"

    run(scenario())


CROSSING: dict[str, Callable[[ClientStream], object]] = {
    "answer": lambda stream: stream.on_event(CompleteBody(b"{}"), 100.0),
    "lost": lambda stream: stream.fail_lost(FailureCause.LOST, "gone"),
    "refused": lambda stream: stream.fail_lost(FailureCause.REFUSED, "nobody there"),
    "final": lambda stream: stream.fail(FailureCause.ERROR, ErrorInfo("crashed_worker", "three times", 500)),
}


@pytest.mark.parametrize("crossing", CROSSING)
def test_f50_an_abort_that_crosses_another_end_stays_an_abort(crossing: str) -> None:
    world = World("a", "b")
    route = world.open(client_request_id="mine")
    world.start(route, tokens=1)
    CROSSING[crossing](route.stream)
    assert world.core.abort(["mine"], world.now_s).running == [route]
    world.core.on_attempt_ended(route, world.now_s)
    route.set_final_error(ErrorInfo("unavailable", "the router is stopping", 503))
    assert world.step(route) == GiveUp(ABORTED, None)


@pytest.mark.parametrize("fault", ["refused", "overloaded", "failed"])
def test_f51_nothing_stays_booked_when_a_dispatch_fails(fault: str) -> None:
    async def scenario() -> None:
        instances = failing(FULL if fault == "overloaded" else Behaviour(status=503, error=LOST))
        prefill = StandInInstance("p", role="prefill")
        prefill.handoff_address = "tcp://p:1"
        for instance in instances:
            instance.role = "decode"
        async with running_router(*instances, prefill, preempt_retry_count=1) as router:
            if fault == "refused":
                for instance in instances:
                    await instance.stop()
            answer = await router.post(CHAT_BODY | {"deadline_ms": 500})
            assert answer.status == {"refused": 504, "overloaded": 429, "failed": 503}[fault]
            serving = router.process.stream_runner
            booked = {
                one.instance_id: one.num_reserved
                for one in serving.core.instances.list_instances(serving.clock.now_s())
            }
            assert booked == {"a": 0, "b": 0, "p": 0}

    run(scenario())
