"""Traces of real processes at a real collector, while processes are killed: one trace for a request."""

import os
import signal
from collections.abc import Callable, Iterator

import httpx
import pytest

from onward.proto.cursor import parse_cursor
from tests.e2e.cluster import SMALL, Cluster
from tests.e2e.pd_instances import EVERYTHING_IS_HANDED_OVER, Pair
from tests.e2e.server import Server
from tests.e2e.streams import Stream, chat_body, run_streams
from tests.obs.otlp_receiver import OtlpReceiver, ReceivedSpan

SERVER, ATTEMPT = "chat smollm2-135m-instruct", "onward.attempt"
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
BODY = chat_body(1, 96)


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def cluster(receiver: OtlpReceiver) -> Iterator[Cluster]:
    flags = ("--otlp-endpoint", receiver.url)
    with Cluster(router=flags, every=(*SMALL, *flags), prefill=(), decode=(), mixed=((), ())) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _only_spans_of_this_test(cluster: Cluster, receiver: OtlpReceiver) -> Iterator[None]:
    cluster.heal()
    receiver.clear()
    yield
    cluster.heal()
    cluster.wait_until_at_rest()


def kill_at(*kills: tuple[int, Callable[[], object]]) -> Callable[[list[Stream]], None]:
    """Each as soon as the stream has so many tokens."""
    left = list(kills)

    def on_tokens(streams: list[Stream]) -> None:
        if left and len(streams[0].token_ids) >= left[0][0]:
            _, kill = left.pop(0)
            kill()

    return on_tokens


def of_router(spans: list[ReceivedSpan], name: str) -> list[ReceivedSpan]:
    own = [span for span in spans if span.name == name and span.resource["onward.role"] == "router"]
    return sorted(own, key=lambda span: span.start_ns)


def test_a_stream_that_is_killed_twice_is_one_trace_with_three_attempts(
    cluster: Cluster, receiver: OtlpReceiver
) -> None:
    """The api process that has the stream is killed, and takes its spans along; the router carries the stream on."""

    def kill_holder() -> None:
        cluster.with_stream().kill("api")

    [stream] = run_streams(cluster.url, [BODY], kill_at((8, kill_holder), (24, kill_holder)), headers=TRACEPARENT)
    assert len(stream.token_ids) == 96
    spans = receiver.wait_until(lambda spans: bool(of_router(spans, SERVER)))
    [server], attempts = of_router(spans, SERVER), of_router(spans, ATTEMPT)
    spans = receiver.wait_until(lambda spans: any(span.parent_span_id == attempts[-1].span_id for span in spans))
    assert {span.trace_id for span in spans} == {TRACE}
    assert server.parent_span_id == SPAN
    assert [span.attributes["onward.attempt"] for span in attempts] == [1, 2, 3]
    assert [span.linked_spans for span in attempts] == [[], [attempts[0].span_id], [attempts[1].span_id]]
    assert [span.is_error for span in attempts] == [True, True, False]
    assert server.event_names == ["onward.resume", "onward.resume"]
    assert server.attributes["gen_ai.usage.output_tokens"] == 96
    [instance] = [span for span in spans if span.parent_span_id == attempts[-1].span_id]
    assert (instance.name, instance.kind, instance.attributes["url.path"]) == (SERVER, "server", "/internal/attempt")
    phases = [span.name for span in spans if span.parent_span_id == instance.span_id]
    assert sorted(phases) == ["onward.decode", "onward.prefill", "onward.queue"]
    for span in spans:
        assert server.start_ns <= span.start_ns <= span.end_ns, "no span begins before its request"


