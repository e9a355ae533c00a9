"""Traces of a router, at a real collector: one trace for a request, whatever happens to its attempts and to the router."""

import asyncio
from typing import Any

import msgspec
import pytest
import uvloop

from onward.proto.router import ChoiceSnapshot, StreamRecord
from onward.proto.trace import TraceContext
from tests.obs.otlp_receiver import OtlpReceiver
from tests.router.harness import CHAT, Router, assert_seamless, running_router
from tests.router.stand_in_instance import Behaviour, StandInInstance, token
from tests.router.test_app import BODY, STREAM, joined, read_until, two_instances, until_detached

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=a"}
CUT = Behaviour(cut_after_bytes=700)
SERVER, ATTEMPT = "chat hash", "onward.attempt"


def cut_twice(*instances: StandInInstance) -> None:
    for instance in instances:
        instance.behave = lambda attempt, _: CUT if attempt.attempt_epoch <= 2 else Behaviour()


async def traced(receiver: OtlpReceiver, *instances: StandInInstance, headers: dict[str, str], **config: Any) -> Router:
    """The router, after one stream that is cut twice."""
    async with running_router(*instances, otlp_endpoint=receiver.url, **config) as router:
        assert_seamless((await router.post(STREAM, headers=headers)).stream, 7, 6)
    return router


def test_a_stream_that_is_cut_twice_is_one_trace_with_three_linked_attempts() -> None:
    with OtlpReceiver() as receiver:
        instances = two_instances()
        cut_twice(*instances)
        uvloop.run(traced(receiver, *instances, headers={}))
        [server], attempts = receiver.named(SERVER), receiver.named(ATTEMPT)
    assert {span.trace_id for span in receiver.spans} == {server.trace_id}
    assert server.parent_span_id == ""
    assert server.trace_id == server.attributes["gen_ai.response.id"], "a trace of our own has the request's id"
    assert [span.attributes["onward.attempt"] for span in attempts] == [1, 2, 3]
    assert {span.parent_span_id for span in attempts} == {server.span_id}
    assert [span.kind for span in attempts] == ["client"] * 3
    assert [span.linked_spans for span in attempts] == [[], [attempts[0].span_id], [attempts[1].span_id]]
    assert [span.is_error for span in attempts] == [True, True, False]
    assert [span.attributes.get("onward.failure") for span in attempts] == ["lost", "lost", None]
    assert sum(span.attributes["onward.tokens"] for span in attempts) == 6
    assert server.event_names == ["onward.resume", "onward.resume"]
    assert server.events[0][1]["onward.resume.cause"] == "lost"
    assert not server.is_error
    contexts = [attempt.trace for instance in instances for attempt in instance.attempts]
    assert {one.span_id for one in contexts if one is not None} == {span.span_id for span in attempts}


def test_the_server_span_says_what_was_asked_for_and_what_was_answered() -> None:
    with OtlpReceiver() as receiver:
        uvloop.run(traced(receiver, StandInInstance("a"), headers={"X-Request-Id": "order-17"}))
        [server] = receiver.named(SERVER)
    assert server.kind == "server"
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "onward",
        "gen_ai.request.model": "hash",
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stream": True,
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.response.finish_reasons": ["length"],
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": CHAT,
        "onward.label": "order-17",
    }
    assert {name: server.attributes.get(name) for name in expected} == expected
    assert server.attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert server.resource["onward.role"] == "router"
    assert not any(value == "hi" for value in server.attributes.values()), "no prompt"


def test_a_client_s_trace_is_joined_and_passed_on() -> None:
    with OtlpReceiver() as receiver:
        a = StandInInstance("a")
        uvloop.run(traced(receiver, a, headers=TRACEPARENT))
        [server], [attempt] = receiver.named(SERVER), receiver.named(ATTEMPT)
    assert (server.trace_id, server.parent_span_id, server.trace_state) == (TRACE, SPAN, "vendor=a")
    assert server.links == [] and attempt.links == []
    assert a.attempts[0].trace == TraceContext(TRACE, True, attempt.span_id, SPAN, "vendor=a")
    assert a.headers_of_attempts[0]["traceparent"] == f"00-{TRACE}-{attempt.span_id}-01"
    assert a.headers_of_attempts[0]["tracestate"] == "vendor=a"


@pytest.mark.parametrize(
    ("headers", "config"),
    [({"traceparent": f"00-{TRACE}-{SPAN}-00"}, {}), ({}, {"trace_sample_ratio": 0.0})],
)
def test_a_request_that_is_not_sampled_has_no_spans_and_no_instance_makes_any(
    headers: dict[str, str], config: dict[str, Any]
) -> None:
    with OtlpReceiver() as receiver:
        a = StandInInstance("a")
        uvloop.run(traced(receiver, a, headers=headers, **config))
        assert receiver.spans == []
    [attempt] = a.attempts
    assert attempt.trace is not None and not attempt.trace.is_sampled


