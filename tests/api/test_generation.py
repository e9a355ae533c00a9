"""The endpoint as an ASGI application, without HTTP: what the real client cannot easily bring about."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from onward.api.completions import Completions
from onward.api.engine_client import EngineClient
from onward.api.fullness import Fullness
from onward.api.generation import MAX_OPEN_EXCHANGES, GenerationEndpoint, Generator
from onward.api.identity import Identity
from onward.api.jobs import Backend, Jobs
from onward.api.ledger import Ledger
from onward.api.prompts import Prompts
from onward.api.shelf_link import ShelfLink
from onward.api.streams import Streams
from onward.api.unknown_fields import UnknownFields
from onward.api.work_queues import work_queues
from onward.chance import SystemChance
from onward.clock import SystemClock
from onward.config import ApiConfig
from onward.obs.metrics import Registry
from onward.proto.model import PreparedModel
from onward.text.prompt_tokens import read_text


def test_open_requests_have_a_bound_and_those_that_leave_make_room(model: PreparedModel) -> None:
    async def scenario() -> None:
        registry, clock = Registry(), SystemClock()
        client = EngineClient(Ledger(registry), clock, connect=_no_engine, on_fault=_no_fault)
        prompts = Prompts(read_text(model))
        unknown = UnknownFields(registry.counter("onward_unknown_fields_total", ""))
        with ThreadPoolExecutor(1) as threads:
            queues, fullness = work_queues(lambda *_: threads, clock), Fullness(clock, registry)
            backend = Backend(ApiConfig(), model, prompts, client, clock, queues, unknown, SystemChance(), fullness)
            streams = Streams(client, clock, 60.0, ShelfLink(_no_engine, _no_fault, registry))
            generator = Generator(Jobs(Completions(prompts), "/v1/completions", backend), backend, streams)
            endpoint = GenerationEndpoint(generator, backend, streams)
            slow = [asyncio.ensure_future(_status(endpoint, asyncio.Event())) for _ in range(MAX_OPEN_EXCHANGES)]
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
        {"type": "http", "method": "POST", "headers": [], "onward.identity": Identity("0" * 32, 0, 0.0, 0.0)},
        receive,
        send,
    )
    return sent[0]["status"], msgspec.json.decode(sent[1]["body"])["error"]["code"]


def _no_engine(address: str) -> Any:
    raise AssertionError(f"no engine was announced, least of all at {address}")


def _no_fault() -> None:
    raise AssertionError("the engine client has failed")
