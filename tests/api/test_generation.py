"""The endpoint as an ASGI application, without HTTP: what the real client cannot easily bring about."""

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any

import msgspec

from onward.api.endpoints.completions import CompletionsAdapter
from onward.api.engine_link.engine_client import EngineClient, LoadShedder
from onward.api.engine_link.request_tracker import RequestTracker
from onward.api.lifecycle.choice_update import OutputTextStream
from onward.api.lifecycle.generation_runner import MAX_OPEN_HTTP_REQUESTS, GenerationEndpoint, GenerationRunner
from onward.api.lifecycle.request_builder import ApiServices, RequestBuilder
from onward.api.lifecycle.request_metrics import RequestLatencyMetrics
from onward.api.lifecycle.stream_registry import StreamRegistry
from onward.api.lifecycle.stream_store_client import StreamStoreClient
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.preprocessing_executors import make_executors
from onward.api.requests.request_context import RequestContext
from onward.api.requests.text_processor import TextProcessor
from onward.api.requests.unsupported_fields import UnknownFieldReporter
from onward.clock import SystemClock
from onward.config import ApiConfig
from onward.obs.metrics import Registry
from onward.proto.model import PreparedModel
from onward.proto.sampling_params import SamplingParams
from onward.random_source import SystemRandomSource
from onward.text.prompt_tokenizer import read_tokenizer_files
from onward.text.stop_patterns import StopPatterns


def test_open_requests_have_a_bound_and_those_that_leave_make_room(model: PreparedModel) -> None:
    async def scenario() -> None:
        with _services(model) as (backend, registry):
            streams = StreamRegistry(
                backend.engine_client, backend.clock, 60.0, StreamStoreClient(_no_engine, _no_fault, registry)
            )
            generator = GenerationRunner(_builder(backend), backend, streams)
            endpoint = GenerationEndpoint(generator, backend, streams)
            slow = [asyncio.ensure_future(_status(endpoint, asyncio.Event())) for _ in range(MAX_OPEN_HTTP_REQUESTS)]
            await asyncio.sleep(0)
            assert await _status(endpoint, asyncio.Event()) == (429, "overloaded")
            slow[0].cancel()
            await asyncio.wait(slow[:1])
            arrived = asyncio.Event()
            arrived.set()
            assert await _status(endpoint, arrived) == (400, "invalid_json")
            for one in slow:
                one.cancel()
            await asyncio.wait(slow)
            await backend.engine_client.close()

    asyncio.run(scenario())


def test_stop_patterns_are_compiled_with_the_request_and_not_with_each_choice(model: PreparedModel) -> None:
    compiled = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal compiled
        compiled += event == "call" and frame.f_code is StopPatterns.__init__.__code__

    async def scenario() -> list[OutputTextStream]:
        with _services(model) as (backend, _):
            builder, body = _builder(backend), b'{"prompt":"x","stop_regex":"[a-c]{2}"}'
            prepared = builder.prepare_client_request(RequestContext("0" * 32, 0, 0.0), body)
            assert isinstance(prepared, PreparedRequest)
            sys.setprofile(count)
            try:
                return [builder.adapter.new_text_stream(prepared, SamplingParams(seed=1)) for _ in range(2)]
            finally:
                sys.setprofile(None)
                await backend.engine_client.close()

    first, second = asyncio.run(scenario())
    assert compiled == 0
    for token_id in b"xab":
        first.push(token_id)
    assert first.stop_string == "[a-c]{2}", "and each choice has a matcher of its own"
    assert second.stop_string is None


@contextmanager
def _services(model: PreparedModel) -> Iterator[tuple[ApiServices, Registry]]:
    registry, clock = Registry(), SystemClock()
    client = EngineClient(RequestTracker(registry), clock, connect=_no_engine, on_fault=_no_fault)
    unknown = UnknownFieldReporter(registry.counter("onward_unknown_fields_total", ""))
    with ThreadPoolExecutor(1) as threads:
        yield (
            ApiServices(
                ApiConfig(),
                model,
                TextProcessor(read_tokenizer_files(model)),
                client,
                clock,
                make_executors(lambda *_: threads, clock),
                unknown,
                SystemRandomSource(),
                LoadShedder(clock, registry),
                RequestLatencyMetrics(registry),
            ),
            registry,
        )


def _builder(backend: ApiServices) -> RequestBuilder:
    return RequestBuilder(CompletionsAdapter(backend.text_processor), "/v1/completions", backend)


async def _status(endpoint: GenerationEndpoint, arrived: asyncio.Event) -> tuple[int, str]:
    """Sends a body that is no JSON, once `arrived` is set."""
    sent: list[Any] = []
    bodies = iter([{"type": "http.request", "body": b"{"}])

    async def receive() -> Any:
        await arrived.wait()
        return next(bodies, None) or await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    await endpoint(
        {"type": "http", "method": "POST", "headers": [], "onward.identity": RequestContext("0" * 32, 0, 0.0, 0.0)},
        receive,
        send,
    )
    return sent[0]["status"], msgspec.json.decode(sent[1]["body"])["error"]["code"]


def _no_engine(address: str) -> Any:
    raise AssertionError(f"no engine was announced, least of all at {address}")


def _no_fault() -> None:
    raise AssertionError("the engine client has failed")
