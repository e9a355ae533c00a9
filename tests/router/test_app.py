"""The router over real sockets, against stand-ins for instances: what a client sees."""

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from typing import Any, cast

import aiohttp
import msgspec
import openai
import pytest
import uvloop

from onward.api.requests.decoding import decode_chat
from onward.errors import InvalidRequest
from onward.proto.cursor import parse_cursor
from onward.proto.router import REGISTER_PATH, SIGNATURE_HEADER, TOKENIZE_PATH, ChoiceSnapshot, StreamRecord
from onward.router.instance_registry import InstanceState
from onward.transport.cluster_signature import sign_request
from tests.router.harness import CHAT, Answer, Received, Router, assert_seamless, expected_text, running_router
from tests.router.stand_in_instance import Behaviour, StandInInstance, events_of, text_of, token

PATIENCE_S = 30.0
"""Less than a request may wait for an instance."""
BODY: dict[str, Any] = {
    "model": "hash",
    "messages": [{"role": "user", "content": "hi"}],
    "seed": 7,
    "max_tokens": 6,
}
STREAM = BODY | {"stream": True}
WITH_USAGE = STREAM | {"stream_options": {"include_usage": True}}


def two_instances() -> tuple[StandInInstance, StandInInstance]:
    return StandInInstance("a"), StandInInstance("b")


def first_fails(behaviour: Behaviour, *instances: StandInInstance) -> None:
    """The first attempt at a request, wherever it goes."""
    for instance in instances:
        instance.behave = lambda attempt, _: behaviour if attempt.attempt_epoch == 1 else Behaviour()


async def read_until(
    router: Router, body: dict[str, Any], num_cursors: int, headers: dict[str, str] | None = None
) -> Received:
    """A client that goes away after so many events with tokens."""
    received, rest = Received(), b""
    async with (
        aiohttp.ClientSession() as session,
        session.post(router.url + CHAT, json=body, headers=headers) as response,
    ):
        assert response.status == 200
        async for chunk in response.content.iter_any():
            *events, rest = (rest + chunk).split(b"\n\n")
            for event in events:
                if len(received.cursors) < num_cursors:
                    received.take(event.decode())
            if len(received.cursors) == num_cursors:
                break
        response.close()
    return received


def joined(first: Received, second: Received) -> Received:
    return Received(
        cursors=first.cursors + second.cursors,
        chunks=first.chunks + second.chunks,
        errors=second.errors,
        num_done=second.num_done,
        last_id=second.last_id,
    )


async def until_detached(router: Router) -> None:
    async with asyncio.timeout(5):
        while router.process.stream_runner.core.live_streams():
            await asyncio.sleep(0.01)


def test_a_stream_arrives_as_the_instance_sent_it() -> None:
    async def scenario() -> None:
        async with running_router(StandInInstance("a")) as router:
            answer = await router.post(WITH_USAGE | {"n": 2})
            assert answer.status == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            received = answer.stream
            assert_seamless(received, 7, 6, num_choices=2)
            assert [usage["completion_tokens"] for usage in received.usages()] == [12]
            assert answer.headers["x-request-id"] == received.cursors[0].request_id

    uvloop.run(scenario())


def test_an_answer_that_is_not_streamed_comes_whole() -> None:
    async def scenario() -> None:
        async with running_router(StandInInstance("a")) as router:
            answer = await router.post(BODY, headers={"x-request-id": "mine"})
            assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
            assert answer.json["choices"][0]["message"]["content"] == expected_text(7, 6)
            assert answer.headers["x-request-id"] == "mine"

    uvloop.run(scenario())


def test_what_is_not_given_is_fixed_by_the_router() -> None:
    async def scenario() -> None:
        a, b = two_instances()
        first_fails(Behaviour(fails_after=2, error={"code": "x", "message": "m", "retryable": True}), a, b)
        async with running_router(a, b) as router:
            body = {key: value for key, value in STREAM.items() if key != "seed"}
            answer = await router.post(body, headers={"x-request-id": "mine"})
            attempts = a.attempts + b.attempts
            assert len(attempts) == 2
            for name in ("seed", "created_s", "request_id", "client_request_id", "body", "path"):
                assert len({getattr(attempt, name) for attempt in attempts}) == 1
            seed = attempts[0].seed
            assert 0 <= seed < 2**53 and attempts[0].client_request_id == "mine"
            assert_seamless(answer.stream, seed, 6)

    uvloop.run(scenario())


async def answers_cut_at(router: Router, body: dict[str, Any], cuts: Iterable[int]) -> list[Answer]:
    """Each request's first attempt breaks after so many bytes."""
    for instance in router.instances:
        instance.behave = lambda attempt, _: Behaviour(
            cut_after_bytes=int(attempt.client_request_id) if attempt.attempt_epoch == 1 else None
        )
    return await asyncio.gather(*(router.post(body, headers={"x-request-id": str(cut)}) for cut in cuts))


