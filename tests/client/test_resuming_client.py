"""The client before a real api process, through a proxy that breaks its connections: its user reads the whole stream."""

import asyncio
import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from onward.client import (
    AsyncResumingClient,
    ResumeOptions,
    ResumingClient,
    ResumingTransport,
    StreamFailed,
    resume_streams,
)
from onward.proto.engine import ErrorInfo
from onward.proto.model import PreparedModel
from onward.proto.sampling_params import SamplingParams
from tests.api.instance import Instance
from tests.api.stand_in_engine import hashed_token
from tests.api.test_roles import keyed
from tests.client.cutting_proxy import CuttingProxy
from tests.web import route_access

OUTPUTS = [list("né 日本😀.".encode()), list("ok 😀!!\n".encode())]
"""Characters of several bytes, each byte a token."""
CHAT = "/v1/chat/completions"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 14, "n": 2}),
    "completions": ("/v1/completions", {"prompt": "hi", "max_tokens": 14, "logprobs": 1}),
    "generate": ("/v1/generate", {"prompt_token_ids": [97, 98], "max_tokens": 14}),
    "responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 14}),
}
COMMON = {"model": "small-model", "seed": 7}
USAGE = {"stream_options": {"include_usage": True}}
NEW_IN_EACH = ("id", "prompt_tokens_details", "created", "created_at", "completed_at", "item_id", "cached_tokens")
QUICK = ResumeOptions(first_delay_s=0.01, max_delay_s=0.05, max_failures=200, deadline_s=240)
"""For a connection that is cut the server may take a moment to free its label."""


def recite(prompt: Any, sampling: SamplingParams, tokens: Any) -> int:
    output = OUTPUTS[sampling.choice_index]
    return output[len(tokens)] if len(tokens) < len(output) else 33


@pytest.fixture(params=["kept", "made again"])
def server(request: pytest.FixtureRequest, instance: Instance, forgetful: Instance) -> Iterator[Instance]:
    one = instance if request.param == "kept" else forgetful
    one.engine.choose, one.engine.steps_at_once = recite, 4
    yield one
    one.engine.choose, one.engine.steps_at_once, one.engine.refusal = hashed_token, 1, None
    one.wait_until(lambda: not one.engine.running)


def body_of(kind: str) -> tuple[str, dict[str, Any]]:
    path, fields = KINDS[kind]
    return path, COMMON | fields | ({} if kind == "responses" else USAGE)


def comparable(events: list[dict[str, Any]]) -> list[Any]:
    """What a stream says, however many tokens share an event. All events must agree on the stream's id."""
    ids = {event["id"] for event in events if "id" in event} | {e["response"]["id"] for e in events if "response" in e}
    assert len(ids) == 1, f"two streams are mixed: {ids}"
    if "choices" not in events[0]:
        return [_nameless(event) for event in events]
    pieces: dict[tuple[int, str], list[Any]] = {}
    for event in events:
        for choice in event["choices"]:
            for name, value in (choice | choice.get("delta", {})).items():
                pieces.setdefault((choice["index"], name), []).append(value)
    logprobs = [one for _, some in pieces.items() for one in some if isinstance(one, dict) and "tokens" in one]
    told = {key: [one for one in some if one is not None and one != ""] for key, some in pieces.items()}
    return [
        {key: "".join(some) for key, some in told.items() if key[1] in ("content", "text")},
        {key: [one for ids in some for one in ids] for key, some in told.items() if key[1] == "token_ids"},
        {key: some for key, some in told.items() if key[1] in ("role", "finish_reason")},
        [token for one in logprobs for token in one["token_logprobs"]],
        [_nameless(event["usage"]) for event in events if event.get("usage")],
    ]


def _nameless(value: Any) -> Any:
    if isinstance(value, list):
        return [_nameless(item) for item in value]
    if isinstance(value, dict):
        return {name: _nameless(item) for name, item in value.items() if name not in NEW_IN_EACH}
    return value