def test_a_router_that_does_not_trace_passes_a_client_s_context_on() -> None:
    async def scenario() -> None:
        a = StandInInstance("a")
        async with running_router(a) as router:
            await router.post(STREAM, headers=TRACEPARENT)
            await router.post(STREAM)
        assert [attempt.trace for attempt in a.attempts] == [TraceContext(TRACE, True, SPAN, SPAN, "vendor=a"), None]

    uvloop.run(scenario())


@pytest.mark.parametrize("headers", [{}, TRACEPARENT])
def test_a_stream_that_another_router_continues_stays_in_its_trace(headers: dict[str, str]) -> None:
    """The second router knows nothing but the record that an instance has kept."""
    with OtlpReceiver() as receiver:

        async def scenario() -> None:
            a = StandInInstance("a")
            a.behave = lambda attempt, _: (
                Behaviour(silent_after=4, gate=asyncio.Event()) if attempt.attempt_epoch == 1 else Behaviour()
            )
            async with running_router(a, otlp_endpoint=receiver.url) as router:
                first = await read_until(router, STREAM, 3, headers)
                made = [token(7, 0, position) for position in range(4)]
                kept = msgspec.structs.replace(a.attempts[0], choices=[ChoiceSnapshot(made)])
                await until_detached(router)
                a.records[kept.request_id] = StreamRecord(attempt=kept)
                async with running_router(a, otlp_endpoint=receiver.url) as other:
                    second = (await other.get(CHAT, {"Last-Event-ID": first.last_id})).stream
                    assert_seamless(joined(first, second), 7, 6)

        uvloop.run(scenario())
        servers, attempts = receiver.named(SERVER), receiver.named(ATTEMPT)
    assert len(servers) == len(attempts) == 2
    assert len({span.trace_id for span in receiver.spans}) == 1
    assert {span.parent_span_id for span in servers} == {SPAN if headers else ""}
    assert attempts[1].linked_spans == [attempts[0].span_id]
    assert [span.attributes["onward.attempt"] for span in attempts] == [1, 2]


@pytest.mark.parametrize("headers", [{}, TRACEPARENT])
def test_a_stream_that_no_process_remembers_stays_in_its_trace(headers: dict[str, str]) -> None:
    """Router and instances are gone. The client's cursor is all that is left; a repeated POST makes the stream again."""
    with OtlpReceiver() as receiver:

        async def scenario() -> None:
            async with running_router(StandInInstance("a"), otlp_endpoint=receiver.url) as router:
                first = await read_until(router, STREAM, 2, headers)
            a = StandInInstance("a2")
            async with running_router(a, otlp_endpoint=receiver.url) as router:
                again = await router.post(STREAM, headers={"Last-Event-ID": first.last_id})
                assert_seamless(joined(first, again.stream), 7, 6)

        uvloop.run(scenario())
        assert len(receiver.named(SERVER)) == 2
        [trace_id] = {span.trace_id for span in receiver.spans}
    assert (trace_id == TRACE) == bool(headers)


def test_a_client_that_comes_back_with_another_trace_has_it_linked() -> None:
    with OtlpReceiver() as receiver:

        async def scenario() -> None:
            a = StandInInstance("a")
            async with running_router(a, otlp_endpoint=receiver.url) as router:
                first = await read_until(router, STREAM, 2)
                await until_detached(router)
                await router.get(CHAT, {"Last-Event-ID": first.last_id} | TRACEPARENT)

        uvloop.run(scenario())
        first, second = receiver.named(SERVER)
    assert first.trace_id == second.trace_id != TRACE
    assert second.links == [(TRACE, SPAN)]


def test_a_refused_request_is_a_trace_too() -> None:
    with OtlpReceiver() as receiver:

        async def scenario() -> None:
            async with running_router(StandInInstance("a"), otlp_endpoint=receiver.url) as router:
                refused = await router.post({"model": 5}, headers=TRACEPARENT)
                assert refused.status == 400
                assert (await router.get("/v1/models")).status == 200

        uvloop.run(scenario())
        [span] = receiver.spans
    assert (span.trace_id, span.attributes["http.response.status_code"]) == (TRACE, 400)
    assert span.attributes["error.type"] == "invalid_request"
    assert not span.is_error, "a client's error is no failure of the server"


def test_a_request_that_fails_is_an_error_of_its_span() -> None:
    with OtlpReceiver() as receiver:

        async def scenario() -> None:
            a = StandInInstance("a")
            a.behave = lambda *_: CUT
            async with running_router(a, otlp_endpoint=receiver.url, preempt_retry_count=0) as router:
                await router.post(BODY)

        uvloop.run(scenario())
        [server] = receiver.named(SERVER)
    assert server.is_error and server.attributes["error.type"] == "upstream_lost"
