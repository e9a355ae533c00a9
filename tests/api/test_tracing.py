"""Traces of an api process, at a real collector: its spans, and how a client that comes back stays in its trace."""

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from onward.config import ApiConfig
from onward.proto.cursor import parse_cursor
from onward.proto.model import PreparedModel
from tests.api.instance import Instance, running
from tests.obs.otlp_receiver import OtlpReceiver, ReceivedSpan

PATH, SERVER = "/v1/generate", "text_completion small-model"
FIELDS = {"model": "small-model", "prompt_token_ids": [5, 6, 7], "seed": 7, "max_tokens": 4, "temperature": 0.5}
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01"}


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def traced_instance(model: PreparedModel, receiver: OtlpReceiver) -> Iterator[Instance]:
    exact = msgspec.structs.replace(model, quantization="int8")  # its streams can be made again
    with running(exact, ApiConfig(otlp_endpoint=receiver.url)) as instance:
        yield instance


@pytest.fixture
def instance(traced_instance: Instance, receiver: OtlpReceiver) -> Instance:
    receiver.clear()
    return traced_instance


def post(instance: Instance, headers: dict[str, str] | None = None, path: str = PATH, **fields: Any) -> httpx.Response:
    return httpx.post(instance.url + path, json=FIELDS | fields, headers=headers, timeout=30)


def servers(receiver: OtlpReceiver, count: int, name: str = SERVER) -> list[ReceivedSpan]:
    """In the order in which they began."""
    receiver.wait_until(lambda spans: sum(span.name == name for span in spans) == count)
    return receiver.named(name)


def last_id(response: httpx.Response) -> str:
    return next(line[4:] for line in response.text.splitlines() if line.startswith("id: "))


def test_a_request_is_a_span_with_what_was_asked_for_and_answered(instance: Instance, receiver: OtlpReceiver) -> None:
    response = post(instance, {"X-Request-Id": "order-17"})
    assert response.status_code == 200
    [span] = servers(receiver, 1)
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "small-model",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ["length"],
        "http.response.status_code": 200,
        "onward.label": "order-17",
    }
    assert {name: span.attributes.get(name) for name in expected} == expected
    assert (span.kind, span.parent_span_id, span.trace_id) == ("server", "", span.attributes["gen_ai.response.id"])
    assert span.resource["onward.role"] == "mixed"


def test_a_client_s_trace_is_joined(instance: Instance, receiver: OtlpReceiver) -> None:
    post(instance, TRACEPARENT)
    [span] = servers(receiver, 1)
    assert (span.trace_id, span.parent_span_id) == (TRACE, SPAN)


def test_a_client_s_decision_not_to_trace_holds(instance: Instance, receiver: OtlpReceiver) -> None:
    post(instance, {"traceparent": f"00-{TRACE}-{SPAN}-00"})
    post(instance, {"X-Request-Id": "the next one"})
    [span] = servers(receiver, 1)
    assert span.attributes["onward.label"] == "the next one"


def test_a_refused_request_and_one_that_fails_have_spans_that_say_so(
    instance: Instance, receiver: OtlpReceiver
) -> None:
    assert post(instance, TRACEPARENT, temperature=-1).status_code == 400
    [span] = servers(receiver, 1)
    assert (span.attributes["http.response.status_code"], span.attributes["error.type"]) == (400, "invalid_request")
    assert not span.is_error


def test_texts_to_embed_are_traced(instance: Instance, receiver: OtlpReceiver) -> None:
    body = {"model": "small-model", "input": "a text"}
    assert httpx.post(instance.url + "/v1/embeddings", json=body, headers=TRACEPARENT).status_code == 200
    [span] = servers(receiver, 1, "embeddings small-model")
    assert (span.trace_id, span.attributes["gen_ai.operation.name"]) == (TRACE, "embeddings")


@pytest.mark.parametrize("headers", [{}, TRACEPARENT])
def test_a_client_that_comes_back_stays_in_its_trace_and_links_to_its_first_attempt(
    instance: Instance, receiver: OtlpReceiver, headers: dict[str, str]
) -> None:
    first = post(instance, headers, stream=True)
    back = httpx.get(instance.url + PATH, headers={"Last-Event-ID": last_id(first)}, timeout=30)
    assert back.status_code == 200 and "[DONE]" in back.text
    one, other = servers(receiver, 2)
    assert one.trace_id == other.trace_id
    assert one.parent_span_id == other.parent_span_id == (SPAN if headers else "")
    assert other.linked_spans == [one.span_id]


def test_a_stream_that_is_made_again_stays_in_the_trace_that_its_client_began(
    instance: Instance, receiver: OtlpReceiver
) -> None:
    """The stream store has died, and what it kept with it: the cursor alone says to which trace the stream belongs."""
    first = post(instance, TRACEPARENT, stream=True)
    assert parse_cursor(last_id(first)).trace_id == TRACE
    instance.restart_shelf()
    back = post(instance, {"Last-Event-ID": last_id(first)}, stream=True)
    assert back.status_code == 200 and "[DONE]" in back.text
    one, other = servers(receiver, 2)
    assert one.trace_id == other.trace_id == TRACE


def test_an_engine_that_dies_is_an_event_of_its_requests(instance: Instance, receiver: OtlpReceiver) -> None:
    with httpx.stream("POST", instance.url + PATH, json=FIELDS | {"stream": True, "max_tokens": 60}) as response:
        lines = response.iter_lines()
        next(line for line in lines if line.startswith("id: "))
        instance.restart_engine()
        assert "data: [DONE]" in list(lines)
    [span] = servers(receiver, 1)
    assert span.event_names == ["onward.engine_crash"]