def test_a_connection_may_break_after_any_byte() -> None:
    async def scenario() -> None:
        body = WITH_USAGE | {"max_tokens": 2}
        async with running_router(*two_instances(), retry_budget=1.0) as router:
            await router.post(body)
            (attempt,) = router.instances[0].attempts + router.instances[1].attempts
            sizes = [len(event) for event in events_of(attempt, Behaviour())]
            # Every byte of the first event with tokens, and some of all the others.
            start, end, total = sum(sizes[:2]), sum(sizes[:3]) + 1, sum(sizes)
            cuts = [*range(0, start, 11), *range(start, end), *range(end, total, 11)]
            for batch in range(0, len(cuts), 64):
                for answer in await answers_cut_at(router, body, cuts[batch : batch + 64]):
                    received = answer.stream
                    assert_seamless(received, 7, 2)
                    assert len(received.usages()) == 1

    uvloop.run(scenario())


@pytest.mark.parametrize("streams", [True, False])
def test_a_drained_instance_hands_its_streams_over(streams: bool) -> None:
    async def scenario() -> None:
        a, b = two_instances()
        gate = asyncio.Event()
        first_fails(Behaviour(silent_after=3, gate=gate), a, b)
        async with running_router(a, b, preempt_retry_count=0) as router:
            asking = asyncio.create_task(router.post(BODY | {"stream": streams}))
            while not a.attempts + b.attempts:
                await asyncio.sleep(0.01)
            first = a if a.attempts else b
            first.state = "draining"
            answer = await asking
            assert first.cancelled, "the losing side is cancelled"
            if streams:
                assert_seamless(answer.stream, 7, 6)
            else:
                assert answer.json["choices"][0]["message"]["content"] == expected_text(7, 6)
            assert router.metric("resumes", "drain", "exact") == 1

    uvloop.run(scenario())


def test_a_preempted_request_is_carried_on_and_without_retries_told_in_its_own_form() -> None:
    error = {"code": "pd_preempted", "message": "PD Error: no blocks", "retryable": True}

    async def scenario() -> None:
        a, b = two_instances()
        first_fails(Behaviour(fails_after=3, error=error), a, b)
        async with running_router(a, b) as router:
            assert_seamless((await router.post(STREAM)).stream, 7, 6)
        a, b = two_instances()
        first_fails(Behaviour(fails_after=3, error=error), a, b)
        async with running_router(a, b, preempt_retry_count=0) as router:
            streamed = (await router.post(STREAM)).stream
            assert (streamed.finish_reasons(), streamed.num_done) == (["pd_reschedule"], 1)
            ids = streamed.choices(0)[-1]["completion_token_ids"]
            assert ids == [token(7, 0, position) for position in range(3)]
            whole = (await router.post(BODY)).json["choices"][0]
            assert (whole["finish_reason"], whole["completion_token_ids"]) == ("pd_reschedule", ids)
            # By hand, as the answer says: the rest and nothing else.
            a.behave = b.behave = lambda attempt, number: Behaviour()
            rest = (await router.post(STREAM | {"generated_token_ids": ids})).stream
            assert rest.text() == expected_text(7, 6, start=3)

    uvloop.run(scenario())


@pytest.mark.parametrize("name", ["generated_token_ids", "completion_token_ids"])
def test_tokens_that_the_client_brought_are_kept_when_their_instance_fails(name: str) -> None:
    given = [token(7, 0, position) for position in range(2)]

    async def scenario() -> None:
        a, b = two_instances()
        first_fails(Behaviour(fails_after=2), a, b)
        async with running_router(a, b) as router:
            rest = (await router.post(STREAM | {name: given})).stream
            assert rest.text() == expected_text(7, 6, start=2)
            assert [len(one.token_ids) for one in (a.attempts + b.attempts)[-1].choices] == [4]

    uvloop.run(scenario())


def test_bad_requests_get_the_instances_own_words() -> None:
    error = {"message": "n: must be between 1 and 16", "code": "invalid_request", "param": "n", "odd": [1]}

    async def scenario() -> None:
        a, b = two_instances()
        first_fails(Behaviour(status=400, error=error), a, b)
        async with running_router(a, b) as router:
            for body in (STREAM, BODY):
                answer = await router.post(body)
                assert (answer.status, answer.json) == (400, {"error": error})
            assert len(a.attempts + b.attempts) == 2

    uvloop.run(scenario())


@pytest.mark.parametrize("body", [b"", b"{", b'{"model": "hash"} x', b"[]", b'{"model": 7, "messages": []}'])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_what_every_instance_refuses_is_refused_without_one_and_in_the_same_words(path: str, body: bytes) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        decode_chat(body, cast(Any, "not looked at any more"))

    async def scenario() -> None:
        async with (
            running_router() as router,
            asyncio.timeout(PATIENCE_S),
            router.session.post(router.url + path, data=body) as response,
        ):
            told = (await response.json())["error"]
            assert response.status == 400
            own = refusal.value
            assert (told["message"], told["code"], told["param"]) == (own.message, own.code, own.param)

    uvloop.run(scenario())


