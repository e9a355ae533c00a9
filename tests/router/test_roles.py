"""The routes of the router that each role may use, and the streams that it sees there; over real sockets."""

import asyncio
import contextlib
import logging
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import msgspec
import pytest
import uvloop

from onward.obs.metrics import Registry
from onward.proto.cursor import parse_cursor
from onward.proto.engine import CallerLimits
from onward.proto.router import ChoiceSnapshot, StreamRecord
from onward.router.app import GENERATION_PATHS, build_routes
from onward.router.endpoints.admin import RouterAdminEndpoints
from onward.router.endpoints.generation import RouterGenerationEndpoint
from onward.router.endpoints.live import DRAIN_PATH, UNDRAIN_PATH, RouterLiveView
from onward.router.response_store import ClusterResponseStore
from onward.web.auth.api_key_file import ApiKeySource
from onward.web.auth.api_key_table import table_text
from onward.web.auth.authenticator import RouteAccess
from onward.web.auth.owned_request_ids import make_owned_id
from onward.web.ui import static_files
from onward.web.ui.live_feed import LIVE_PATH, SNAPSHOT_PATH, LiveFeed
from onward.web.ui.ui_routes import SESSION_PATH
from tests.router.harness import CHAT, Answer, Received, Router, assert_seamless, running_router
from tests.router.stand_in_instance import Behaviour, StandInInstance, token
from tests.web import certificate, route_access

ACCESS = {
    **dict.fromkeys(static_files.PATHS, RouteAccess.OPEN),
    SESSION_PATH: RouteAccess.USER,
    **dict.fromkeys((LIVE_PATH, SNAPSHOT_PATH, DRAIN_PATH, UNDRAIN_PATH), RouteAccess.ADMIN),
    **dict.fromkeys(GENERATION_PATHS, RouteAccess.USER),
    "/v1/responses/input_tokens": RouteAccess.USER,
    "/v1/responses/compact": RouteAccess.USER,
    "/v1/responses/{response_id}": RouteAccess.USER,
    "/v1/responses/{response_id}/cancel": RouteAccess.USER,
    "/v1/responses/{response_id}/input_items": RouteAccess.USER,
    "/v1/embeddings": RouteAccess.USER,
    "/v1/rerank": RouteAccess.USER,
    "/v1/score": RouteAccess.USER,
    "/pooling": RouteAccess.USER,
    "/v2/rerank": RouteAccess.USER,
    "/rerank": RouteAccess.USER,
    "/score": RouteAccess.USER,
    "/tokenizer_info": RouteAccess.USER,
    "/v1/messages": RouteAccess.USER,
    "/v1/messages/count_tokens": RouteAccess.USER,
    "/v1/files": RouteAccess.USER,
    "/v1/files/{file_id}": RouteAccess.USER,
    "/v1/files/{file_id}/content": RouteAccess.USER,
    "/v1/batches": RouteAccess.USER,
    "/v1/batches/{batch_id}": RouteAccess.USER,
    "/v1/batches/{batch_id}/cancel": RouteAccess.USER,
    **dict.fromkeys(route_access.OLLAMA_PATHS, RouteAccess.USER),
    "/v1/abort": RouteAccess.USER,
    "/tokenize": RouteAccess.USER,
    "/detokenize": RouteAccess.USER,
    "/openapi.json": RouteAccess.USER,
    "/v1/models": RouteAccess.USER,
    "/v1/models/{model:path}": RouteAccess.USER,
    "/health": RouteAccess.OPEN,
    "/version": RouteAccess.USER,
    "/live": RouteAccess.OPEN,
    "/docs": RouteAccess.OPEN,
    "/": RouteAccess.OPEN,
    "/metrics": RouteAccess.ADMIN,
    "/info": RouteAccess.ADMIN,
    "/internal/status": RouteAccess.ADMIN,
    "/internal/register": RouteAccess.CLUSTER,
}
STREAM: dict[str, Any] = {
    "model": "hash",
    "messages": [{"role": "user", "content": "hi"}],
    "seed": 7,
    "max_tokens": 6,
    "stream": True,
}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    write(path, *route_access.KEYS)
    return path


def write(path: Path, *names: str) -> None:
    path.write_text("\n".join(table_text(entry) for entry in route_access.entries() if entry.name in names))
    path.chmod(0o600)


