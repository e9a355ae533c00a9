"""A resume of a response beside a cancel or a delete of it, in one api process or two, with a real stream store between
them. Each test starts the second operation after every number of turns of the event loop that the first may take."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from onward.api.engine_link.engine_client import EngineClient, LoadShedder
from onward.api.engine_link.request_tracker import RequestTracker
from onward.api.lifecycle import stream_store_client
from onward.api.lifecycle.request_builder import ApiServices, RequestBuilder
from onward.api.lifecycle.request_metrics import RequestLatencyMetrics
from onward.api.lifecycle.stream_registry import LiveStream, StreamRegistry
from onward.api.lifecycle.stream_store_client import StreamStoreClient
from onward.api.requests.prepared_request import PreparedRequest
from onward.api.requests.preprocessing_executors import make_executors
from onward.api.requests.text_processor import TextProcessor
from onward.api.requests.unsupported_fields import UnknownFieldReporter
from onward.api.responses.responses_adapter import ResponsesAdapter
from onward.clock import SystemClock
from onward.config import ApiConfig
from onward.errors import Conflict
from onward.obs.metrics import Registry
from onward.proto.control import StreamStoreUp
from onward.proto.model import PreparedModel
from onward.proto.router import Attempt, ChoiceSnapshot, StreamRecord
from onward.proto.step import WorkerHello
from onward.proto.stream_store import ClaimAttempt, FromStreamStore, StoreEntry, StoreHeartbeat, ToStreamStore
from onward.random_source import SystemRandomSource
from onward.stream_store.core import StreamStoreCore
from onward.text.prompt_tokenizer import read_tokenizer_files
from onward.web.openai_api.response_ids import PATH
from tests.api.routed import REQUEST_ID, attempt_of

WORKER = WorkerHello(1, "w", "e", 1, "fp", 64, 16, 1024, 320)
BODY = {"model": "small-model", "input": "x", "max_output_tokens": 8, "background": True}
MAX_TURNS = 12
"""Turns of the event loop between the first and the second of a pair. A claim is granted in fewer."""
SETTLED_TURNS = 30
TOLD = [5, 6, 7]
"""Tokens that the resumed attempt has, and that the record of its dead process has not."""


class Store:
    """A real one. Each message takes a turn of the event loop."""

    def __init__(self) -> None:
        self.core = StreamStoreCore()
        self.loses: Callable[[ToStreamStore], bool] = lambda _: False
        self._outboxes: dict[str, asyncio.Queue[FromStreamStore]] = {}

    def connect(self, api_id: str) -> "Wire":
        outbox = self._outboxes[api_id] = asyncio.Queue()
        self.core.receive(api_id, StoreHeartbeat(0), 0.0)
        return Wire(self, api_id, outbox)

    def deliver(self, api_id: str, message: ToStreamStore) -> None:
        if self.loses(message):
            return
        for receiver, reply in self.core.receive(api_id, message, 0.0):
            self._outboxes[receiver].put_nowait(reply)

    def entry(self) -> StoreEntry | None:
        return self.core.entries.get(REQUEST_ID, 0.0)

    def record(self) -> StreamRecord:
        entry = self.entry()
        assert entry is not None
        return msgspec.msgpack.decode(entry.data, type=StreamRecord)


class Wire:
    def __init__(self, store: Store, api_id: str, outbox: "asyncio.Queue[FromStreamStore]") -> None:
        self._store, self._api_id, self._outbox = store, api_id, outbox

    def send(self, message: ToStreamStore) -> bool:
        asyncio.get_running_loop().call_soon(self._store.deliver, self._api_id, message)
        return True

    async def receive(self) -> FromStreamStore:
        return await self._outbox.get()

    def close(self) -> None:
        pass


class Process:
    """What an api process has of streams, without an engine."""

    def __init__(self, model: PreparedModel, threads: ThreadPoolExecutor, store: Store, api_id: str) -> None:
        registry, clock, prompts = Registry(), SystemClock(), TextProcessor(read_tokenizer_files(model))
        self._client = EngineClient(RequestTracker(registry), clock, connect=_none, on_fault=_none)
        services = ApiServices(
            ApiConfig(),
            model,
            prompts,
            self._client,
            clock,
            make_executors(lambda *_: threads, clock),
            UnknownFieldReporter(registry.counter("onward_unknown_fields_total", "")),
            SystemRandomSource(),
            LoadShedder(clock, registry),
            RequestLatencyMetrics(registry),
        )
        self._link = StreamStoreClient(lambda _: store.connect(api_id), _none, registry)
        self.streams = StreamRegistry(self._client, clock, 60.0, self._link, 600.0)
        self._builder = RequestBuilder(ResponsesAdapter(prompts), PATH, services)
        self._link.store_up(StreamStoreUp("store-1", "somewhere"))

    async def start(self, attempt: Attempt) -> LiveStream:
        prepared = self._builder.prepare_attempt(attempt, 0.0, is_routed=False)
        assert isinstance(prepared, PreparedRequest)
        return await self.streams.start(lambda: self._builder.start(prepared, WORKER), attempt)

    async def close(self) -> None:
        await self._link.close()
        await self._client.close()


def _none(*_: object) -> Any:
    raise AssertionError("there is no engine, and nothing fails")


def with_processes(model: PreparedModel, num: int, scenario: Callable[[Store, list[Process]], Awaitable[None]]) -> None:
    async def run() -> None:
        store = Store()
        with ThreadPoolExecutor(1) as threads:
            processes = [Process(model, threads, store, f"api-{index}") for index in range(num)]
            try:
                await scenario(store, processes)
            finally:
                for process in processes:
                    await process.close()

    asyncio.run(run())


async def turns(num: int) -> None:
    for _ in range(num):
        await asyncio.sleep(0)


def attempt_at(epoch: int, token_ids: list[int]) -> Attempt:
    choices = [ChoiceSnapshot(list(token_ids))] if token_ids else []
    return attempt_of(PATH, BODY, attempt_epoch=epoch, choices=choices, was_accepted=True)


ORPHAN = StreamRecord(attempt=attempt_at(1, []))


async def orphan(process: Process) -> None:
    """As the process that ran it has left it."""
    process.streams.store_response(ORPHAN)
    await turns(SETTLED_TURNS)


def is_live(process: Process) -> bool:
    return process.streams.live_entry(REQUEST_ID) is not None


async def started(process: Process, epoch: int) -> bool:
    try:
        await process.start(attempt_at(epoch, TOLD))
    except Conflict:
        return False
    return True


@pytest.mark.parametrize("epoch", [2, 4], ids=["next epoch", "later epoch"])
@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("resume_first", [True, False], ids=["resume first", "cancel first"])
def test_a_response_that_is_resumed_and_cancelled_at_once_has_one_end(
    model: PreparedModel, num_processes: int, resume_first: bool, epoch: int
) -> None:
    async def scenario(num_turns: int, store: Store, processes: list[Process]) -> None:
        await orphan(processes[0])
        resume, cancel = lambda: started(processes[0], epoch), lambda: processes[-1].streams.cancel(ORPHAN)
        first, second = (resume, cancel) if resume_first else (cancel, resume)
        tasks = [asyncio.ensure_future(first())]
        await turns(num_turns)
        tasks.append(asyncio.ensure_future(second()))
        results = await asyncio.gather(*tasks)
        has_started, cancelled = results if resume_first else results[::-1]
        await turns(SETTLED_TURNS)
        where = f"{num_turns} turns apart"
        assert not any(map(is_live, processes)), f"it runs on after it was cancelled, {where}"
        entry, kept = store.entry(), store.record()
        assert entry is not None and entry.status == "cancelled", where
        num_kept = sum(len(choice.token_ids) for choice in kept.attempt.choices)
        assert num_kept == (len(TOLD) if has_started else 0), f"what was told is kept, {where}"
        assert kept == cancelled, where

    for num_turns in range(MAX_TURNS):
        with_processes(model, num_processes, lambda *given, n=num_turns: scenario(n, *given))


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("resume_first", [True, False], ids=["resume first", "delete first"])
def test_a_response_that_is_deleted_while_it_is_resumed_stays_deleted(
    model: PreparedModel, num_processes: int, resume_first: bool
) -> None:
    async def scenario(num_turns: int, store: Store, processes: list[Process]) -> None:
        await orphan(processes[0])
        resume, delete = lambda: started(processes[0], 2), lambda: processes[-1].streams.delete(ORPHAN)
        first, second = (resume, delete) if resume_first else (delete, resume)
        tasks = [asyncio.ensure_future(first())]
        await turns(num_turns)
        tasks.append(asyncio.ensure_future(second()))
        await tasks[int(resume_first)]
        is_running = is_live(processes[0])
        await asyncio.gather(*tasks)
        await turns(SETTLED_TURNS)
        entry = store.entry()
        assert entry is not None and entry.status == "deleted"
        # What runs when it is deleted is aborted by name, through the engine.
        assert is_running or not is_live(processes[0]), f"it starts after it was deleted, {num_turns} turns apart"

    for num_turns in range(MAX_TURNS):
        with_processes(model, num_processes, lambda *given, n=num_turns: scenario(n, *given))


def test_an_attempt_whose_claim_is_not_answered_does_not_start_after_a_cancel(
    model: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_store_client, "REPLY_TIMEOUT_S", 0.05)

    async def scenario(store: Store, processes: list[Process]) -> None:
        await orphan(processes[0])
        store.loses = lambda message: isinstance(message, ClaimAttempt) and not message.to_finalize
        starting = asyncio.ensure_future(started(processes[0], 2))
        await turns(1)
        await processes[0].streams.cancel(ORPHAN)
        assert not starting.done(), "it waits for the stream store"
        assert not await starting and not is_live(processes[0])

    with_processes(model, 1, scenario)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_cancel_ends_the_resumed_attempt_and_keeps_its_tokens(model: PreparedModel, num_processes: int) -> None:
    async def scenario(store: Store, processes: list[Process]) -> None:
        await orphan(processes[0])
        assert await started(processes[0], 2)
        cancelled = await processes[-1].streams.cancel(ORPHAN)
        await turns(SETTLED_TURNS)
        assert cancelled.attempt.choices[0].token_ids == TOLD and store.record() == cancelled
        assert not is_live(processes[0]) and not await started(processes[-1], 9)

    with_processes(model, num_processes, scenario)
