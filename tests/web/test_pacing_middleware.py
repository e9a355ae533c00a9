"""In virtual time: what waits, for how long, and what does not."""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest
from starlette.types import Message, Receive, Scope, Send

from onward.clock import Clock
from onward.obs.metrics import Registry
from onward.proto.engine import ErrorInfo
from onward.sim.loop import VirtualLoop
from onward.web import asgi
from onward.web.auth import authenticator
from onward.web.auth.api_key_table import Caller
from onward.web.auth.cross_site import FILES_PATH
from onward.web.caller_pacer import (
    BODY_BYTE_RATE,
    MAX_BUFFERED_BODY_BYTES,
    MAX_PACED_REQUESTS,
    REFUSAL_RATE,
    UNPACED_BODY_BYTES,
)
from onward.web.pacing_middleware import PacingMiddleware
from tests.web.exchange import DISCONNECT, Client, body_part, request_scope

OWN_LIMIT = ErrorInfo("rate_limited", "1 request of this caller is in flight", 429, True, retry_after_s=1.0)
FULL = ErrorInfo("overloaded", "9 requests are waiting already", 429, True, retry_after_s=3.0)
PART = 64 << 10
LARGE = 8 << 20

T = TypeVar("T")


class World(Clock):
    """Callers of an application that refuses some, and reads the bodies of the others."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.app = PacingMiddleware(self._answer, self, Registry())
        self.refusals: dict[str, ErrorInfo] = {}
        self.looked_at: Counter[str] = Counter()
        """Requests, by caller."""
        self.num_taken: Counter[str] = Counter()
        """Bytes that were received for the application."""
        self._begun: list[asyncio.Task[Any]] = []

    def now_s(self) -> float:
        return self.loop.time()

    wall_s = now_s

    def run(self, seconds: float) -> None:
        end_s = self.loop.now_s + seconds
        self.loop.call_at(end_s, lambda: None)
        self.loop.run_until(end_s, lambda: False)

    def begin(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = self.loop.create_task(work)
        self._begun.append(task)
        return task

    def close(self) -> None:
        for task in self._begun:
            task.cancel()
        self.run(0.0)
        self.loop.close()

    async def ask(
        self, caller: str, body: "list[Message] | None" = None, method: str = "GET", path: str = "/v1/completions"
    ) -> Client:
        client = Client(body or [body_part(b"{}")])

        async def receive() -> Message:
            message = await client.receive()
            self.num_taken[caller] += len(message.get("body", b""))
            return message

        scope = {**request_scope(path), "method": method, authenticator._CALLER: Caller(caller, "user")}
        await self.app(scope, receive, client.send)
        return client

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = authenticator.get_caller(scope).name
        self.looked_at[caller] += 1
        try:
            if scope["path"] == FILES_PATH:
                while (await receive()).get("more_body"):
                    pass
            else:
                await asgi.read_body(receive, LARGE)
        except asgi.ClientDisconnected:
            return
        if caller in self.refusals:
            await asgi.respond_error(send, self.refusals[caller])
        else:
            await asgi.respond(send, 200, b"{}")


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def large_body(num_bytes: int = LARGE) -> list[Message]:
    return [body_part(b"x" * PART, more=at + PART < num_bytes) for at in range(0, num_bytes, PART)]


async def again_and_again(world: World, caller: str, statuses: list[int], pause_s: float = 0.001) -> None:
    while True:
        statuses.append((await world.ask(caller)).status)
        await asyncio.sleep(pause_s)


def test_a_caller_that_is_refused_again_and_again_is_slowed_down_and_others_are_not(world: World) -> None:
    world.refusals["a"] = OWN_LIMIT
    told: dict[str, list[int]] = {"a": [], "b": []}
    for caller, num in (("a", 16), ("b", 1)):
        for _ in range(num):
            world.begin(again_and_again(world, caller, told[caller]))
    world.run(10.0)
    assert world.looked_at["a"] <= REFUSAL_RATE.burst + 10.0 * REFUSAL_RATE.per_s + 16
    assert set(told["a"]) == {429} and len(told["a"]) >= 10.0 * REFUSAL_RATE.per_s
    assert len(told["b"]) >= 9_000 and set(told["b"]) == {200}


def test_a_request_that_has_waited_is_served_if_it_is_within_the_limits_by_then(world: World) -> None:
    world.refusals["a"] = OWN_LIMIT
    for _ in range(MAX_PACED_REQUESTS):
        world.begin(world.ask("a"))
    world.run(0.0)
    del world.refusals["a"]
    asked = world.begin(world.ask("a"))
    world.run(0.0)
    assert not asked.done()
    world.run(REFUSAL_RATE.max_wait_s)
    assert asked.result().status == 200


def test_requests_beyond_those_that_may_wait_are_refused_before_they_are_looked_at(world: World) -> None:
    world.refusals["a"] = OWN_LIMIT
    told: list[int] = []
    for _ in range(4 * MAX_PACED_REQUESTS):
        world.begin(again_and_again(world, "a", told, pause_s=1.0))
    world.run(2.0)
    before = world.looked_at["a"]
    world.run(10.0)
    assert world.looked_at["a"] - before <= 10.0 * MAX_PACED_REQUESTS / REFUSAL_RATE.max_wait_s + MAX_PACED_REQUESTS


@pytest.mark.parametrize("refusal", [FULL, ErrorInfo("invalid_request", "no", 400)])
def test_refusals_for_other_reasons_than_its_limits_cost_a_caller_nothing(world: World, refusal: ErrorInfo) -> None:
    world.refusals["a"] = refusal
    told: list[int] = []
    world.begin(again_and_again(world, "a", told))
    world.run(2.0)
    assert len(told) >= 1_900


def test_without_keys_no_request_waits(world: World) -> None:
    world.refusals[""] = OWN_LIMIT
    told: list[int] = []
    world.begin(again_and_again(world, "", told))
    for _ in range(20):
        world.begin(world.ask("", large_body()))
    world.run(2.0)
    assert len(told) >= 1_900
    assert world.num_taken[""] >= 20 * LARGE


def test_large_bodies_of_a_caller_are_read_at_its_rate_and_small_ones_and_those_of_others_at_once(world: World) -> None:
    large = [world.begin(world.ask("a", large_body())) for _ in range(20)]
    world.run(1.0)
    free = BODY_BYTE_RATE.burst + 20 * (UNPACED_BODY_BYTES + 2 * PART)
    assert 0.9 * BODY_BYTE_RATE.per_s <= world.num_taken["a"] <= BODY_BYTE_RATE.per_s + free
    others = [world.begin(world.ask("a")), world.begin(world.ask("b", large_body(1 << 20)))]
    world.run(0.001)
    assert all(one.done() for one in others)
    assert not any(one.done() for one in large)
    world.run(20 * LARGE / BODY_BYTE_RATE.per_s)
    assert all(one.done() for one in large)


def test_bodies_that_do_not_end_hold_no_more_than_the_bound_and_one_body(world: World) -> None:
    half = large_body()[:-1]
    waiting = [world.begin(world.ask("a", list(half))) for _ in range(20)]
    world.run(30.0)
    assert not any(one.done() for one in waiting)
    assert world.num_taken["a"] <= MAX_BUFFERED_BODY_BYTES + LARGE + 20 * (UNPACED_BODY_BYTES + 2 * PART)
    other = world.begin(world.ask("b", large_body()))
    world.run(1.0)
    assert other.done()
    world.run(asgi.BODY_TIMEOUT_S)
    late = world.begin(world.ask("a", large_body()))
    world.run(1.0)
    assert late.done(), "bodies that have timed out hold nothing"


def test_a_client_that_leaves_within_its_body_holds_nothing(world: World) -> None:
    for _ in range(20):
        world.begin(world.ask("a", [*large_body()[:-1], DISCONNECT]))
    world.run(20 * LARGE / BODY_BYTE_RATE.per_s + 1.0)
    late = world.begin(world.ask("a", large_body()))
    world.run(1.0)
    assert late.done()


def test_uploads_that_go_to_disk_do_not_count_as_held_and_are_paced(world: World) -> None:
    upload = large_body(MAX_BUFFERED_BODY_BYTES + 2 * LARGE)[:-1]
    world.begin(world.ask("a", upload, "POST", FILES_PATH))
    world.run(1.0)
    free = BODY_BYTE_RATE.burst + UNPACED_BODY_BYTES + 2 * PART
    assert world.num_taken["a"] <= BODY_BYTE_RATE.per_s + free
    world.run(2 * MAX_BUFFERED_BODY_BYTES / BODY_BYTE_RATE.per_s)
    assert world.num_taken["a"] > MAX_BUFFERED_BODY_BYTES
    other = world.begin(world.ask("a", large_body()))
    world.run(2.0)
    assert other.done(), "the upload has not ended"