def keyed_router(path: Path, *instances: StandInInstance, **more: Any) -> AbstractAsyncContextManager[Router]:
    """The instances show a key that is not in the file."""
    return running_router(*instances, key_source=ApiKeySource(("ow-key-of-instances",), str(path)), **more)


def test_every_route_and_method_is_closed_as_the_table_says(key_file: Path) -> None:
    async def scenario() -> None:
        async with keyed_router(key_file, StandInInstance("a")) as router:
            serving = router.process.stream_runner
            generating = dict.fromkeys(GENERATION_PATHS, RouterGenerationEndpoint(serving, None))
            admin = RouterAdminEndpoints(serving, Registry(), "")
            feed = LiveFeed(RouterLiveView(serving).look, serving.clock)
            routes = build_routes(serving, admin, generating, None, ClusterResponseStore(serving), feed)
            assert {route.path: route.access for route in routes} == ACCESS, "a new route belongs into the table"

            def ask(question: route_access.Question) -> int:
                url, headers = router.url + question.path, route_access.header(question.name)
                # Not read to its end: the live view has none.
                with client.stream(question.method, url, headers=headers) as response:
                    return response.status_code

            with httpx.Client(timeout=30, trust_env=False) as client:
                wrong = await asyncio.to_thread(route_access.wrong_answers, route_access.questions(routes), ask)
            assert wrong == []

    uvloop.run(scenario())


ELSEWHERE = ["../../info", "..%2f..%2fmetrics", "%2e%2e/%2e%2e/info", "x/../../../info", "x%3f/../../info", "x%2523"]


@pytest.mark.parametrize("host", ["x", "x/info?", "["], ids=["plain", "path", "broken"])
def test_a_model_s_name_leads_nowhere_else_at_an_instance(key_file: Path, host: str) -> None:
    async def scenario() -> None:
        a = StandInInstance("a")
        async with keyed_router(key_file, a) as router:
            asked = len(a.paths)
            for name in ELSEWHERE:
                reader, writer = await asyncio.open_connection(*router.url.removeprefix("http://").split(":"))
                head = [f"GET /v1/models/{name} HTTP/1.1", f"host: {host}", "connection: close"]
                head += [f"{key}: {value}" for key, value in route_access.header("user").items()]
                writer.write("\r\n".join([*head, "", ""]).encode())
                assert (await reader.read()).startswith(b"HTTP/1.1 404"), name
                writer.close()
            paths = [path for path in a.paths[asked:] if not path.startswith("/internal/")]
            assert paths == ["/v1/models"] * len(ELSEWHERE), "the name is only looked up in the list"

    uvloop.run(scenario())


def test_metrics_can_be_opened(key_file: Path) -> None:
    async def scenario() -> None:
        async with keyed_router(key_file, open_metrics=True) as router:
            assert [(await router.get(path)).status for path in ("/metrics", "/info")] == [200, 401]

    uvloop.run(scenario())


def test_a_page_of_an_origin_that_was_named_may_stream_and_is_shown_why_it_is_refused(key_file: Path) -> None:
    origin = "https://example.org"

    async def scenario() -> None:
        async with (
            keyed_router(key_file, StandInInstance("a"), cors_origin=(origin,)) as router,
            aiohttp.ClientSession(router.url) as page,
        ):
            asked = {"origin": origin, "access-control-request-method": "POST"}
            async with page.options("/v1/chat/completions", headers=asked) as answer:
                assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, origin)
            for name, status in ((None, 401), ("user", 200)):
                headers = route_access.header(name) | {"origin": origin}
                async with page.post("/v1/chat/completions", json=STREAM, headers=headers) as answer:
                    assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, origin)
                    assert (b"[DONE]" in await answer.read()) == (status == 200)
            async with page.get("/version", headers={"origin": "https://elsewhere.org"}) as answer:
                assert "access-control-allow-origin" not in answer.headers

    uvloop.run(scenario())


