"""A caller whose work waits for its lock leaves the threads of the pool to others."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Message

from onward.batches.batch_endpoints import BatchEndpoints
from onward.batches.batch_policy import BatchLimits
from onward.batches.batch_store import BatchStore
from onward.batches.caller_turns import CallerTurns
from onward.errors import NotFound
from onward.random_source import SystemRandomSource
from onward.web.auth.api_key_table import Caller
from onward.web.auth.authenticator import set_caller
from tests.batches.test_batch_store import StillClock
from tests.web.exchange import request_scope

CREATE = msgspec.json.encode(
    {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
)


def creating(endpoints: BatchEndpoints, caller: str) -> Coroutine[Any, Any, Any]:
    scope = {**request_scope("/v1/batches"), "method": "POST"}
    set_caller(scope, Caller(caller, "user"))
    messages: list[Message] = [{"type": "http.request", "body": CREATE, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.get_running_loop().create_future()

    return endpoints.batches(Request(scope, receive))


def test_a_caller_that_waits_for_its_lock_occupies_one_thread(tmp_path: Path) -> None:
    store = BatchStore(str(tmp_path / "batches"))
    store.prepare()
    turns = CallerTurns()
    endpoints = BatchEndpoints(store, BatchLimits(1000, 8, 1.0), StillClock(), SystemRandomSource(), turns)

    async def scenario() -> None:
        with ThreadPoolExecutor(2) as threads:
            asyncio.get_running_loop().set_default_executor(threads)
            with store.locked("ann"):
                waiting = [asyncio.ensure_future(creating(endpoints, "ann")) for _ in range(20)]
                other = asyncio.ensure_future(creating(endpoints, "bob"))
                answered, _ = await asyncio.wait((other,), timeout=10.0)
                is_waiting = not any(one.done() for one in waiting)
            results = await asyncio.gather(*waiting, return_exceptions=True)
            await asyncio.wait((other,))
        assert answered and isinstance(other.exception(), NotFound) and is_waiting
        assert all(isinstance(one, NotFound) for one in results)

    asyncio.run(scenario())
    assert not turns._turns, "nothing is kept of callers without work"


def test_a_cancelled_call_keeps_its_turn_until_its_thread_has_ended() -> None:
    async def scenario() -> None:
        turns, order = CallerTurns(), []
        with ThreadPoolExecutor(2) as threads:
            asyncio.get_running_loop().set_default_executor(threads)
            loop, started, may_end = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

            def first() -> None:
                loop.call_soon_threadsafe(started.set)
                assert may_end.wait(30.0)
                order.append("first")

            running = asyncio.ensure_future(turns.run("ann", first))
            await started.wait()
            second = asyncio.ensure_future(turns.run("ann", order.append, "second"))
            running.cancel()
            await turns.run("bob", order.append, "other")
            may_end.set()
            await asyncio.wait((running, second))
        assert order == ["other", "first", "second"] and running.cancelled()

    asyncio.run(scenario())