@pytest.mark.parametrize("policy", ["round_robin", "prefix"])
def test_numbers_out_of_all_bounds_are_for_the_instance_to_refuse(policy: str) -> None:
    too_much: list[dict[str, Any]] = [
        {"seed": 1 << 70},
        {"seed": -(1 << 64)},
        {"deadline_ms": 10**400},
        {"deadline_ms": -5},
        {"max_tokens": 1 << 70},
        {"prompt_token_ids": [1 << 70] * 20},
        {"prompt_token_ids": [1 << 40] * 20},
        {"generated_token_ids": [1 << 70]},
    ]
    refusal = {"code": "invalid_request", "message": "too much"}

    async def scenario() -> None:
        instance = StandInInstance("a")
        instance.behave = lambda attempt, _: Behaviour(status=400, error=refusal)
        async with running_router(instance, policy=policy) as router:
            for fields in too_much:
                answer = await router.post(BODY | fields)
                assert (answer.status, answer.json) == (400, {"error": refusal}), fields

    uvloop.run(scenario())


def test_a_body_over_the_limit_is_refused() -> None:
    async def scenario() -> None:
        async with running_router(StandInInstance("a"), max_body_bytes=100) as router:
            assert (await router.post(BODY | {"user": "x" * 100})).status == 413

    uvloop.run(scenario())


def test_overload_passes_on_when_to_come_back() -> None:
    async def scenario() -> None:
        a, b = two_instances()
        error = {"message": "full", "code": "overloaded", "type": "rate_limit_error"}
        a.behave = lambda *_: Behaviour(status=429, error=error, headers={"retry-after": "7"})
        b.behave = lambda *_: Behaviour(status=429, error=error, headers={"retry-after": "9"})
        async with running_router(a, b) as router:
            answers = [await router.post(body) for body in (STREAM, BODY, STREAM)]
            assert [(one.status, one.headers["retry-after"]) for one in answers] == [(429, "7")] * 3
            assert [len(instance.attempts) for instance in (a, b)] == [3, 3], "each was asked, once"

    uvloop.run(scenario())


def test_a_question_that_is_passed_on_is_refused_with_the_time_to_come_back() -> None:
    error = {"code": "overloaded", "message": "too many texts", "retryable": True, "retry_after_s": 1.5}

    async def scenario() -> None:
        instance = StandInInstance("a")
        instance.answers[TOKENIZE_PATH] = 429, msgspec.json.encode({"error": error})
        async with running_router(instance) as router:
            refused = await router.post({"prompt": "x"}, path="/tokenize")
            assert (refused.status, refused.json["error"], refused.headers["retry-after"]) == (429, error, "2")

    uvloop.run(scenario())


def states(router: Router) -> dict[str, InstanceState]:
    serving = router.process.stream_runner
    return {one.instance_id: one.state for one in serving.core.instances.list_instances(serving.clock.now_s())}


class UnreachableInstance(StandInInstance):
    """Registers an address at which nothing can be reached."""

    def __init__(self, name: str, address: str) -> None:
        super().__init__(name)
        self.address = address

    @property
    def url(self) -> str:
        return self.address


@pytest.mark.parametrize(
    "url", ["http://gpu-box..internal:23003", "http://127.0.0.1:99999", "http://[::1", "http://gpu-box.internal:23003"]
)
def test_an_unusable_address_is_not_taken_and_disturbs_no_request(url: str) -> None:
    async def scenario() -> None:
        busy, unusable = StandInInstance("busy"), UnreachableInstance("unusable", url)
        async with running_router(busy, policy="least_loaded") as router:
            answer = await unusable.register_once(router.session, router.url)
            assert answer.error.startswith("url is ")
            answers = await asyncio.gather(*(router.post(STREAM) for _ in range(10)))
            for one in answers:
                assert_seamless(one.stream, 7, 6)
            assert list(states(router)) == ["busy"]

    uvloop.run(scenario())


def test_a_stream_that_fails_over_to_an_unreachable_instance_is_not_lost() -> None:
    async def scenario() -> None:
        breaking, sound = two_instances()
        unreachable = UnreachableInstance("unreachable", "http://127.0.0.1:1")
        breaking.behave = lambda *_: Behaviour(silent_after=3, gate=asyncio.Event())
        async with running_router(breaking) as router:
            asking = asyncio.create_task(router.post(STREAM))
            await breaking.wait_until(lambda: bool(breaking.attempts))
            assert not (await unreachable.register_once(router.session, router.url)).error
            await breaking.stop()
            async with asyncio.timeout(PATIENCE_S):
                while states(router)["unreachable"] is not InstanceState.SUSPECT:
                    await asyncio.sleep(0.01)
            await sound.start()
            await sound.register_once(router.session, router.url)
            assert_seamless((await asking).stream, 7, 6)
            await sound.stop()

    uvloop.run(scenario())


