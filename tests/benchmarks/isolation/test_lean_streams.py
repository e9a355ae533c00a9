"""Lean clients against a real server whose answers are known."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import uvloop
from starlette.types import Receive, Scope, Send

from benchmarks.isolation.hostile_connections import HostileConnections, kinds
from benchmarks.isolation.lean_streams import StreamRequest, ask_one, closed_load, open_load
from onward.obs.metrics import Registry
from onward.web import asgi, sse
from onward.web.server.connection_tracker import ConnectionLimits
from onward.web.server.http_server import HttpServer

END_OF_TEST_S = 30.0


class App:
    """Three pieces of text and a count; a refusal for the model `full`; an end in the middle for `broken`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            model = msgspec.json.decode(await asgi.read_body(receive, 1 << 16))["model"]
        except (asgi.ClientDisconnected, msgspec.DecodeError):
            return
        if model == "full":
            await asgi.respond(send, 429, b"{}")
            return
        await send(asgi.start_message(200, sse.HEADERS))
        await send(asgi.body_message(sse.event(b'{"choices":[{"delta":{"role":"assistant","content":""}}]}')))
        for ids in ("0:5", "0:6+7"):
            await send(
                asgi.body_message(sse.event(b'{"choices":[{"delta":{"content":"text"}}]}', f"1;a;0;0;1;3;{ids}"))
            )
        if model == "broken":
            raise asgi.ClientDisconnected
        await send(asgi.body_message(sse.event(b'{"usage":{"completion_tokens":3}}') + sse.DONE, more_body=False))


@asynccontextmanager
async def serving(bounds: ConnectionLimits | None = None) -> AsyncIterator[tuple[int, Registry]]:
    started, registry = asyncio.Event(), Registry()
    server = HttpServer(App(), started.set, limits=bounds, registry=registry)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        running = asyncio.create_task(server.serve([listening]))
        await started.wait()
        try:
            yield listening.getsockname()[1], registry
        finally:
            server.force_exit = True
            server.stop(0.0, lambda: None)
            await running


def asked(port: int, model: str = "any") -> StreamRequest:
    return StreamRequest(port, "key", model, num_words=3, max_tokens=3)


def test_a_stream_is_whole_refused_or_lost() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(END_OF_TEST_S), serving() as (port, _):
            whole = await ask_one(asked(port), "seed")
            assert (whole.is_whole, whole.num_tokens, sum(whole.tokens.values())) == (True, 3, 3)
            assert whole.first_s is not None and whole.ended_s is not None
            assert whole.started_s <= whole.first_s <= whole.ended_s
            refused = await ask_one(asked(port, "full"), "seed")
            assert (refused.is_whole, refused.status) == (False, 429)
            broken = await ask_one(asked(port, "broken"), "seed")
            assert (broken.is_whole, broken.status) == (False, 200)
        assert (await ask_one(asked(port), "seed")).status == 0

    uvloop.run(scenario())


def test_a_closed_load_goes_on_until_its_end_and_an_open_one_reads_all_it_has_begun() -> None:
    async def scenario() -> None:
        looks: list[None] = []
        async with asyncio.timeout(END_OF_TEST_S), serving() as (port, _):
            streams = await closed_load(asked(port), 2, 0.0, 0.2, "seed")
            assert len(streams) > 2
            assert all(one.is_whole for one in streams if one.ended_s is not None)
            streams = await open_load(asked(port), 100.0, 1.5, "seed", lambda: looks.append(None))
            assert streams and all(one.is_whole for one in streams)
            assert looks

    uvloop.run(scenario())


def test_hostile_connections_of_every_kind_come_again_and_the_server_is_rid_of_them() -> None:
    def connections(registry: Registry) -> float:
        [family] = [one for one in registry.snapshot() if one.name == "onward_http_connections"]
        return sum(series.value for series in family.series)

    async def scenario() -> None:
        bounds = ConnectionLimits(head_timeout_s=0.1, idle_timeout_s=0.1, close_timeout_s=0.1)
        async with asyncio.timeout(END_OF_TEST_S), serving(bounds) as (port, registry):
            crowd = HostileConnections(port, ("one", "two"), "any", "seed")
            for kind in ("slow_head", "unread", "silent"):
                crowd.come(kind, 0.0)
            while crowd.counts["slow_head: answered 408"] < 2 or crowd.counts["silent: over"] < 2:
                await asyncio.sleep(0.01)
            crowd.goes_on = False
            while connections(registry):
                await asyncio.sleep(0.01)
            assert crowd.counts["unread: answered 200"] >= 1
            crowd.leave()
            while crowd.open:
                await asyncio.sleep(0.01)

    uvloop.run(scenario())


def test_the_kinds_are_mixed_in_their_proportions() -> None:
    assert {kind: kinds(1000).count(kind) for kind in set(kinds(1000))} == {
        "slow_head": 175, "slow_body": 175, "unread": 400, "vanishing": 200, "silent": 50,
    }  # fmt: skip
    assert set(kinds(20)) == set(kinds(1000))
