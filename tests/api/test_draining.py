"""An instance that is being drained: nothing new is taken, and what runs ends there unless a router moves it."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import msgspec

from onward.clock import SystemClock
from onward.config import ApiConfig
from onward.proto.model import PreparedModel
from onward.proto.router import PROBE_PATH, SIGNATURE_HEADER, Registration, RegistrationReply
from onward.transport.cluster_signature import sign_request
from tests.api.instance import Instance, running
from tests.api.reader import NO_CERTIFICATES, ask, read, request
from tests.api.routed import MSGPACK_BODY, attempt_of, error_in, given, post
from tests.api.stand_in_engine import hashed_token
from tests.api.test_router_registration import router

PATH = "/v1/completions"


def plain(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(url + PATH, json=request(PATH, True, **fields), timeout=30, verify=NO_CERTIFICATES)


def pause_at(instance: Instance, position: int) -> Callable[..., int]:
    def choose(prompt: Any, sampling: Any, tokens: Any) -> int:
        instance.engine.paused = instance.engine.paused or len(tokens) >= position
        return hashed_token(prompt, sampling, tokens)

    return choose


def begin(instance: Instance, threads: ThreadPoolExecutor) -> tuple[list[Future[httpx.Response]], str]:
    """A plain stream, and two attempts of a router, streamed and not, all in the middle. And what the plain one says."""
    whole = ask(instance.url, PATH, request(PATH, True, max_tokens=80, seed=7)).texts[0]
    instance.engine.choose = pause_at(instance, 5)
    asked = [threads.submit(plain, instance.url, max_tokens=80, seed=7)]
    for name, streaming in (("a", True), ("b", False)):
        attempt = attempt_of(PATH, request(PATH, streaming, max_tokens=80), request_id=name * 32)
        asked.append(threads.submit(post, instance.url, attempt))
    instance.wait_until(lambda: instance.engine.paused and len(instance.engine.running) == 3)
    return asked, whole


def live_streams(instance: Instance) -> dict[str, Any]:
    return httpx.get(f"{instance.url}/info", verify=NO_CERTIFICATES).json()["live_streams"]


def test_streams_end_where_they_are_and_nothing_new_begins(model: PreparedModel) -> None:
    with running(model) as instance, ThreadPoolExecutor(3) as threads:
        asked, whole = begin(instance, threads)
        assert httpx.post(f"{instance.url}/drain", verify=NO_CERTIFICATES).json() == {"status": "draining"}
        assert live_streams(instance) == {"routed": 2, "direct": 1, "can_move": None}
        refused = [
            plain(instance.url),
            post(instance.url, attempt_of(PATH, request(PATH, True))),
            post(instance.url, attempt_of(PATH, request(PATH, False), choices=given(([97], None)))),
        ]
        for response in refused:
            assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
            assert response.json()["error"]["retryable"] and response.headers["retry-after"] == "1"
        health = httpx.get(f"{instance.url}/health", verify=NO_CERTIFICATES)
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        assert probed(instance).state == "draining"
        instance.engine.choose, instance.engine.paused = hashed_token, False
        assert read(asked[0].result(20), {"stream": True}).texts == [whole]
        for one in asked[1:]:
            assert b"event: error" not in one.result(20).content, "no router has moved it"
        assert httpx.post(f"{instance.url}/drain", verify=NO_CERTIFICATES).status_code == 200


def test_an_instance_can_be_taken_back_into_service(model: PreparedModel) -> None:
    with router(again_after_s=10.0) as one, running(model, ApiConfig(routers=(one.url,))) as instance:
        one.hears(lambda told: told.state == "ready")
        assert httpx.post(f"{instance.url}/drain", verify=NO_CERTIFICATES).status_code == 200
        one.hears(lambda told: told.state == "draining")  # at once, however long it would have been silent
        assert plain(instance.url, max_tokens=1).status_code == 503
        assert httpx.post(f"{instance.url}/undrain", verify=NO_CERTIFICATES).json() == {"status": "ok"}
        one.hears(lambda told: told.state == "ready")
        assert plain(instance.url, max_tokens=1).status_code == 200
        assert httpx.get(f"{instance.url}/health", verify=NO_CERTIFICATES).status_code == 200


def test_only_who_may_drain_may_undo_it(model: PreparedModel) -> None:
    key = "ab" * 32
    with running(model, ApiConfig(cluster_key=key)) as instance:
        for path in ("/drain", "/undrain"):
            assert httpx.post(instance.url + path, verify=NO_CERTIFICATES).status_code == 403
            right = {SIGNATURE_HEADER: sign_request(key, "POST", path, b"", SystemClock().wall_s())}
            assert httpx.post(instance.url + path, headers=right, verify=NO_CERTIFICATES).status_code == 200


def test_only_who_holds_the_clusters_key_may_drain_an_instance_that_has_one(model: PreparedModel) -> None:
    key, now_s = "ab" * 32, SystemClock().wall_s()
    with running(model, ApiConfig(cluster_key=key)) as instance:
        wrong = [
            {},
            {SIGNATURE_HEADER: sign_request("cd" * 32, "POST", "/drain", b"", now_s)},
            {SIGNATURE_HEADER: sign_request(key, "POST", "/internal/find", b"", now_s)},
            {SIGNATURE_HEADER: sign_request(key, "POST", "/drain", b"", now_s - 100)},
        ]
        for headers in wrong:
            refused = httpx.post(f"{instance.url}/drain", headers=headers, verify=NO_CERTIFICATES)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        assert plain(instance.url, max_tokens=1).status_code == 200
        right = {SIGNATURE_HEADER: sign_request(key, "POST", "/drain", b"", now_s)}
        assert httpx.post(f"{instance.url}/drain", headers=right, verify=NO_CERTIFICATES).status_code == 200
        assert plain(instance.url, max_tokens=1).status_code == 503


def probed(instance: Instance) -> Registration:
    question = msgspec.msgpack.encode(RegistrationReply("r", 1.0))
    response = httpx.post(
        instance.url + PROBE_PATH,
        content=question,
        headers=MSGPACK_BODY,
        verify=NO_CERTIFICATES,
    )
    assert response.status_code == 200, response.text
    return msgspec.msgpack.decode(response.content, type=Registration)


def test_whichever_process_is_asked_all_of_them_drain(model: PreparedModel) -> None:
    with running(model, num_api=2) as instance, ThreadPoolExecutor(8) as threads:
        assert httpx.post(f"{instance.url}/drain", verify=NO_CERTIFICATES).status_code == 200
        answers: list[int] = []
        for _ in range(100):  # the word has a short way to the other process
            answers = list(threads.map(lambda _: plain(instance.url, max_tokens=1).status_code, range(16)))
            if set(answers) == {503}:
                return
        raise AssertionError(f"one of them still takes requests: {answers}")


def test_streams_that_no_other_instance_can_take_have_the_grace_of_a_stop(model: PreparedModel) -> None:
    with (
        router(num_others=0) as one,
        running(model, ApiConfig(routers=(one.url,))) as instance,
        ThreadPoolExecutor(3) as threads,
    ):
        asked, whole = begin(instance, threads)
        one.hears(lambda _: live_streams(instance)["can_move"] is False)
        instance.stop(grace_s=20.0)
        one.hears(lambda told: told.state == "leaving")
        instance.engine.choose, instance.engine.paused = hashed_token, False
        assert read(asked[0].result(20), {"stream": True}).texts == [whole]
        for routed in asked[1:]:
            assert b"event: error" not in routed.result(20).content


def test_streams_that_outlast_the_grace_go_back_to_their_router(model: PreparedModel) -> None:
    with (
        router(num_others=0) as one,
        running(model, ApiConfig(routers=(one.url,))) as instance,
        ThreadPoolExecutor(3) as threads,
    ):
        asked, _ = begin(instance, threads)
        one.hears(lambda _: live_streams(instance)["can_move"] is False)
        instance.stop(grace_s=0.1)
        for routed in asked[1:]:
            assert error_in(routed.result(20))["code"] == "draining"
        asked[0].result(20)


def test_a_stop_drains_first(model: PreparedModel) -> None:
    with running(model) as instance, ThreadPoolExecutor(3) as threads:
        asked, whole = begin(instance, threads)
        instance.stop(grace_s=20.0)
        for one in asked[1:]:
            assert error_in(one.result(20))["code"] == "draining"
        instance.engine.choose, instance.engine.paused = hashed_token, False
        assert read(asked[0].result(20), {"stream": True}).texts == [whole]
