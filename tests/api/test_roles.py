"""The routes of an instance that each role may use, and the streams that it sees there; over real sockets."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from onward.api.process import ApiProcess, Runtime
from onward.api.requests.text_processor import TextProcessor
from onward.clock import SystemClock
from onward.config import ApiConfig
from onward.proto.control import StartApi, UpdateApiKeys
from onward.proto.cursor import format_cursor, parse_cursor
from onward.proto.engine import CallerLimits, ErrorInfo
from onward.proto.model import PreparedModel
from onward.proto.router import ABORT_PATH, SIGNATURE_HEADER
from onward.random_source import SystemRandomSource
from onward.text.prompt_tokenizer import read_tokenizer_files
from onward.transport.cluster_signature import sign_request
from onward.web.auth.api_key_table import ANONYMOUS
from onward.web.auth.authenticator import RouteAccess, check_routes
from onward.web.auth.owned_request_ids import make_owned_id
from onward.web.request_id_middleware import RequestIdMiddleware
from onward.web.ui import static_files
from onward.web.ui.live_feed import LIVE_PATH, SNAPSHOT_PATH
from onward.web.ui.ui_routes import SESSION_PATH
from tests.api.instance import PATIENCE_S, Instance, running
from tests.api.reader import NO_CERTIFICATES
from tests.web import route_access
from tests.web.exchange import exchanged, request_scope

CLUSTER_KEY = "ab" * 32
ACCESS = {
    **dict.fromkeys(static_files.PATHS, RouteAccess.OPEN),
    SESSION_PATH: RouteAccess.USER,
    LIVE_PATH: RouteAccess.ADMIN,
    SNAPSHOT_PATH: RouteAccess.ADMIN,
    "/v1/chat/completions": RouteAccess.USER,
    "/v1/completions": RouteAccess.USER,
    "/v1/generate": RouteAccess.USER,
    "/v1/embeddings": RouteAccess.USER,
    "/v1/rerank": RouteAccess.USER,
    "/v1/score": RouteAccess.USER,
    "/pooling": RouteAccess.USER,
    "/v2/rerank": RouteAccess.USER,
    "/rerank": RouteAccess.USER,
    "/score": RouteAccess.USER,
    "/tokenizer_info": RouteAccess.USER,
    "/v1/responses": RouteAccess.USER,
    "/v1/responses/input_tokens": RouteAccess.USER,
    "/v1/responses/compact": RouteAccess.USER,
    "/v1/responses/{response_id}": RouteAccess.USER,
    "/v1/responses/{response_id}/cancel": RouteAccess.USER,
    "/v1/responses/{response_id}/input_items": RouteAccess.USER,
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
    "/v1/models": RouteAccess.USER,
    "/v1/models/{model:path}": RouteAccess.USER,
    "/health": RouteAccess.OPEN,
    "/version": RouteAccess.USER,
    "/openapi.json": RouteAccess.USER,
    "/live": RouteAccess.OPEN,
    "/docs": RouteAccess.OPEN,
    "/": RouteAccess.OPEN,
    "/metrics": RouteAccess.ADMIN,
    "/info": RouteAccess.ADMIN,
    "/drain": RouteAccess.ADMIN,
    "/undrain": RouteAccess.ADMIN,
    "/internal/attempt": RouteAccess.CLUSTER,
    "/internal/close": RouteAccess.CLUSTER,
    "/internal/find": RouteAccess.CLUSTER,
    "/internal/probe": RouteAccess.CLUSTER,
    "/internal/text": RouteAccess.CLUSTER,
    "/internal/abort": RouteAccess.CLUSTER,
    "/internal/tokenize": RouteAccess.CLUSTER,
    "/internal/detokenize": RouteAccess.CLUSTER,
    "/internal/tokenizer_info": RouteAccess.CLUSTER,
    "/internal/count_tokens": RouteAccess.CLUSTER,
    "/internal/input_tokens": RouteAccess.CLUSTER,
    "/internal/embeddings": RouteAccess.CLUSTER,
    "/internal/response": RouteAccess.CLUSTER,
}
FIELDS: dict[str, Any] = {"model": "small-model", "prompt": [97, 98, 99], "max_tokens": 8, "seed": 7}


@contextlib.contextmanager
def keyed(model: PreparedModel, num_api: int = 1, **config: Any) -> Iterator[Instance]:
    """The keys come as they do when the file is read again."""
    with running(model, ApiConfig(**config), num_api) as instance:
        give_keys(instance, route_access.entries())
        until(lambda: {get(instance, "/version").status_code for _ in range(4 * num_api)} == {401})
        yield instance


def give_keys(instance: Instance, keys: list[Any]) -> None:
    instance._tell_all(UpdateApiKeys(keys))


def until(condition: Any) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.02)


def get(instance: Instance, path: str, name: str | None = None, **headers: str) -> httpx.Response:
    return httpx.get(
        instance.url + path, headers=route_access.header(name) | headers, timeout=30, verify=NO_CERTIFICATES
    )


def post(instance: Instance, path: str, body: Any, name: str | None = None, **headers: str) -> httpx.Response:
    url = instance.url + path
    return httpx.post(url, json=body, headers=route_access.header(name) | headers, timeout=30, verify=NO_CERTIFICATES)


class SilentSupervisor:
    def send(self, message: object) -> bool:
        return True

    def receive(self) -> None:
        return None


async def app_of(model: PreparedModel, threads: ThreadPoolExecutor) -> Starlette:
    """The application as an api process builds it, without its envelope."""

    def never(*_: object) -> Any:
        raise AssertionError("nobody is there")

    rim = Runtime(
        clock=SystemClock(),
        random=SystemRandomSource(),
        connect_engine=never,
        connect_stream_store=never,
        new_session=aiohttp.ClientSession,
        new_executor=lambda *_: threads,
        stop_server=never,
        exit_now=never,
    )
    start = StartApi("api", 1, ApiConfig(), model, -1)
    api = ApiProcess(start, SilentSupervisor(), TextProcessor(read_tokenizer_files(model)), rim)
    try:
        assert isinstance(api.app, RequestIdMiddleware) and isinstance(api.app.app, Starlette)
        return api.app.app
    finally:
        await api.close()


def test_a_browser_is_shown_why_it_is_refused(model: PreparedModel) -> None:
    origin = "https://example.org"
    with keyed(model, cors_origin=(origin,)) as instance:
        for path in ("/v1/models", "/info", "/nowhere"):
            for name in (None, "user"):
                answer = get(instance, path, name, origin=origin)
                assert answer.headers["access-control-allow-origin"] == origin, (path, name, answer.status_code)
                assert answer.status_code == (401 if name is None else {"/v1/models": 200, "/info": 403}.get(path, 404))


def test_every_route_and_method_is_closed_as_the_table_says(model: PreparedModel) -> None:
    with ThreadPoolExecutor(1) as threads:
        routes = check_routes(asyncio.run(app_of(model, threads)).routes)
    assert {route.path: route.access for route in routes} == ACCESS, "a new route belongs into the table"
    with keyed(model) as instance, httpx.Client(timeout=30, verify=NO_CERTIFICATES) as client:

        def ask(question: route_access.Question) -> int:
            url = instance.url + question.path
            # Not read to its end: the live view has none.
            with client.stream(question.method, url, headers=route_access.header(question.name)) as response:
                return response.status_code

        assert route_access.wrong_answers(route_access.questions(routes, last=("/drain",)), ask) == []


def test_health_tells_a_probe_its_status_and_a_caller_with_a_key_the_reason(model: PreparedModel) -> None:
    with keyed(model) as instance:
        assert get(instance, "/health").json() == {"status": "ok"}
        instance.worker_ready = False
        for wrong in ({}, {"Authorization": "Bearer ow-wrong"}):
            answer = get(instance, "/health", **wrong)
            assert (answer.status_code, answer.json()) == (503, {"status": "unavailable"})
        answer = get(instance, "/health", "user")
        assert (answer.status_code, answer.json()["reason"]) == (503, "the engine has no worker")


def test_no_path_is_redirected_to_the_host_that_a_client_names(model: PreparedModel) -> None:
    with ThreadPoolExecutor(1) as threads:
        app = asyncio.run(app_of(model, threads))
    for path in (path for path in ACCESS if "{" not in path):
        scope = request_scope(path + "/", {"Host": "elsewhere.example"})
        scope.update({"server": ("127.0.0.1", 8000), "onward.caller": ANONYMOUS})
        answer = asyncio.run(exchanged(app, scope))
        assert (answer.status, "location" in answer.headers) == (404, False), path


def test_with_a_clusters_key_what_is_between_router_and_instance_wants_its_proof(model: PreparedModel) -> None:
    with keyed(model, cluster_key=CLUSTER_KEY, open_metrics=True) as instance:
        for path in (path for path, access in ACCESS.items() if access is RouteAccess.CLUSTER):
            assert [post(instance, path, {}, name).status_code for name in (None, "user", "admin")] == [403] * 3
        body = b'{"ids":["x"],"caller":"user"}'
        headers = {SIGNATURE_HEADER: sign_request(CLUSTER_KEY, "POST", ABORT_PATH, body, time.time())}
        answer = httpx.post(instance.url + ABORT_PATH, content=body, headers=headers, verify=NO_CERTIFICATES)
        assert answer.json() == {"aborted": [], "idle": {}}
        for path, status in (("/v1/models", 200), ("/info", 200), ("/version", 200)):
            proof = sign_request(CLUSTER_KEY, "GET", path, b"", time.time())
            assert get(instance, path, None, **{SIGNATURE_HEADER: proof}).status_code == status
        assert get(instance, "/metrics").status_code == 200, "it was opened"


def test_keys_that_are_told_anew_count_at_once_in_every_process(model: PreparedModel) -> None:
    with keyed(model, num_api=2) as instance:
        assert get(instance, "/version", "user").status_code == 200
        give_keys(instance, [entry for entry in route_access.entries() if entry.name == "other"])
        until(lambda: {get(instance, "/version", "user").status_code for _ in range(8)} == {401})
        assert {get(instance, "/version", "other").status_code for _ in range(8)} == {200}


@contextlib.contextmanager
def waiting(instance: Instance, *names: str) -> Iterator[list[Any]]:
    """A request of each caller that the engine holds, all with the same label."""
    instance.engine.paused = True
    with ThreadPoolExecutor(len(names)) as threads:
        labelled = {"X-Request-Id": "mine"}
        asked = [threads.submit(post, instance, "/v1/completions", FIELDS, name, **labelled) for name in names]
        try:
            instance.wait_until(lambda: len(instance.engine.running) == len(names))
            yield asked
        finally:
            instance.engine.paused = False


def abort(instance: Instance, name: str, **body: Any) -> Any:
    answer = post(instance, "/v1/abort", body, name)
    return answer.json() if answer.status_code == 200 else answer.status_code


def test_an_abort_reaches_the_callers_own_requests_only(
    model: PreparedModel, capfd: pytest.CaptureFixture[str]
) -> None:
    with keyed(model) as instance, waiting(instance, "user", "other") as asked:
        ids = {one.submit.caller: one.submit.request_id.rpartition("-")[0] for one in instance.engine.running.values()}
        assert ids.keys() == {"user", "other"}
        theirs = f"cmpl-{ids['other']}"
        assert abort(instance, "user", ids=[theirs]) == {"aborted": [], "unknown": [theirs]}
        assert abort(instance, "user", all=True) == 403
        assert len(instance.engine.running) == 2
        assert abort(instance, "user", ids=["mine"]) == {"aborted": ["mine"], "unknown": []}
        assert asked[0].result(20).json()["choices"][0]["finish_reason"] == "abort"
        assert [one.submit.caller for one in instance.engine.running.values()] == ["other"]
        assert abort(instance, "admin", ids=["mine"]) == {"aborted": ["mine"], "unknown": []}
        assert asked[1].result(20).json()["choices"][0]["finish_reason"] == "abort"
        assert abort(instance, "admin", all=True) == {"aborted": [], "unknown": []}
    told = [line.partition("audit ")[2] for line in capfd.readouterr().err.splitlines() if "audit " in line]
    assert told == ["caller=admin action=abort targets=1", "caller=admin action=abort_all targets=0"]


def test_a_label_is_taken_among_the_callers_own_requests_only(model: PreparedModel) -> None:
    with keyed(model) as instance, waiting(instance, "user", "other") as asked:
        again = post(instance, "/v1/completions", FIELDS, "user", **{"X-Request-Id": "mine"})
        assert (again.status_code, again.json()["error"]["param"]) == (409, "X-Request-Id")
        instance.engine.paused = False
        assert [one.result(20).status_code for one in asked] == [200, 200]


def events(text: str) -> list[str]:
    return [line.removeprefix("id: ") for line in text.splitlines() if line.startswith("id: ")]


def tokens(cursors: list[str]) -> list[int]:
    return [one for line in cursors for new in parse_cursor(line).new_tokens.values() for one in new]


def test_a_stream_can_be_gone_on_with_by_its_caller_and_by_admins(model: PreparedModel) -> None:
    with keyed(model, num_api=2) as instance:
        whole = events(post(instance, "/v1/completions", FIELDS | {"stream": True}, "user").text)
        back = {"Last-Event-ID": whole[0]}
        for _ in range(4):
            theirs = get(instance, "/v1/completions", "other", **back)
            assert (theirs.status_code, theirs.json()["error"]["code"]) == (404, "stream_unknown")
        for name in ("user", "admin"):
            rest = get(instance, "/v1/completions", name, **back)
            assert rest.status_code == 200, rest.text
            assert tokens(events(rest.text)) == tokens(whole[1:]), "however many share an event"
        assert {one.caller for one in instance.engine.submits} == {"user"}, "it stays whose it was"


def answers_to(instance: Instance, name: str, place: str) -> list[tuple[int, str]]:
    """Returns status and body of resuming, by GET and by POST."""
    back, body = {"Last-Event-ID": place}, FIELDS | {"stream": True}
    asked = get(instance, "/v1/completions", name, **back), post(instance, "/v1/completions", body, name, **back)
    return [(answer.status_code, answer.text) for answer in asked]


def test_nobody_learns_whether_another_callers_stream_runs_is_kept_was_aborted_or_never_was(
    model: PreparedModel,
) -> None:
    exact = msgspec.structs.replace(model, quantization="int8")
    with keyed(exact, num_api=2) as instance:
        body = FIELDS | {"stream": True, "max_tokens": 30}
        whole = events(post(instance, "/v1/completions", body, "user").text)
        never = parse_cursor(whole[3])
        never = format_cursor(msgspec.structs.replace(never, request_id=make_owned_id("ab" * 16, "user")))
        unknown = answers_to(instance, "other", never)
        assert [status for status, _ in unknown] == [404, 404]
        assert answers_to(instance, "other", whole[3]) == unknown, "what is kept"
        with waiting(instance, "user") as asked:
            [held] = instance.engine.running.values()
            request_id = held.submit.request_id.rpartition("-")[0]
            running_one = format_cursor(msgspec.structs.replace(parse_cursor(whole[3]), request_id=request_id))
            for _ in range(4):
                assert answers_to(instance, "other", running_one) == unknown, "what runs, in either process"
            assert abort(instance, "other", ids=[request_id]) == {"aborted": [], "unknown": [request_id]}
            assert [one.submit.caller for one in instance.engine.running.values()] == ["user"]
            assert abort(instance, "user", ids=[request_id])["aborted"] == [request_id]
            assert asked[0].result(20).json()["choices"][0]["finish_reason"] == "abort"
        assert answers_to(instance, "other", running_one) == unknown, "what was aborted"
        assert {one.caller for one in instance.engine.submits} == {"user"}


def test_limits_and_priority_of_a_key_reach_the_engine(model: PreparedModel) -> None:
    with running(model) as instance:
        limited = {"max_in_flight": 3, "tokens_per_minute": 90, "priority": 5}
        give_keys(
            instance, [msgspec.structs.replace(route_access.entries()[0], **limited), *route_access.entries()[1:]]
        )
        until(lambda: get(instance, "/version").status_code == 401)
        for name, asked in (
            ("user", {}),
            ("user", {"priority": -9}),
            ("user", {"priority": 9}),
            ("admin", {"priority": -9}),
        ):
            assert post(instance, "/v1/completions", FIELDS | asked, name).status_code == 200
        submits = instance.engine.submits
        assert [one.priority for one in submits] == [5, 5, 9, -9]
        assert [one.caller_limits for one in submits] == [CallerLimits(3, 90)] * 3 + [None]


def test_a_caller_that_the_engine_refuses_again_and_again_waits(model: PreparedModel) -> None:
    with keyed(model) as instance, httpx.Client(base_url=instance.url, verify=NO_CERTIFICATES, timeout=30) as client:
        instance.engine.refusal = ErrorInfo("rate_limited", "max_in_flight", 429, True, retry_after_s=1.0)

        def refused(name: str, times: int) -> bool:
            asked = (
                client.post("/v1/completions", json=FIELDS, headers=route_access.header(name)) for _ in range(times)
            )
            return all(one.status_code == 429 for one in asked)

        def has_waited() -> bool:
            return "onward_paced_requests_total{" in get(instance, "/metrics", "admin").text

        assert refused("user", 10) and not has_waited()
        assert any(refused("user", 100) and has_waited() for _ in range(50))


def test_a_drain_is_noted_with_who_wanted_it(model: PreparedModel, capfd: pytest.CaptureFixture[str]) -> None:
    with keyed(model) as instance:
        assert post(instance, "/drain", {}, "user").status_code == 403
        assert "audit" not in capfd.readouterr().err
        assert post(instance, "/drain", {}, "admin").json() == {"status": "draining"}
        assert "audit caller=admin action=drain targets=1" in capfd.readouterr().err