PAGES: dict[str, dict[str, str]] = {
    "of another site": {"Origin": "https://attacker.example", "Sec-Fetch-Site": "cross-site"},
    "of another port": {"Origin": "http://127.0.0.1:3000", "Sec-Fetch-Site": "same-site"},
    "that has given its name our address": {"Host": "attacker.example", "Sec-Fetch-Site": "same-origin"},
    "of an old browser": {},
}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_in_a_browser_can_register_no_instance_and_abort_nothing(page: str) -> None:
    async def scenario() -> None:
        rogue, running = StandInInstance("rogue"), StandInInstance("a")
        running.behave = lambda *_: Behaviour(silent_after=3, gate=gate)
        gate = asyncio.Event()
        await rogue.start()
        async with running_router(running, registers=False) as router:
            await running.register_once(router.session, router.url)
            streaming = asyncio.create_task(router.post(STREAM))
            await running.wait_until(lambda: bool(running.attempts))
            registration = msgspec.msgpack.encode(rogue.registration())
            asked = {REGISTER_PATH: registration, "/v1/abort": b'{"all": true}', CHAT: msgspec.json.encode(BODY)}
            named = "Content-Type" if page == "of an old browser" else next(iter(PAGES[page]))
            refusals: list[tuple[int, str]] = []
            for path, body in asked.items():
                headers = {**PAGES[page], "Content-Type": "text/plain"}
                async with router.session.post(router.url + path, data=body, headers=headers) as response:
                    refusals.append((response.status, (await response.json())["error"]["param"]))
            gate.set()
            assert refusals == [(415 if named == "Content-Type" else 403, named)] * 3
            assert list(states(router)) == ["a"]
            assert_seamless((await streaming).stream, 7, 6)
        await rogue.stop()

    uvloop.run(scenario())


def test_no_path_is_redirected_to_the_host_that_a_client_names() -> None:
    async def scenario() -> None:
        async with running_router(StandInInstance("a")) as router:
            for path in ("/health/", "/live/", "/v1/chat/completions/", "/internal/register/", "/metrics/", "/docs/"):
                async with router.session.get(router.url + path, allow_redirects=False) as response:
                    assert (response.status, "location" in response.headers) == (404, False), path

    uvloop.run(scenario())


def test_requests_wait_for_the_first_instance() -> None:
    async def scenario() -> None:
        a = StandInInstance("a")
        async with running_router(a, registers=False) as router:
            assert (await router.get("/health")).status == 503
            asking = asyncio.create_task(router.post(STREAM))
            while not router.process.stream_runner.core.live_streams():
                await asyncio.sleep(0.01)
            a.register_with(router.url)
            assert_seamless((await asking).stream, 7, 6)
            assert (await router.get("/health")).status == 200

    uvloop.run(scenario())


def test_requests_beyond_the_queue_are_told_to_come_back() -> None:
    async def scenario() -> None:
        async with running_router(max_queue=1) as router:
            waiting = asyncio.create_task(router.post(STREAM))
            while not router.process.stream_runner.core.live_streams():
                await asyncio.sleep(0.01)
            answer = await router.post(STREAM)
            assert (answer.status, answer.headers["retry-after"]) == (429, "1")
            waiting.cancel()
            await asyncio.wait((waiting,))

    uvloop.run(scenario())


def test_a_deadline_ends_the_waiting() -> None:
    async def scenario() -> None:
        async with running_router() as router:
            answer = await router.post(STREAM | {"deadline_ms": 50})
            assert (answer.status, answer.json["error"]["code"]) == (504, "deadline_exceeded")

    uvloop.run(scenario())


def test_a_static_instance_is_found_by_asking_it_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onward.router.stream_runner")

    async def scenario() -> None:
        a = StandInInstance("a")
        await a.start()
        async with running_router(a, registers=False, instances=f"http://127.0.0.1:1,{a.url}/") as router:
            assert_seamless((await router.post(STREAM)).stream, 7, 6)

    uvloop.run(scenario())
    assert [line for line in caplog.messages if line.startswith("instance id=") and line.endswith("state=ready")]


def test_a_dead_instance_costs_a_new_request_nothing() -> None:
    async def scenario() -> None:
        a, b = two_instances()
        async with running_router(a, b, preempt_retry_count=0) as router:
            await a.stop()
            for _ in range(4):
                assert_seamless((await router.post(STREAM)).stream, 7, 6)
            assert len(b.attempts) == 4

    uvloop.run(scenario())


