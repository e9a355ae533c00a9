"""Texts, grammars and clients' templates have queues of their own: none of them waits for another kind."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import msgspec
import pytest

from onward.api.endpoints.chat import ChatAdapter
from onward.api.engine_link.engine_client import EngineClient, LoadShedder
from onward.api.engine_link.request_tracker import RequestTracker
from onward.api.lifecycle.generation_runner import GenerationRunner
from onward.api.lifecycle.request_builder import ApiServices, RequestBuilder
from onward.api.lifecycle.request_metrics import RequestLatencyMetrics
from onward.api.lifecycle.stream_registry import StreamRegistry
from onward.api.lifecycle.stream_store_client import StreamStoreClient
from onward.api.requests.preprocessing_executors import (
    GRAMMAR_LIMITS,
    TEMPLATE_LIMITS,
    TEXT_LIMITS,
    DeferredRender,
    make_executors,
)
from onward.api.requests.request_context import RequestContext
from onward.api.requests.text_processor import TextProcessor
from onward.api.requests.unsupported_fields import UnknownFieldReporter
from onward.clock import SystemClock
from onward.config import ApiConfig
from onward.obs.metrics import Registry
from onward.proto.model import PreparedModel
from onward.random_source import SystemRandomSource
from onward.sim.nodes import InlineExecutor
from onward.text.prompt_tokenizer import read_tokenizer_files
from onward.web.auth.api_key_table import Caller

PATH = "/v1/chat/completions"


class Stuck(Executor):
    """Nothing in it ever ends."""

    def __init__(self) -> None:
        self.num_running = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.num_running += 1
        return Future()


def identity(name: str) -> RequestContext:
    return RequestContext("0" * 32, 0, 0.0, 0.0, caller=Caller(name))


def body_of(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "small-model", "messages": [{"role": "user", "content": "x"}], **fields})


def test_a_clients_template_occupies_no_thread_that_texts_need(model: PreparedModel) -> None:
    async def scenario() -> None:
        templates = Stuck()
        generator = generator_of(model, lambda _, name: templates if name == "templates" else InlineExecutor())

        def prepared(caller: str, body: bytes) -> Any:
            return generator.prepare(
                caller, body, lambda: generator.builder.prepare_client_request(identity(caller), body)
            )

        own = [asyncio.ensure_future(prepared("a", body_of(chat_template="{{ x }}"))) for _ in range(8)]
        for caller in ("a", "b"):
            assert (await prepared(caller, body_of())).prompt_token_ids
        assert templates.num_running == TEMPLATE_LIMITS.running_per_caller
        assert not any(one.done() for one in own)
        for one in own:
            one.cancel()
        await asyncio.wait(own)

    asyncio.run(scenario())


def generator_of(model: PreparedModel, new_threads: Callable[[int, str], Executor]) -> GenerationRunner:
    def nobody(*_: object) -> Any:
        raise AssertionError("nothing is generated")

    registry, clock, prompts = Registry(), SystemClock(), TextProcessor(read_tokenizer_files(model))
    client = EngineClient(RequestTracker(registry), clock, connect=nobody, on_fault=nobody)
    backend = ApiServices(
        ApiConfig(trust_request_chat_template=True),
        model,
        prompts,
        client,
        clock,
        make_executors(new_threads, clock),
        UnknownFieldReporter(registry.counter("onward_unknown_fields_total", "")),
        SystemRandomSource(),
        LoadShedder(clock, registry),
        RequestLatencyMetrics(registry),
    )
    streams = StreamRegistry(client, clock, 60.0, StreamStoreClient(nobody, nobody, registry))
    return GenerationRunner(RequestBuilder(ChatAdapter(prompts), PATH, backend), backend, streams)


@pytest.mark.parametrize("bounds", [TEXT_LIMITS, GRAMMAR_LIMITS, TEMPLATE_LIMITS])
def test_no_caller_can_occupy_all_of_a_queue(bounds: Any) -> None:
    assert bounds.running_per_caller < bounds.running
    assert bounds.waiting_per_caller < bounds.waiting


def test_text_work_that_renders_no_template_runs_once() -> None:
    async def scenario() -> list[str]:
        queues = make_executors(lambda *_: InlineExecutor(), SystemClock())
        apart: DeferredRender[str] = DeferredRender(lambda: "apart")
        return [await queues.run_preprocessing("", lambda: "here"), await queues.run_preprocessing("", lambda: apart)]

    assert asyncio.run(scenario()) == ["here", "apart"]
