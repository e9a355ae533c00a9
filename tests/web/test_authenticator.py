"""The routes that each key may use."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from onward.clock import SystemClock
from onward.obs.metrics import Registry
from onward.proto.router import SIGNATURE_HEADER
from onward.transport.cluster_signature import sign_request
from onward.web import asgi
from onward.web.auth.allowed_hosts import AllowedHosts
from onward.web.auth.api_key_table import ANONYMOUS, ApiKeyTable, Caller, hash_key, parse_table
from onward.web.auth.authenticator import (
    ActiveKeys,
    Authenticator,
    ConnectionLimitMiddleware,
    GuardedRoute,
    RouteAccess,
    get_caller,
    may_access,
)
from onward.web.auth.cross_site import CrossSiteGuard
from onward.web.request_id_middleware import RequestIdMiddleware
from tests.web.exchange import Client, body_part, exchanged, request_scope

CLUSTER_KEY = "ab" * 32
USER = {"Authorization": "Bearer user-key"}
ADMIN = {"Authorization": "bearer  admin-key "}


def keys_of(**more: str) -> ApiKeyTable:
    fields = "".join(f"{name} = {value}\n" for name, value in more.items())
    text = f'[[key]]\nname = "user"\nhash = "{hash_key("user-key")}"\n{fields}'
    return ApiKeyTable(
        parse_table(text + f'[[key]]\nname = "admin"\nhash = "{hash_key("admin-key")}"\nrole = "admin"\n', "f")
    )


async def who(request: Request) -> Response:
    return Response(get_caller(request.scope).name or "nobody")


def guarded_app(keyring: ActiveKeys, cluster_key: str = "", **more: Any) -> RequestIdMiddleware:
    routes = [GuardedRoute(f"/{access.value}", who, methods=["GET"], access=access) for access in RouteAccess]
    routes.append(GuardedRoute("/admin/{name:path}", who, methods=["GET"], access=RouteAccess.ADMIN))
    callers = Authenticator(keyring, routes, cluster_key, SystemClock(), **more)
    requests = Registry().counter("requests_total", "", ["path", "status"])
    return RequestIdMiddleware(Starlette(routes=routes), requests, [], callers.check)


def ask(app: RequestIdMiddleware, path: str, headers: dict[str, str] | None = None, method: str = "GET") -> Client:
    return asyncio.run(exchanged(app, {**request_scope(path, headers), "method": method}))


def statuses(app: RequestIdMiddleware, headers: dict[str, str], paths: Sequence[str]) -> list[int]:
    return [ask(app, path, headers).status for path in paths]


PATHS = ("/open", "/user", "/admin", "/cluster", "/admin/a/b", "/nothing")


def test_each_route_asks_for_what_it_says() -> None:
    app = guarded_app(ActiveKeys(keys_of()))
    assert statuses(app, {}, PATHS) == [200, 401, 401, 401, 401, 401]
    assert statuses(app, USER, PATHS) == [200, 200, 403, 403, 403, 404]
    assert statuses(app, ADMIN, PATHS) == [200, 200, 200, 200, 200, 404]
    assert ask(app, "/user", USER).body == b"user" and ask(app, "/user", ADMIN).body == b"admin"


def test_a_key_may_come_as_x_api_key_too() -> None:
    app = guarded_app(ActiveKeys(keys_of()))
    assert statuses(app, {"x-api-key": "user-key"}, PATHS) == [200, 200, 403, 403, 403, 404]
    assert statuses(app, {"x-api-key": "user-kez"}, PATHS) == [200, 401, 401, 401, 401, 401]
    both = {"x-api-key": "admin-key", **USER}
    assert ask(app, "/user", both).body == b"user", "a bearer token counts first"


@pytest.mark.parametrize(
    "given", ["", "user-key", "Basic user-key", "Bearer", "Bearer user-kez", "Bearer user-key x", "Bearer \xff"]
)
def test_what_is_no_key_is_told_to_bring_one(given: str) -> None:
    answer = ask(guarded_app(ActiveKeys(keys_of())), "/user", {"Authorization": given})
    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
    error = msgspec.json.decode(answer.body)["error"]
    assert error["code"] == "invalid_api_key" and "user-ke" not in str(error)


def test_a_method_that_a_route_does_not_have_is_no_way_around_it() -> None:
    app = guarded_app(ActiveKeys(keys_of()))
    assert [ask(app, "/admin", headers, "DELETE").status for headers in ({}, USER, ADMIN)] == [401, 403, 405]
    assert ask(app, "/admin", {}, "OPTIONS").status == 401
    assert ask(guarded_app(ActiveKeys(keys_of()), answers_preflights=True), "/admin", {}, "OPTIONS").status == 405


def test_a_proof_of_the_clusters_key_is_as_good_as_an_admins() -> None:
    app = guarded_app(ActiveKeys(keys_of()), CLUSTER_KEY)
    now_s = SystemClock().wall_s()
    proven = {SIGNATURE_HEADER: sign_request(CLUSTER_KEY, "GET", "/admin", b"", now_s)}
    assert ask(app, "/admin", proven).body == b"cluster"
    for proof in (
        sign_request("cd" * 32, "GET", "/admin", b"", now_s),
        sign_request(CLUSTER_KEY, "GET", "/user", b"", now_s),
        "x",
    ):
        assert ask(app, "/admin", {SIGNATURE_HEADER: proof}).status == 401
    assert [ask(app, "/admin", proven, method).status for method in ("POST", "DELETE", "HEAD")] == [401] * 3
    assert ask(guarded_app(ActiveKeys(keys_of())), "/admin", proven).status == 401, "there is no such key"
    assert ask(app, "/cluster", {}).status == 200, "the endpoint looks at what was said, and so at the proof"


def test_without_keys_everybody_is_the_anonymous_admin() -> None:
    app = guarded_app(ActiveKeys(ApiKeyTable()))
    assert statuses(app, {}, PATHS) == [200, 200, 200, 200, 200, 404]
    assert (
        may_access(ANONYMOUS, "somebody")
        and not may_access(Caller("a", "user"), "")
        and may_access(Caller("a", "user"), "a")
    )


GUARD = CrossSiteGuard(AllowedHosts.for_server("127.0.0.1", ()), ())
PAGE = {"Host": "attacker.example", "Origin": "http://attacker.example"}


def test_pages_are_refused_where_there_are_no_keys_and_nobody_else_is_anywhere() -> None:
    assert statuses(guarded_app(ActiveKeys(ApiKeyTable()), cross_site_guard=GUARD), PAGE, PATHS) == [403] * len(PATHS)
    behind_a_proxy = guarded_app(ActiveKeys(keys_of()), cross_site_guard=GUARD)
    assert statuses(behind_a_proxy, PAGE | USER, PATHS) == [200, 200, 403, 403, 403, 404]
    assert statuses(behind_a_proxy, PAGE | ADMIN, PATHS) == [200, 200, 200, 200, 200, 404]


def test_a_router_that_proves_itself_may_call_a_server_without_keys_by_any_name() -> None:
    app = guarded_app(ActiveKeys(ApiKeyTable()), CLUSTER_KEY, cross_site_guard=GUARD)
    name = {"Host": "gpu-7.internal:8000"}
    proof = sign_request(CLUSTER_KEY, "GET", "/user", b"", SystemClock().wall_s())
    assert ask(app, "/user", name | {SIGNATURE_HEADER: proof}).status == 200
    assert ask(app, "/cluster", name).status == 200, "the endpoint looks at the proof"
    assert [ask(app, "/user", name | more).status for more in ({}, {SIGNATURE_HEADER: "x"}, USER)] == [403] * 3


def test_keys_that_are_read_again_count_at_once() -> None:
    keyring = ActiveKeys(keys_of())
    app = guarded_app(keyring)
    assert ask(app, "/user", USER).status == 200
    keyring.keys = ApiKeyTable(keys_of().entries[1:])
    assert (ask(app, "/user", USER).status, ask(app, "/user", ADMIN).status) == (401, 200)


def test_a_route_that_does_not_say_whom_it_is_for_cannot_be_built_in() -> None:
    with pytest.raises(TypeError, match="/forgotten"):
        Authenticator(ActiveKeys(ApiKeyTable()), [Route("/forgotten", who)], "", SystemClock())


def test_a_caller_has_no_more_exchanges_open_than_its_key_says() -> None:
    async def scenario() -> None:
        gate = asyncio.Event()

        async def wait(scope: Scope, receive: Receive, send: Send) -> None:
            await gate.wait()
            await asgi.respond(send, 200, b"")

        routes = [GuardedRoute("/user", who, methods=["GET"], access=RouteAccess.USER)]
        callers = Authenticator(ActiveKeys(keys_of(max_connections="2")), routes, "", SystemClock())
        requests = Registry().counter("requests_total", "", ["path", "status"])
        app = RequestIdMiddleware(ConnectionLimitMiddleware(wait), requests, [], callers.check)

        def begin(headers: dict[str, str]) -> "tuple[asyncio.Task[None], Client]":
            client = Client([body_part(b"")])
            return asyncio.create_task(app(request_scope("/user", headers), client.receive, client.send)), client

        begun = [begin(headers) for headers in (USER, USER, USER, ADMIN, ADMIN, ADMIN)]
        await asyncio.sleep(0)
        await asyncio.wait_for(begun[2][0], 5)
        assert (begun[2][1].status, begun[2][1].headers["retry-after"]) == (429, "1")
        gate.set()
        await asyncio.gather(*(task for task, _ in begun))
        assert [client.status for _, client in begun] == [200, 200, 429, 200, 200, 200]
        task, client = begin(USER)
        await task
        assert client.status == 200, "those that have left make room"

    asyncio.run(scenario())