def test_a_client_that_goes_stops_the_work_and_may_come_back() -> None:
    async def scenario() -> None:
        a = StandInInstance("a")
        gate = asyncio.Event()
        first_fails(Behaviour(silent_after=4, gate=gate), a)
        async with running_router(a) as router:
            first = await read_until(router, WITH_USAGE, 3)
            await a.wait_until(lambda: len(a.cancelled) == 1)
            answer = await router.get(CHAT, {"Last-Event-ID": first.last_id})
            second = answer.stream
            assert [cursor.attempt_epoch for cursor in second.cursors] == [2, 2, 2]
            assert_seamless(joined(first, second), 7, 6)
            assert len(second.usages()) == 1
            assert [len(choice.token_ids) for choice in a.attempts[1].choices] == [3]

    uvloop.run(scenario())


def test_a_resumed_stream_is_admitted_like_a_new_one_and_a_refusal_loses_nothing() -> None:
    async def scenario() -> None:
        a = StandInInstance("a")
        gate = asyncio.Event()
        limited = {"code": "rate_limited", "message": "max_in_flight", "retryable": True}
        refusing = Behaviour(status=429, error=limited, headers={"retry-after": "7"})
        by_epoch = {1: Behaviour(silent_after=4, gate=gate), 2: refusing}
        a.behave = lambda attempt, _: by_epoch.get(attempt.attempt_epoch, Behaviour())
        async with running_router(a) as router:
            first = await read_until(router, WITH_USAGE, 3)
            await a.wait_until(lambda: len(a.cancelled) == 1)
            refused = await router.get(CHAT, {"Last-Event-ID": first.last_id})
            assert (refused.status, refused.headers["retry-after"]) == (429, "7")
            second = (await router.get(CHAT, {"Last-Event-ID": first.last_id})).stream
            assert_seamless(joined(first, second), 7, 6)
            assert [attempt.was_accepted for attempt in a.attempts] == [False, False, False]

    uvloop.run(scenario())


def test_a_client_that_lost_only_the_end_gets_the_end() -> None:
    async def scenario() -> None:
        async with running_router(StandInInstance("a")) as router:
            first = (await router.post(STREAM)).stream
            again = (await router.get(CHAT, {"Last-Event-ID": first.last_id})).stream
            assert (again.chunks, again.errors, again.num_done) == ([], [], 1)

    uvloop.run(scenario())


@pytest.mark.parametrize("remembers", [True, False])
def test_the_clients_deadline_holds_although_it_comes_back(remembers: bool) -> None:
    async def scenario() -> None:
        instance = StandInInstance("a")
        instance.behave = lambda attempt, number: Behaviour(silent_after=2, gate=asyncio.Event())
        async with running_router(instance, stall_timeout_s=60.0, request_timeout_s=1000.0) as router:
            first = await read_until(router, STREAM | {"deadline_ms": 60_000}, 2)
            await until_detached(router)
            if not remembers:  # as a router that was restarted
                told = instance.attempts[-1]
                made = msgspec.structs.replace(told, choices=[ChoiceSnapshot([token(7, 0, 0), token(7, 0, 1)])])
                instance.records[told.request_id] = StreamRecord(attempt=made)
                router.process.stream_runner.core.resumable_streams.drop(told.request_id)
            async with router.session.get(router.url + CHAT, headers={"Last-Event-ID": first.last_id}) as response:
                assert response.status == 200
            left_s = instance.attempts[-1].deadline_in_s
            assert instance.attempts[-1].attempt_epoch == 2 and left_s is not None and left_s <= 60.0

    uvloop.run(scenario())


def test_a_client_may_come_back_before_its_going_was_noticed() -> None:
    async def scenario() -> None:
        a = StandInInstance("a")
        gate = asyncio.Event()
        first_fails(Behaviour(silent_after=3, gate=gate), a)
        async with running_router(a) as router, router.session.post(router.url + CHAT, json=STREAM) as response:
            data = b""
            while data.count(b"id: ") < 3 or not data.endswith(b"\n\n"):
                data += await response.content.readany()
            first = Received.of(data)
            second = (await router.get(CHAT, {"Last-Event-ID": first.last_id})).stream
            assert_seamless(joined(first, second), 7, 6)

    uvloop.run(scenario())


def test_another_router_finds_the_record_at_the_instances() -> None:
    async def scenario() -> None:
        a, b = two_instances()
        gate = asyncio.Event()
        first_fails(Behaviour(silent_after=4, gate=gate), a, b)
        async with running_router(a, b) as router:
            first = await read_until(router, STREAM, 3)
            holder = a if a.attempts else b
            made = [token(7, 0, position) for position in range(4)]
            kept = msgspec.structs.replace(holder.attempts[0], choices=[ChoiceSnapshot(made)])
            await until_detached(router)
            holder.records[kept.request_id] = StreamRecord(attempt=kept)
            async with running_router(a, b) as other:
                second = (await other.get(CHAT, {"Last-Event-ID": first.last_id})).stream
                assert_seamless(joined(first, second), 7, 6)

    uvloop.run(scenario())


