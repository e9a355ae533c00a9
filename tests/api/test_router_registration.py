"""How an instance makes itself known to routers."""

import asyncio
import contextlib
import http.server
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import aiohttp
import httpx
import msgspec
import pytest

from onward.api import router_registration
from onward.api.instance_description import instance_load
from onward.api.router_registration import PATIENCE_S, RegistrationLog, RouterRegistrar
from onward.clock import SystemClock
from onward.config import ApiConfig
from onward.proto.model import PreparedModel
from onward.proto.router import (
    PROBE_PATH,
    REGISTER_PATH,
    SIGNATURE_HEADER,
    InstanceLoad,
    Registration,
    RegistrationReply,
)
from onward.proto.stats import EngineStats
from onward.transport.cluster_signature import sign_request, verify_signature
from tests.api.instance import BLOCK_SIZE, NUM_BLOCKS, News, running
from tests.api.reader import NO_CERTIFICATES
from tests.api.routed import MSGPACK_BODY
from tests.api.test_load_shedder import ManualClock
from tests.router.members import registration

KEY = "ab" * 32
WAIT_S = 20.0


class Router:
    """Takes registrations on a real port."""

    def __init__(self, answer: RegistrationReply, cluster_key: str = "") -> None:
        self.answer = answer
        self.told: list[Registration] = []
        self.news = News()
        router = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == REGISTER_PATH
                if cluster_key:
                    assert verify_signature(
                        cluster_key, self.headers[SIGNATURE_HEADER], "POST", self.path, body, time.time()
                    )
                router.told.append(msgspec.msgpack.decode(body, type=Registration))
                said = msgspec.msgpack.encode(router.answer_to(router.told[-1]))
                self.send_response(200)
                self.send_header("content-length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)
                router.news.tell()

            def log_message(self, format: str, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def answer_to(self, told: Registration) -> RegistrationReply:
        return self.answer

    def hears(self, condition: Callable[[Registration], bool]) -> None:
        self.news.wait_until(lambda: bool(self.told) and condition(self.told[-1]))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


@contextlib.contextmanager
def router(
    again_after_s: float = 0.1, error: str = "", cluster_key: str = "", num_others: int = -1
) -> Iterator[Router]:
    one = Router(RegistrationReply("router-1", again_after_s, error, num_other_instances=num_others), cluster_key)
    try:
        yield one
    finally:
        one.close()


def test_an_instance_says_what_it_is_and_when_it_changes(model: PreparedModel) -> None:
    with router() as first, router() as second:
        config = ApiConfig(
            routers=(first.url, second.url + "/"),
            url="http://10.1.2.3:8000",
            role="decode",
            handoff_address="tcp://10.1.2.3:9",
        )
        with running(model, config) as instance:
            for one in (first, second):
                one.hears(lambda told: told.state == "ready")
            told = first.told[-1]
            assert (told.instance, told.url, told.role) == ("instance-1", "http://10.1.2.3:8000", "decode")
            assert (told.model, told.fingerprint, told.engine) == ("small-model", "fp", instance.engine.incarnation)
            assert (told.handoff_address, told.block_size, told.max_tokens) == ("tcp://10.1.2.3:9", BLOCK_SIZE, 256)
            assert told.load == InstanceLoad(0, 0, 4, NUM_BLOCKS, NUM_BLOCKS)
            assert told.pids_by_role["api"] == [instance.children[0].process.pid]
            instance.worker_ready = False
            first.hears(lambda told: told.state == "restarting")
            instance.worker_ready = True
            first.hears(lambda told: told.state == "ready")
            instance.kill_engine()
            second.hears(lambda told: (told.state, told.engine) == ("restarting", ""))
            instance.start_engine()
            second.hears(lambda told: told.state == "ready")
            httpx.post(f"{instance.url}/drain", verify=NO_CERTIFICATES)
            first.hears(lambda told: told.state == "draining")
            instance.stop(5.0)
            for one in (first, second):
                one.hears(lambda told: told.state == "leaving")


def test_a_router_that_is_away_or_hangs_holds_up_no_other(model: PreparedModel) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging, socket.socket() as unused, router() as there:
        unused.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{unused.getsockname()[1]}"
        hung = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        with running(model, ApiConfig(routers=(away, hung, there.url))):
            there.hears(lambda told: told.state == "ready")
            before = len(there.told)
            there.hears(lambda _: len(there.told) > before + 3)


class Description:
    """The same registration at any time."""

    async def registration(self, last_reply: object = None, *, is_leaving: bool = False) -> Registration:
        return registration("instance-1", state="leaving" if is_leaving else "ready")


def test_a_router_that_hangs_does_not_hold_up_a_new_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new server serves after this process has ended."""
    monkeypatch.setattr(router_registration, "POST_TIMEOUT_S", 1e6)

    async def deregister(url: str) -> None:
        config = ApiConfig(routers=(url,))
        registrar = RouterRegistrar(config, cast(Any, Description()), SystemClock(), aiohttp.ClientSession)
        registrar.start()
        registrar.deregister(is_replaced=True)
        async with asyncio.timeout(WAIT_S):
            await registrar.close()

    with socket.create_server(("127.0.0.1", 0)) as hanging:
        asyncio.run(deregister(f"http://127.0.0.1:{hanging.getsockname()[1]}"))


def test_a_router_that_does_not_take_us_is_asked_again(model: PreparedModel) -> None:
    with router(error="another model") as one, running(model, ApiConfig(routers=(one.url,))):
        one.hears(lambda _: len(one.told) > 3)


def test_of_several_processes_one_speaks_for_all(model: PreparedModel) -> None:
    with router(again_after_s=10.0) as one, running(model, ApiConfig(routers=(one.url,)), num_api=2) as instance:
        one.hears(lambda told: len(told.pids_by_role["api"]) == 2)
        instance.stop(grace_s=5.0)
        for child in instance.children:
            assert child.process.wait(20) == 0
        assert [told.state for told in one.told].count("leaving") == 1


def test_both_sides_show_that_they_hold_the_key(model: PreparedModel) -> None:
    with (
        router(cluster_key=KEY) as one,
        running(model, ApiConfig(routers=(one.url,), cluster_key=KEY)) as instance,
    ):
        one.hears(lambda told: told.state == "ready")
        question = msgspec.msgpack.encode(RegistrationReply("r", 1.0))
        refused = httpx.post(
            instance.url + PROBE_PATH,
            content=question,
            headers=MSGPACK_BODY,
            verify=NO_CERTIFICATES,
        )
        assert refused.status_code == 403
        headers = {SIGNATURE_HEADER: sign_request(KEY, "POST", PROBE_PATH, question, time.time())}
        probed = httpx.post(instance.url + PROBE_PATH, content=question, headers=headers, verify=NO_CERTIFICATES)
        assert msgspec.msgpack.decode(probed.content, type=Registration).state == "ready"


@pytest.mark.parametrize(
    ("requests", "running_now", "waiting"),
    [({"running": 3, "preempting": 1, "waiting": 2, "asked": 1}, 4, 3), ({}, 0, 0)],
)
def test_the_load_counts_every_request_once(requests: dict[str, int], running_now: int, waiting: int) -> None:
    blocks = {"free": 5, "cached": 2, "owned": 9, "fenced": 1}
    stats = EngineStats(1, True, 0.0, requests, blocks, 60)
    assert instance_load(stats) == InstanceLoad(running_now, waiting, running_now + 60, 7, 17)


@pytest.fixture
def manual_clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def registration_log(manual_clock: ManualClock, caplog: pytest.LogCaptureFixture) -> RegistrationLog:
    caplog.set_level(logging.INFO, "onward.api.router_registration")
    return RegistrationLog("http://r:1", manual_clock)


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage().split(" url=")[0]) for record in caplog.records]


NOT_TAKEN, TAKEN_AGAIN = ("WARNING", "router does not take us"), ("INFO", "registered")


def test_a_router_that_was_there_and_falls_silent_is_told_only_when_it_stays_so(
    registration_log: RegistrationLog, manual_clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    registration_log.accepted()
    manual_clock.time_s += PATIENCE_S
    registration_log.unreachable("Connection refused")
    assert logged(caplog) == [], "it may be stopping, and we are next"
    manual_clock.time_s += 0.1
    registration_log.unreachable("Connection refused")
    registration_log.unreachable("Connection refused")
    assert logged(caplog) == [NOT_TAKEN]
    registration_log.accepted()
    registration_log.accepted()
    assert logged(caplog) == [NOT_TAKEN, TAKEN_AGAIN]


def test_a_router_that_never_answered_is_told_at_once(
    registration_log: RegistrationLog, caplog: pytest.LogCaptureFixture
) -> None:
    registration_log.unreachable("Name or service not known")
    assert logged(caplog) == [NOT_TAKEN]
    assert "Name or service not known" in caplog.text


def test_a_router_that_says_no_is_told_at_once(
    registration_log: RegistrationLog, caplog: pytest.LogCaptureFixture
) -> None:
    registration_log.accepted()
    registration_log.refused("another model")
    registration_log.refused("another model")
    assert logged(caplog) == [NOT_TAKEN]