@contextlib.contextmanager
def audited(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    lines: list[str] = []
    with caplog.at_level(logging.INFO, "onward.audit"):
        yield lines
        lines += [record.getMessage() for record in caplog.records if record.name == "onward.audit"]


def as_caller(name: str, label: str = "") -> dict[str, str]:
    return route_access.header(name) | ({"X-Request-Id": label} if label else {})


async def begun(router: Router, a: StandInInstance, *callers: str) -> "list[asyncio.Task[Answer]]":
    """A stream of each caller that stays open, all with the same label."""
    gate = asyncio.Event()
    a.behave = lambda *_: Behaviour(silent_after=2, gate=gate)
    streams = [asyncio.create_task(router.post(STREAM, headers=as_caller(name, "mine"))) for name in callers]
    await a.wait_until(lambda: len(a.attempts) == len(callers))
    return streams


async def abort(router: Router, name: str, **body: Any) -> Any:
    answer = await router.post(body, path="/v1/abort", headers=as_caller(name))
    return answer.json if answer.status == 200 else answer.status


def test_an_abort_reaches_the_callers_own_streams_only(key_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        a = StandInInstance("a")
        async with keyed_router(key_file, a) as router:
            streams = await begun(router, a, "user", "other")
            ids = {attempt.caller: attempt.request_id for attempt in a.attempts}
            assert ids.keys() == {"user", "other"}
            assert await abort(router, "user", ids=[ids["other"]]) == {"aborted": [], "unknown": [ids["other"]]}
            assert a.aborted_for == ["user"], "the instance is told whose"
            assert await abort(router, "user", all=True) == 403
            assert await abort(router, "user", ids=["mine"]) == {"aborted": ["mine"], "unknown": []}
            assert (await streams[0]).stream.errors[0]["code"] == "aborted"
            assert not streams[1].done()
            assert await abort(router, "admin", ids=[ids["other"]]) == {"aborted": [ids["other"]], "unknown": []}
            assert (await streams[1]).stream.errors[0]["code"] == "aborted"
            assert (await abort(router, "admin", all=True))["aborted"] == []
            assert a.aborted_for[-1] is None

    with audited(caplog) as lines:
        uvloop.run(scenario())
    assert lines == ["audit caller=admin action=abort targets=1", "audit caller=admin action=abort_all targets=0"]


@contextlib.asynccontextmanager
async def reading(router: Router, name: str) -> AsyncIterator[tuple[str, aiohttp.ClientResponse, bytes]]:
    """A client in the middle of its stream: the place it has come to, the rest, and what it has read."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(router.url + CHAT, json=STREAM, headers=as_caller(name)) as response,
    ):
        read = b""
        while b"id: " not in read or not read.endswith(b"\n\n"):
            read += await response.content.readany()
        last = [line for line in read.decode().splitlines() if line.startswith("id: ")][-1]
        yield last.removeprefix("id: "), response, read


async def assert_unknown(router: Router, name: str, place: str) -> None:
    """In the same words as one that never was."""
    request_id, never = parse_cursor(place).request_id, make_owned_id("ab" * 16, "user")
    told: dict[str, list[tuple[int, str]]] = {}
    for one in (request_id, never):
        headers = as_caller(name) | {"Last-Event-ID": place.replace(request_id, one)}
        answers = await router.get(CHAT, headers), await router.post(STREAM, headers=headers)
        told[one] = [(answer.status, answer.json["error"]["message"].replace(one, "ID")) for answer in answers]
    assert told[request_id] == told[never]
    assert [status for status, _ in told[never]] == [404, 404]


def test_a_stream_whose_client_has_gone_is_there_for_its_caller_and_for_admins(key_file: Path) -> None:
    async def scenario() -> None:
        a, gate = StandInInstance("a"), asyncio.Event()
        a.behave = lambda attempt, _: (
            Behaviour(silent_after=2, gate=gate) if attempt.attempt_epoch == 1 else Behaviour()
        )
        async with keyed_router(key_file, a) as router:
            for name in ("user", "admin"):
                async with reading(router, "user") as (place, _, _):
                    pass
                async with asyncio.timeout(5):
                    while router.process.stream_runner.core.live_streams():
                        await asyncio.sleep(0.01)
                await assert_unknown(router, "other", place)
                own = await router.get(CHAT, as_caller(name) | {"Last-Event-ID": place})
                assert own.status == 200 and own.stream.num_done == 1 and not own.stream.errors
                assert a.attempts[-1].caller == "user", "it stays whose it was"

    uvloop.run(scenario())


def test_a_record_that_only_an_instance_has_is_its_callers_too(key_file: Path) -> None:
    async def scenario() -> None:
        a, gate = StandInInstance("a"), asyncio.Event()
        a.behave = lambda attempt, _: (
            Behaviour(silent_after=2, gate=gate) if attempt.attempt_epoch == 1 else Behaviour()
        )
        async with keyed_router(key_file, a) as router:
            async with reading(router, "user") as (place, _, _):
                pass
            attempt = msgspec.structs.replace(
                a.attempts[0], choices=[ChoiceSnapshot([token(7, 0, i) for i in range(2)])]
            )
            a.records[attempt.request_id] = StreamRecord(attempt=attempt)
            async with asyncio.timeout(5):
                while router.process.stream_runner.core.live_streams():
                    await asyncio.sleep(0.01)
            router.process.stream_runner.core.resumable_streams.drop(attempt.request_id)
            await assert_unknown(router, "other", place)
            own = await router.get(CHAT, as_caller("user") | {"Last-Event-ID": place})
            assert own.status == 200 and own.stream.num_done == 1

    uvloop.run(scenario())


def test_nobody_else_can_cut_a_stream_off_by_coming_back_for_it(key_file: Path) -> None:
    async def scenario() -> None:
        a, gate = StandInInstance("a"), asyncio.Event()
        a.behave = lambda *_: Behaviour(silent_after=2, gate=gate)
        async with keyed_router(key_file, a) as router, reading(router, "user") as (place, response, read):
            await assert_unknown(router, "other", place)
            gate.set()
            assert_seamless(Received.of(read + await response.content.read()), 7, 6)
            assert len(a.attempts) == 1

    uvloop.run(scenario())


def test_an_abort_of_a_stream_whose_client_has_gone_reaches_what_an_instance_has_kept_of_it(key_file: Path) -> None:
    async def scenario() -> None:
        a, gate = StandInInstance("a"), asyncio.Event()
        a.behave = lambda attempt, _: (
            Behaviour(silent_after=2, gate=gate) if attempt.attempt_epoch == 1 else Behaviour()
        )
        async with keyed_router(key_file, a) as router:
            async with reading(router, "user") as (place, _, _):
                pass
            async with asyncio.timeout(5):
                while router.process.stream_runner.core.live_streams():
                    await asyncio.sleep(0.01)
            a.records[a.attempts[0].request_id] = StreamRecord(attempt=a.attempts[0])
            name = f"chatcmpl-{a.attempts[0].request_id}"
            assert await abort(router, "user", ids=[name]) == {"aborted": [name], "unknown": []}
            assert a.attempts[0].request_id in a.aborted[-1]
            gone = await router.get(CHAT, as_caller("user") | {"Last-Event-ID": place})
            assert (gone.status, gone.json["error"]["code"]) == (404, "stream_unknown")

    uvloop.run(scenario())


def test_nobody_else_learns_that_a_stream_was_aborted(key_file: Path) -> None:
    async def scenario() -> None:
        a = StandInInstance("a")
        a.behave = lambda *_: Behaviour(silent_after=2, gate=asyncio.Event())
        async with keyed_router(key_file, a) as router, reading(router, "user") as (place, response, _):
            request_id = parse_cursor(place).request_id
            assert (await abort(router, "user", ids=[request_id]))["aborted"] == [request_id]
            assert b"aborted" in await response.content.read()
            await assert_unknown(router, "other", place)

    uvloop.run(scenario())


def test_a_caller_that_instances_refuse_again_and_again_waits(key_file: Path) -> None:
    async def scenario() -> None:
        a = StandInInstance("a")
        limited = {"code": "rate_limited", "message": "max_in_flight", "retryable": True}
        a.behave = lambda *_: Behaviour(status=429, error=limited, headers={"retry-after": "1"})
        async with keyed_router(key_file, a) as router:
            for _ in range(50):
                for _ in range(100):
                    assert (await router.post(STREAM, headers=as_caller("user"))).status == 429
                if b"onward_paced_requests_total{" in (await router.get("/metrics", as_caller("admin"))).body:
                    return
        raise AssertionError("no request has waited")

    uvloop.run(scenario())


def test_limits_and_priority_of_a_key_travel_with_each_attempt(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    entry = msgspec.structs.replace(route_access.entries()[0], max_in_flight=3, tokens_per_minute=90, priority=5)
    path.write_text(table_text(entry))
    path.chmod(0o600)

    async def scenario() -> None:
        a = StandInInstance("a")
        async with keyed_router(path, a) as router:
            assert (await router.post(STREAM, headers=as_caller("user"))).status == 200
            [attempt] = a.attempts
            assert (attempt.caller_limits, attempt.caller_priority) == (CallerLimits(3, 90), 5)

    uvloop.run(scenario())


def test_keys_are_read_again_and_a_broken_file_changes_nothing(
    key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with keyed_router(key_file) as router:

            async def known() -> list[str]:
                answers = {name: await router.get("/version", route_access.header(name)) for name in route_access.KEYS}
                return [name for name, answer in answers.items() if answer.status == 200]

            assert await known() == ["user", "other", "admin"]
            write(key_file, "other")
            router.process.reload_keys()
            assert await known() == ["other"]
            key_file.write_text("[[key]]\nname = 1\n")
            router.process.reload_keys()
            assert await known() == ["other"]

    with audited(caplog) as lines:
        uvloop.run(scenario())
    assert lines[0] == "audit caller=signal action=reload_keys targets=2"
    assert f"{key_file}: key 1: name" in lines[1] and len(lines) == 2


class RouterOnItsOwn:
    """`onward router` as people start it. What it prints is kept."""

    def __init__(self, folder: Path, *flags: str, **environment: str) -> None:
        self._output = folder / "output"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "onward.cli.main", "router", "--port", "0", *flags],
                stdout=output,
                stderr=output,
                env=os.environ | {"COLUMNS": "200"} | environment,
            )
        self.url = self.wait_for(r"routes at (https?://\S+)")

    def wait_for(self, pattern: str) -> str:
        deadline_s = time.monotonic() + 30
        while (found := re.search(pattern, self.output())) is None:
            assert self.process.poll() is None and time.monotonic() < deadline_s, self.output()
            time.sleep(0.02)
        return found.group(found.lastindex or 0)

    def output(self) -> str:
        return self._output.read_text()

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(30) == 0


def test_a_router_reads_its_keys_again_on_sighup_and_never_tells_them(tmp_path: Path, key_file: Path) -> None:
    cert, key = certificate.make(tmp_path)
    write(key_file, "admin")
    flags = ("--instances", "http://127.0.0.1:9", "--api-keys", str(key_file), "--tls-cert", cert, "--tls-key", key)
    router = RouterOnItsOwn(tmp_path, *flags)
    try:
        with httpx.Client(base_url=router.url, verify=ssl.create_default_context(cafile=cert), timeout=30) as client:
            user, admin = route_access.header("user"), route_access.header("admin")
            assert client.get("/version", headers=user).status_code == 401
            write(key_file, "user", "admin")
            router.process.send_signal(signal.SIGHUP)
            router.wait_for("action=reload_keys targets=2")
            assert client.get("/version", headers=user).status_code == 200
            key_file.write_text("broken")
            router.process.send_signal(signal.SIGHUP)
            router.wait_for("refused=")
            assert client.get("/info", headers=user).status_code == 403
            info = client.get("/info", headers=admin)
            assert info.status_code == 200
            command_line = Path(f"/proc/{router.process.pid}/cmdline").read_bytes().decode()
            assert client.post("/v1/abort", headers=admin, json={"all": True}).status_code == 200
            router.wait_for("audit caller=admin action=abort_all targets=0")
    finally:
        router.stop()
    for secret in route_access.KEYS.values():
        assert all(secret not in text for text in (router.output(), info.text, command_line))


def test_a_key_of_the_environment_is_nowhere_to_be_read(tmp_path: Path) -> None:
    router = RouterOnItsOwn(tmp_path, "--instances", "http://127.0.0.1:9", ONWARD_API_KEY="ow-of-the-environment")
    try:
        with httpx.Client(base_url=router.url, timeout=30, trust_env=False) as client:
            assert client.get("/info").status_code == 401
            info = client.get("/info", headers={"Authorization": "Bearer ow-of-the-environment"})
            assert info.status_code == 200
    finally:
        router.stop()
    assert "ow-of-the-environment" not in info.text + router.output()