def test_a_router_that_has_just_started_waits_for_the_instances_before_it_knows_nothing() -> None:
    async def scenario() -> None:
        a = StandInInstance("a")
        first_fails(Behaviour(silent_after=4, gate=asyncio.Event()), a)
        async with running_router(a) as router:
            first = await read_until(router, STREAM, 3)
            await until_detached(router)
            kept = msgspec.structs.replace(a.attempts[0], choices=[ChoiceSnapshot([token(7, 0, i) for i in range(4)])])
            a.records[kept.request_id] = StreamRecord(attempt=kept)
            async with running_router(a, registers=False, settle_s=10.0) as other:
                asking = asyncio.create_task(other.get(CHAT, {"Last-Event-ID": first.last_id}))
                await asyncio.sleep(0)
                await a.register_once(other.session, other.url)
                assert_seamless(joined(first, (await asking).stream), 7, 6)

    uvloop.run(scenario())


UNKNOWN = {"code": "stream_unknown", "type": "invalid_request_error", "message": "not held here"}


@pytest.mark.parametrize("is_registered", [True, False])
def test_a_stream_is_not_unknown_while_its_instance_cannot_be_asked(is_registered: bool) -> None:
    async def scenario() -> None:
        a = StandInInstance("a")
        first_fails(Behaviour(silent_after=4, gate=asyncio.Event()), a)
        async with running_router(a) as router:
            first = await read_until(router, STREAM, 3)
            await until_detached(router)
            kept = msgspec.structs.replace(a.attempts[0], choices=[ChoiceSnapshot([token(7, 0, i) for i in range(4)])])
            a.records[kept.request_id] = StreamRecord(attempt=kept)
            async with running_router(a, registers=is_registered) as other:
                await a.stop()
                asked = await other.get(CHAT, {"Last-Event-ID": first.last_id})
                assert (asked.status, asked.json["error"]["code"]) == (503, "unavailable")
                assert asked.headers["retry-after"] == "1"
                await a.start()
                await a.register_once(other.session, other.url)
                again = await other.get(CHAT, {"Last-Event-ID": first.last_id})
                assert_seamless(joined(first, again.stream), 7, 6)

    uvloop.run(scenario())


def test_a_repeated_post_that_nobody_can_make_again_is_not_unknown_while_an_instance_cannot_be_asked() -> None:
    async def scenario() -> None:
        async with running_router(StandInInstance("gone")) as router:
            first = await read_until(router, STREAM, 2)
        a, b = two_instances()
        for one in (a, b):
            one.behave = lambda *_: Behaviour(status=404, error=UNKNOWN)
        async with running_router(a, b) as router:
            back = {"Last-Event-ID": first.last_id}
            told = await router.post(STREAM, headers=back)
            assert (told.status, told.json["error"]["code"]) == (404, "stream_unknown"), "all of them say so"
            await b.stop()
            told = await router.post(STREAM, headers=back)
            assert (told.status, told.json["error"]["code"]) == (503, "unavailable")
            assert told.headers["retry-after"] == "1"

    uvloop.run(scenario())


def test_a_head_begins_nothing_and_takes_nothing_up() -> None:
    async def scenario() -> None:
        a = StandInInstance("a")
        async with running_router(a) as router, aiohttp.ClientSession() as session:
            async with session.head(router.url + CHAT) as response:
                assert response.status == 400
            assert a.attempts == []

    uvloop.run(scenario())


def test_a_stream_that_nobody_has_is_unknown_and_a_repeated_post_makes_it_again() -> None:
    async def scenario() -> None:
        async with running_router(StandInInstance("a")) as router:
            first = await read_until(router, STREAM, 2)
            await until_detached(router)
        a = StandInInstance("a2")
        async with running_router(a) as router:
            lost = await router.get(CHAT, {"Last-Event-ID": first.last_id})
            assert (lost.status, lost.json["error"]["code"]) == (404, "stream_unknown")
            other_seed = await router.post(STREAM | {"seed": 8}, headers={"Last-Event-ID": first.last_id})
            assert (other_seed.status, other_seed.json["error"]["param"]) == (400, "seed")
            # It breaks once more, in the middle of what the client has already.
            a.behave = lambda attempt, _: Behaviour(cut_after_bytes=130) if attempt.attempt_epoch == 2 else Behaviour()
            again = (await router.post(STREAM, headers={"Last-Event-ID": first.last_id})).stream
            assert_seamless(joined(first, again), 7, 6)
            assert [attempt.attempt_epoch for attempt in a.attempts] == [2, 3]

    uvloop.run(scenario())


@pytest.mark.parametrize("line", ["", "nonsense", "1;r;7;1;1", "2;r;9;7;1;1;", "1;r;7;1;1;"])
def test_a_cursor_that_is_none_is_a_bad_request(line: str) -> None:
    async def scenario() -> None:
        async with running_router(StandInInstance("a")) as router:
            answer = await router.get(CHAT, {"Last-Event-ID": line})
            assert (answer.status, answer.json["error"]["param"]) == (400, "Last-Event-ID")
            missing = await router.get(CHAT)
            assert (missing.status, missing.json["error"]["param"]) == (400, "Last-Event-ID")

    uvloop.run(scenario())


