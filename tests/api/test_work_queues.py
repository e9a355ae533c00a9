"""Texts, grammars and clients' templates have queues of their own: none of them waits for another kind."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import msgspec
import pytest

from onward.api.chat import Chat
from onward.api.engine_client import EngineClient
from onward.api.fullness import Fullness
from onward.api.generation import Generator
from onward.api.identity import Identity
from onward.api.jobs import Backend, Jobs
from onward.api.ledger import Ledger
from onward.api.prompts import Prompts
from onward.api.shelf_link import ShelfLink
from onward.api.streams import Streams
from onward.api.unknown_fields import UnknownFields
from onward.api.work_queues import GRAMMARS, TEMPLATES, TEXTS, ByTemplate, work_queues
from onward.chance import SystemChance
from onward.clock import SystemClock
from onward.config import ApiConfig
from onward.obs.metrics import Registry
from onward.proto.model import PreparedModel
from onward.sim.api_node import Inline
from onward.text.prompt_tokens import read_text
from onward.web.keys import Caller

PATH = "/v1/chat/completions"


class Stuck(Executor):
    """Nothing in it ever ends."""

    def __init__(self) -> None:
        self.num_running = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.num_running += 1
        return Future()


def identity(name: str) -> Identity:
    return Identity("0" * 32, 0, 0.0, 0.0, caller=Caller(name))


def body_of(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "small-model", "messages": [{"role": "user", "content": "x"}], **fields})


def test_a_clients_template_occupies_no_thread_that_texts_need(model: PreparedModel) -> None:
    async def scenario() -> None:
        templates = Stuck()
        generator = generator_of(model, lambda _, name: templates if name == "templates" else Inline())

        def prepared(caller: str, body: bytes) -> Any:
            return generator.prepared(caller, body, lambda: generator.jobs.of_client(identity(caller), body))

        own = [asyncio.ensure_future(prepared("a", body_of(chat_template="{{ x }}"))) for _ in range(8)]
        for caller in ("a", "b"):
            assert (await prepared(caller, body_of())).prompts
        assert templates.num_running == TEMPLATES.running_per_caller
        assert not any(one.done() for one in own)
        for one in own:
            one.cancel()
        await asyncio.wait(own)

    asyncio.run(scenario())


def generator_of(model: PreparedModel, new_threads: Callable[[int, str], Executor]) -> Generator:
    def nobody(*_: object) -> Any:
        raise AssertionError("nothing is generated")

    registry, clock, prompts = Registry(), SystemClock(), Prompts(read_text(model))
    client = EngineClient(Ledger(registry), clock, connect=nobody, on_fault=nobody)
    backend = Backend(
        ApiConfig(trust_request_chat_template=True),
        model,
        prompts,
        client,
        clock,
        work_queues(new_threads, clock),
        UnknownFields(registry.counter("onward_unknown_fields_total", "")),
        SystemChance(),
        Fullness(clock, registry),
    )
    streams = Streams(client, clock, 60.0, ShelfLink(nobody, nobody, registry))
    return Generator(Jobs(Chat(prompts), PATH, backend), backend, streams)


@pytest.mark.parametrize("bounds", [TEXTS, GRAMMARS, TEMPLATES])
def test_no_caller_can_occupy_all_of_a_queue(bounds: Any) -> None:
    assert bounds.running_per_caller < bounds.running
    assert bounds.waiting_per_caller < bounds.waiting


def test_text_work_that_renders_no_template_runs_once() -> None:
    async def scenario() -> list[str]:
        queues = work_queues(lambda *_: Inline(), SystemClock())
        apart: ByTemplate[str] = ByTemplate(lambda: "apart")
        return [await queues.run_text("", lambda: "here"), await queues.run_text("", lambda: apart)]

    assert asyncio.run(scenario()) == ["here", "apart"]
