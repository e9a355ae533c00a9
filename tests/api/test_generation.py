"""The endpoint as an ASGI application, without HTTP: what the real client cannot easily bring about."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from onward.api.endpoints.completions import CompletionsAdapter
from onward.api.engine_link.engine_client import EngineClient, LoadShedder
from onward.api.engine_link.request_tracker import RequestTracker
from onward.api.lifecycle.generation_runner import MAX_OPEN_HTTP_REQUESTS, GenerationEndpoint, GenerationRunner
from onward.api.lifecycle.request_builder import ApiServices, RequestBuilder
from onward.api.lifecycle.request_metrics import RequestLatencyMetrics
from onward.api.lifecycle.stream_registry import StreamRegistry
from onward.api.lifecycle.stream_store_client import StreamStoreClient
from onward.api.requests.preprocessing_executors import make_executors
from onward.api.requests.request_context import RequestContext
from onward.api.requests.text_processor import TextProcessor
from onward.api.requests.unsupported_fields import UnknownFieldReporter
from onward.clock import SystemClock
from onward.config import ApiConfig
from onward.obs.metrics import Registry
from onward.proto.model import PreparedModel
from onward.random_source import SystemRandomSource
from onward.text.prompt_tokenizer import read_tokenizer_files


def test_open_requests_have_a_bound_and_those_that_leave_make_room(model: PreparedModel) -> None:
    async def scenario() -> None:
        registry, clock = Registry(), SystemClock()
        client = EngineClient(RequestTracker(registry), clock, connect=_no_engine, on_fault=_no_fault)
        prompts = TextProcessor(read_tokenizer_files(model))
        unknown = UnknownFieldReporter(registry.counter("onward_unknown_fields_total", ""))
        with ThreadPoolExecutor(1) as threads:
            queues, fullness = make_executors(lambda *_: threads, clock), LoadShedder(clock, registry)
            backend = ApiServices(
                ApiConfig(),
                model,
                prompts,
                client,
                clock,
                queues,
                unknown,
                SystemRandomSource(),
                fullness,
                RequestLatencyMetrics(registry),
            )
            streams = StreamRegistry(client, clock, 60.0, StreamStoreClient(_no_engine, _no_fault, registry))
            generator = GenerationRunner(
                RequestBuilder(CompletionsAdapter(prompts), "/v1/completions", backend), backend, streams
            )
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
        await client.close()

    asyncio.run(scenario())


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