def test_a_second_request_with_a_live_label_is_a_conflict() -> None:
    async def scenario() -> None:
        a = StandInInstance("a")
        gate = asyncio.Event()
        first_fails(Behaviour(silent_after=1, gate=gate), a)
        async with running_router(a) as router:
            first = asyncio.create_task(router.post(STREAM, headers={"x-request-id": "mine"}))
            await a.wait_until(lambda: len(a.attempts) == 1)
            assert (await router.post(STREAM, headers={"x-request-id": "mine"})).status == 409
            gate.set()
            assert (await first).status == 200
            assert (await router.post(STREAM, headers={"x-request-id": "mine"})).status == 200

    uvloop.run(scenario())


def test_every_route_but_probes_wants_the_api_key() -> None:
    async def scenario() -> None:
        async with running_router(StandInInstance("a"), api_key=("secret-1",)) as router:
            good = {"Authorization": "Bearer secret-1"}
            for headers in ({}, {"Authorization": "Bearer secret-2"}, {"Authorization": "Basic secret-1"}):
                assert (await router.post(STREAM, headers=headers)).status == 401
                for path in ("/v1/models", "/metrics", "/info", "/version", "/internal/status", CHAT):
                    assert (await router.get(path, headers)).status == 401
                for path in ("/live", "/health"):
                    assert (await router.get(path, headers)).status == 200
            assert_seamless((await router.post(STREAM, headers=good)).stream, 7, 6)
            assert (await router.get("/internal/status", good)).status == 200
            assert b"secret-1" not in (await router.get("/info", good)).body

    uvloop.run(scenario())


def test_instances_prove_that_they_hold_the_clusters_key() -> None:
    key = "ab" * 32

    async def scenario() -> None:
        a = StandInInstance("a")
        await a.start()
        async with running_router(a, registers=False, cluster_key=key) as router:
            body = msgspec.msgpack.encode(a.registration())
            wall_s = router.process.stream_runner.clock.wall_s()
            proofs = {
                "": 401,
                sign_request("cd" * 32, "POST", REGISTER_PATH, body, wall_s): 401,
                sign_request(key, "POST", REGISTER_PATH, b"other", wall_s): 401,
                sign_request(key, "POST", REGISTER_PATH, body, wall_s): 200,
            }
            for proof, status in proofs.items():
                headers = {SIGNATURE_HEADER: proof}
                async with router.session.post(router.url + REGISTER_PATH, data=body, headers=headers) as response:
                    assert response.status == status
            assert (await router.get("/internal/status")).status == 200
            assert_seamless((await router.post(STREAM)).stream, 7, 6)
        async with running_router(cluster_key=key, api_key=("k",)) as router:
            assert (await router.get("/internal/status")).status == 401
            proof = sign_request(key, "GET", "/internal/status", b"", router.process.stream_runner.clock.wall_s())
            assert (await router.get("/internal/status", {SIGNATURE_HEADER: proof})).status == 200

    uvloop.run(scenario())


def test_status_shows_instances_and_the_last_resumes() -> None:
    async def scenario() -> None:
        a, b = two_instances()
        first_fails(Behaviour(cut_after_bytes=1000), a, b)
        async with running_router(a, b) as router:
            await router.post(STREAM)
            status = (await router.get("/internal/status")).json
            shown = {one["id"]: one for one in status["instances"]}
            assert shown.keys() == {"a", "b"}
            keys = {
                "id",
                "name",
                "node",
                "role",
                "model",
                "model_aliases",
                "state",
                "url",
                "incarnation",
                "load",
                "blocks",
                "streams",
                "pids",
                "oom_kills",
            }
            assert status.keys() == {"instances", "resumes", "waiting"}
            assert shown["a"].keys() == keys and shown["a"]["url"] == a.url
            assert [one["cause"] for one in status["resumes"]] == ["lost"]
            metrics = (await router.get("/metrics")).body.decode()
            assert 'onward_router_resumes_total{cause="lost",outcome="exact"} 1.0' in metrics
            assert f'onward_router_requests_total{{path="{CHAT}",status="200"}} 1.0' in metrics
            assert 'onward_router_instances{model_name="hash",role="mixed",state=' in metrics
            assert (await router.get("/v1/models")).json["data"][0]["id"] == "hash"
            assert (await router.get("/nowhere")).status == 404

    uvloop.run(scenario())