def read(url: str, kind: str, options: ResumeOptions = QUICK, **more: Any) -> list[dict[str, Any]]:
    path, body = body_of(kind)
    with ResumingClient(url, options=options, **more) as client:
        return list(client.stream(path, body))


def num_bytes_of(url: str, kind: str) -> int:
    with CuttingProxy(url) as proxy:
        read(proxy.url, kind)
        return proxy.num_bytes[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_is_whole_wherever_its_connections_break(server: Instance, kind: str) -> None:
    expected = comparable(read(server.url, kind))
    size = num_bytes_of(server.url, kind)
    # Each connection breaks a little later than the one before, so that together they break at many places; the head of an
    # answer, and what is sent again, are some hundred bytes of each.
    for first, resets in zip(range(1, size, max(1, size // 12)), itertools.cycle([False, True])):
        with CuttingProxy(server.url, [first, 500, first + 37, 700, 900], resets=resets) as proxy:
            assert comparable(read(proxy.url, kind)) == expected, first


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_is_whole_wherever_its_first_connection_breaks_at_each_byte(server: Instance, kind: str) -> None:
    server.engine.steps_at_once = 16
    expected = comparable(read(server.url, kind))
    for cut in range(1, num_bytes_of(server.url, kind)):
        with CuttingProxy(server.url, [cut]) as proxy:
            assert comparable(read(proxy.url, kind)) == expected, cut


def test_the_asynchronous_client_reads_the_same(server: Instance) -> None:
    expected = comparable(read(server.url, "chat"))
    path, body = body_of("chat")
    size = num_bytes_of(server.url, "chat")

    async def one(first: int) -> list[Any]:
        with CuttingProxy(server.url, [first, first, 600, 700]) as proxy:
            async with AsyncResumingClient(proxy.url, options=QUICK) as client:
                return comparable([event async for event in client.stream(path, body)])

    async def run() -> list[list[Any]]:
        return await asyncio.gather(*(one(first) for first in range(1, size, max(1, size // 8))))

    assert all(events == expected for events in asyncio.run(run()))


def test_an_openai_client_reads_a_whole_stream_and_raises_its_own_errors(server: Instance) -> None:
    messages: Any = KINDS["chat"][1]["messages"]
    arguments: Any = {"model": "small-model", "messages": messages, "max_tokens": 14, "seed": 7}
    reports: list[tuple[float, int]] = []
    with CuttingProxy(server.url, [900, 700]) as proxy, openai.OpenAI(base_url=proxy.url + "/v1", api_key="x") as plain:
        client = resume_streams(plain, options=QUICK, on_resume=lambda *report: reports.append(report))
        chunks = list(client.chat.completions.create(stream=True, **arguments))
        assert "".join(c.choices[0].delta.content or "" for c in chunks).startswith("né 日本😀")
        assert len({chunk.id for chunk in chunks}) == 1
        # How many tokens share an event decides whether the second connection reaches its cut.
        assert [number for _, number in reports] in ([2], [2, 3]) and all(pause_s > 0 for pause_s, _ in reports)
        assert client.chat.completions.create(**arguments).choices[0].message.content is not None
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.chat.completions.create(stream=True, **arguments | {"max_tokens": -1})
        client.close()


def test_an_asynchronous_openai_client_reads_a_whole_response(server: Instance) -> None:
    async def run(url: str) -> list[Any]:
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="x") as plain:
            client = resume_streams(plain, options=QUICK)
            stream = await client.responses.create(
                model="small-model", input="hi", max_output_tokens=14, stream=True, extra_body={"seed": 7}
            )
            events = [event async for event in stream]
            await client.close()
            return events

    size = num_bytes_of(server.url, "responses")
    with CuttingProxy(server.url, [size // 2, 2000]) as proxy:
        events = asyncio.run(run(proxy.url))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.incomplete"


@pytest.mark.parametrize("make_client", [httpx.Client, openai.DefaultHttpxClient])
def test_an_openai_client_keeps_the_settings_of_its_http_client(server: Instance, make_client: Any) -> None:
    """Its proxy above all: nothing listens at the address that it would connect to otherwise."""
    hosts: list[str] = []
    hooks = {"request": [lambda request: hosts.append(request.headers["x-team"])]}
    with CuttingProxy(server.url, [900, 700]) as proxy:
        plain = openai.OpenAI(
            base_url="http://127.0.0.1:1/v1",
            api_key="x",
            http_client=make_client(proxy=proxy.url, headers={"x-team": "a"}, event_hooks=hooks, timeout=77),
        )
        client = resume_streams(plain, options=QUICK)
        del plain  # collected: its connections stay open for the copy
        timeout: Any = client.timeout
        assert timeout.read == 77
        chunks = client.chat.completions.create(
            model="small-model", messages=[{"role": "user", "content": "hi"}], max_tokens=14, stream=True
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks).startswith("né 日本😀")
        assert len(proxy.num_bytes) == 3 and hosts == ["a"], "one request of the client, three connections"
        client.close()


def test_an_asynchronous_openai_client_keeps_the_settings_of_its_http_client(server: Instance) -> None:
    async def run(proxy: str) -> list[Any]:
        http_client = openai.DefaultAsyncHttpxClient(proxy=proxy)
        async with openai.AsyncOpenAI(base_url="http://127.0.0.1:1/v1", api_key="x", http_client=http_client) as plain:
            client = resume_streams(plain, options=QUICK)
            stream = await client.completions.create(model="small-model", prompt="hi", max_tokens=14, stream=True)
            return [chunk async for chunk in stream]

    with CuttingProxy(server.url, [900, 700]) as proxy:
        chunks = asyncio.run(run(proxy.url))
    assert "".join(chunk.choices[0].text for chunk in chunks).startswith("né 日本😀")


def test_a_request_whose_body_comes_in_pieces_is_sent_with_its_length(server: Instance) -> None:
    """Transfer-Encoding next to Content-Length would be refused, or read as two requests."""
    body = json.dumps(COMMON | KINDS["completions"][1] | {"stream": True}).encode()
    headers = {"content-type": "application/json"}
    with (
        CuttingProxy(server.url, [900]) as proxy,
        httpx.Client(base_url=proxy.url, transport=ResumingTransport(options=QUICK)) as client,
    ):
        response = client.post("/v1/completions", content=iter([body[:9], body[9:]]), headers=headers)
    assert response.status_code == 200 and response.text.endswith("data: [DONE]\n\n")


def test_a_stream_without_a_read_timeout_is_read(server: Instance) -> None:
    options = dataclasses.replace(
        QUICK, read_timeout_s=math.inf, connect_timeout_s=math.inf, deadline_s=math.inf, max_delay_s=math.inf
    )
    expected = comparable(read(server.url, "chat"))
    with CuttingProxy(server.url, [900]) as proxy:
        assert comparable(read(proxy.url, "chat", options)) == expected


# What it does not resume, and when it fails.


def test_a_wrong_request_fails_at_once_with_the_servers_words(server: Instance) -> None:
    options = ResumeOptions(first_delay_s=0.01, max_failures=2)
    with CuttingProxy(server.url) as proxy, ResumingClient(proxy.url, options=options) as client:
        with pytest.raises(StreamFailed, match="max_tokens") as failed:
            list(client.stream(CHAT, COMMON | {"messages": [], "max_tokens": -1}))
        assert (failed.value.status, failed.value.partial.events) == (400, [])
        assert len(proxy.num_bytes) == 1, "one request"


def test_a_server_that_is_gone_for_good_leaves_what_was_received(server: Instance) -> None:
    path, body = body_of("completions")
    options = ResumeOptions(first_delay_s=0.01, max_delay_s=0.01, max_failures=3)
    received: list[dict[str, Any]] = []
    with CuttingProxy(server.url, [1500, 0, 0, 0, 0, 0]) as proxy, ResumingClient(proxy.url, options=options) as client:
        with pytest.raises(StreamFailed, match="4 connections in a row have failed") as failed:
            for event in client.stream(path, body):
                received.append(event)
        assert received and failed.value.partial.events == received
        assert failed.value.partial.text == "".join(event["choices"][0]["text"] for event in received)
        # Another client goes on from there.
        rest = list(client.stream(path, body, last_event_id=failed.value.partial.last_event_id))
    assert comparable([*received, *rest]) == comparable(read(server.url, "completions"))


def test_a_server_that_nothing_listens_for_fails_after_as_many_connections() -> None:
    options = ResumeOptions(first_delay_s=0.01, max_delay_s=0.01, max_failures=2)
    with CuttingProxy("http://127.0.0.1:1") as proxy:
        url = proxy.url
    with ResumingClient(url, options=options) as client, pytest.raises(StreamFailed, match="no connection") as failed:
        list(client.stream(CHAT, COMMON))
    assert failed.value.status is None and isinstance(failed.value.__cause__, httpx.TransportError)


def test_a_refusal_with_retry_after_is_honoured_and_bounded_by_the_deadline(server: Instance) -> None:
    server.engine.refusal = ErrorInfo("rate_limited", "too many", 429, True, retry_after_s=7.0)
    options = ResumeOptions(deadline_s=5)
    with ResumingClient(server.url, options=options) as client, pytest.raises(StreamFailed, match="too many") as failed:
        list(client.stream(*body_of("chat")))
    assert (failed.value.status, failed.value.code) == (429, "rate_limited")


def test_a_key_is_sent_on_each_connection_and_a_wrong_one_fails_at_once(model: PreparedModel) -> None:
    path, body = body_of("completions")
    key, other = route_access.KEYS["user"], route_access.KEYS["other"]
    with keyed(model) as instance:
        with CuttingProxy(instance.url, [1500, 700]) as proxy:
            assert comparable(read(proxy.url, "completions", api_key=key)) == comparable(
                read(instance.url, "completions", api_key=key)
            )
            assert len(proxy.num_bytes) == 3
        with CuttingProxy(instance.url) as proxy, pytest.raises(StreamFailed) as failed:
            read(proxy.url, "completions", api_key="wrong")
        assert (failed.value.status, len(proxy.num_bytes)) == (401, 1)
        with CuttingProxy(instance.url, [1500]) as proxy, pytest.raises(StreamFailed) as failed:
            read(proxy.url, "completions", ResumeOptions(max_failures=0), api_key=key)
        place = failed.value.partial.last_event_id
        with ResumingClient(instance.url, api_key=other) as client, pytest.raises(StreamFailed) as failed:
            list(client.stream(path, body, last_event_id=place))
        assert (failed.value.status, failed.value.code) == (404, "stream_unknown")


def test_what_is_no_stream_passes_as_it_is(server: Instance) -> None:
    with httpx.Client(base_url=server.url, transport=ResumingTransport(options=QUICK)) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "small-model"
        whole = client.post(CHAT, json=body_of("chat")[1] | {"stream_options": None}).json()
        assert whole["choices"][0]["message"]["content"].startswith("né 日本😀")
        background = {**body_of("responses")[1], "stream": True, "background": True}
        text = client.post("/v1/responses", json=background).text
        assert text.count("event: response.incomplete") == 1


def test_closing_the_iterator_ends_the_work_at_the_server(server: Instance) -> None:
    server.engine.steps_at_once = 1
    with ResumingClient(server.url, options=QUICK) as client:
        stream = client.stream("/v1/completions", COMMON | {"prompt": "x", "max_tokens": 200})
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        server.wait_until(lambda: not server.engine.running)