def test_a_router_that_is_killed_leaves_the_trace_to_the_next_one(cluster: Cluster, receiver: OtlpReceiver) -> None:
    """The first router's spans are lost with it. An instance has the stream's record, and with it the trace."""
    last_id, num_read = "", 0
    with httpx.stream("POST", cluster.url + "/v1/chat/completions", json=BODY | {"stream": True}, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("id: "):
                last_id, num_read = line[4:], num_read + 1
            if num_read == 8:
                cluster.router.kill()
                break
    cluster.router.start_again()
    cluster.wait_until_ready()
    resumed = httpx.get(cluster.url + "/v1/chat/completions", headers={"Last-Event-ID": last_id}, timeout=60)
    assert resumed.status_code == 200 and "[DONE]" in resumed.text
    spans = receiver.wait_until(
        lambda spans: bool(of_router(spans, SERVER)) and sum(span.name == SERVER for span in spans) == 3
    )
    [server], [attempt] = of_router(spans, SERVER), of_router(spans, ATTEMPT)
    request_id = parse_cursor(last_id).request_id
    assert {span.trace_id for span in spans} == {request_id}
    assert attempt.attributes["onward.attempt"] == 2
    first, second = sorted(
        (span for span in spans if span.attributes.get("url.path") == "/internal/attempt"),
        key=lambda span: span.start_ns,
    )
    assert second.parent_span_id == attempt.span_id
    assert attempt.linked_spans == [first.parent_span_id], "the lost attempt is linked by its id"
    assert server.parent_span_id == ""


@pytest.mark.parametrize("headers", [{}, TRACEPARENT])
def test_crashes_inside_an_instance_are_phases_of_one_request(
    cluster: Cluster, receiver: OtlpReceiver, headers: dict[str, str]
) -> None:
    server: Server = cluster.instances[0].server

    def kill(role: str) -> Callable[[], None]:
        pid = server.pid(role)
        return lambda: os.kill(pid, signal.SIGKILL)

    kills = [(8, kill("worker")), (24, lambda: os.kill(server.pid("engine"), signal.SIGKILL))]
    [stream] = run_streams(server.url, [BODY], kill_at(*kills), headers=headers)
    assert len(stream.token_ids) == 96
    spans = receiver.wait_until(lambda spans: any(span.name == SERVER for span in spans))
    [request] = [span for span in spans if span.name == SERVER]
    assert request.parent_span_id == headers.get("traceparent", "--")[36:52]
    assert request.event_names == ["onward.worker_crash", "onward.engine_crash"]
    decodes = sorted((span for span in spans if span.name == "onward.decode"), key=lambda span: span.start_ns)
    assert [span.is_error for span in decodes] == [True, True, False]
    assert [span.attributes.get("error.type") for span in decodes] == ["worker_crash", "engine_crash", None]
    assert {span.parent_span_id for span in spans if span.name != SERVER} == {request.span_id}


def test_a_prefill_instance_has_its_share_of_the_trace_and_of_the_log(receiver: OtlpReceiver) -> None:
    """Its spans are below the handoff of the decode instance, and its lines have the client's label."""
    traced = ("--otlp-endpoint", receiver.url)
    with Pair(decode=(*EVERYTHING_IS_HANDED_OVER, *traced)) as pair:
        [stream] = run_streams(pair.decode.url, [BODY], headers=TRACEPARENT | {"X-Request-Id": "order-17"})
        assert len(stream.token_ids) == 96
        spans = receiver.wait_until(lambda spans: any(span.name == SERVER for span in spans))
        [handoff] = [span for span in spans if span.name == "onward.handoff"]
        peers = [span for span in spans if span.name.startswith("onward.peer.")]
        assert {span.name for span in peers} == {"onward.peer.queue", "onward.peer.prefill", "onward.peer.transfer"}
        assert {(span.trace_id, span.parent_span_id) for span in peers} == {(TRACE, handoff.span_id)}
        for span in peers:
            assert handoff.start_ns <= span.start_ns <= span.end_ns <= handoff.end_ns
        lines = [line for line in pair.prefill.log().splitlines() if " request finished " in line]
        assert lines and all("label=order-17" in line for line in lines)


def test_a_client_that_comes_back_to_an_instance_continues_its_trace(cluster: Cluster, receiver: OtlpReceiver) -> None:
    """Without a router: the stream store has the record, and the second request links to the first."""
    url, last_id = cluster.instances[0].url + "/v1/chat/completions", ""
    with httpx.stream("POST", url, json=BODY | {"stream": True}, headers=TRACEPARENT, timeout=60) as answer:
        last_id = next(line[4:] for line in answer.iter_lines() if line.startswith("id: "))
    assert parse_cursor(last_id).trace_id == TRACE
    resumed = httpx.get(url, headers={"Last-Event-ID": last_id}, timeout=60)
    assert "[DONE]" in resumed.text
    spans = receiver.wait_until(lambda spans: sum(span.name == SERVER for span in spans) == 2)
    first, second = sorted((span for span in spans if span.name == SERVER), key=lambda span: span.start_ns)
    assert (first.trace_id, second.trace_id) == (TRACE, TRACE)
    assert (first.parent_span_id, second.parent_span_id) == (SPAN, SPAN)
    assert second.linked_spans == [first.span_id]