def test_resumes_are_told_only_when_asked_for() -> None:
    async def scenario() -> None:
        for tells in (False, True):
            a, b = two_instances()
            first_fails(Behaviour(cut_after_bytes=1000), a, b)
            async with running_router(a, b, report_resumes=tells) as router:
                streamed = await router.post(STREAM)
                assert (b": resumes 1\n\ndata: [DONE]\n\n" in streamed.body) == tells
                whole = await router.post(BODY)
                assert ("x-onward-resumes" in whole.headers) == tells

    uvloop.run(scenario())


def test_a_router_that_stops_tells_its_streams() -> None:
    async def scenario() -> None:
        a = StandInInstance("a")
        first_fails(Behaviour(silent_after=3, gate=asyncio.Event()), a)
        async with running_router(a) as router:
            async with router.session.post(router.url + CHAT, json=STREAM) as response:
                data = b""
                while data.count(b"id: ") < 3:
                    data += await response.content.readany()
                router.process.stop()
                data += await response.content.read()
            received = Received.of(data)
            assert [error["code"] for error in received.errors] == ["unavailable"]
            assert (received.num_done, received.errors[0]["retryable"]) == (1, True)

    uvloop.run(scenario())


def test_a_second_stop_ends_streams_at_once_and_says_how_many(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        a = StandInInstance("a")
        first_fails(Behaviour(silent_after=3, gate=asyncio.Event()), a)
        async with running_router(a, drain_s=600.0) as router:
            async with router.session.post(router.url + CHAT, json=STREAM) as response:
                data = b""
                while data.count(b"id: ") < 3:
                    data += await response.content.readany()
                router.process.stop()
                router.process.stop()
                data += await response.content.read()
            assert [error["code"] for error in Received.of(data).errors] == ["unavailable"]

    with caplog.at_level(logging.WARNING, "onward.router.stream_runner"):
        uvloop.run(scenario())
    assert "streams cut clients=1" in [record.message for record in caplog.records]


def test_a_slow_stream_is_kept_alive_by_comments() -> None:
    async def scenario() -> None:
        a = StandInInstance("a")
        gate = asyncio.Event()
        first_fails(Behaviour(silent_after=0, gate=gate), a)
        async with (
            running_router(a, keep_alive_s=0.05) as router,
            router.session.post(router.url + CHAT, json=STREAM) as response,
        ):
            first = await response.content.readany()
            assert first == b": waiting\n\n"
            gate.set()
            assert_seamless(Received.of(first + await response.content.read()), 7, 6)

    uvloop.run(scenario())


def test_the_openai_client_notices_nothing() -> None:
    async def scenario() -> None:
        a, b = two_instances()
        first_fails(Behaviour(cut_after_bytes=1000), a, b)
        async with (
            running_router(a, b, api_key=("k",)) as router,
            openai.AsyncOpenAI(base_url=router.url + "/v1", api_key="k", max_retries=0) as client,
        ):
            messages: Any = BODY["messages"]
            whole = await client.chat.completions.create(model="hash", messages=messages, seed=7, max_tokens=6, n=2)
            assert [choice.message.content for choice in whole.choices] == [expected_text(7, 6, i) for i in (0, 1)]
            stream = await client.chat.completions.create(
                model="hash", messages=messages, seed=7, max_tokens=6, stream=True
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert text == text_of([token(7, 0, position) for position in range(6)])
            with pytest.raises(openai.BadRequestError):
                a.behave = b.behave = lambda *_: Behaviour(status=400, error={"message": "m", "code": "c"})
                await client.chat.completions.create(model="hash", messages=messages)

    uvloop.run(scenario())


def test_many_streams_at_once_each_get_their_own() -> None:
    async def scenario() -> None:
        a, b = two_instances()
        first_fails(Behaviour(cut_after_bytes=900), a, b)
        async with running_router(a, b) as router:

            async def one(seed: int) -> Answer:
                return await router.post(STREAM | {"seed": seed})

            answers = await asyncio.gather(*(one(seed) for seed in range(32)))
            for seed, answer in enumerate(answers):
                assert_seamless(answer.stream, seed, 6)
            with contextlib.suppress(TimeoutError):
                await until_detached(router)
            assert all(one["streams"] == 0 for one in (await router.get("/internal/status")).json["instances"])
            assert parse_cursor(answers[-1].stream.last_id).attempt_epoch == 2

    uvloop.run(scenario())


def test_the_time_to_the_first_token_is_observed_once_for_a_request_over_all_attempts() -> None:
    async def scenario() -> None:
        a, b = two_instances()
        first_fails(Behaviour(cut_after_bytes=700), a, b)
        async with running_router(a, b) as router:
            histogram = router.process.stream_runner.core.metrics.time_to_first_token
            first = await read_until(router, STREAM, 3)
            await until_detached(router)
            assert sum(histogram.series({}).buckets) == 1
            await router.get(CHAT, {"Last-Event-ID": first.last_id})
            assert sum(histogram.series({}).buckets) == 1, "a client that continues has had its first token"
            await router.post(BODY)
            assert sum(histogram.series({}).buckets) == 2

    uvloop.run(scenario())
