import asyncio
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from onward.errors import InvalidRequest, Overloaded
from onward.proto.engine import ErrorInfo
from onward.web.asgi import ClientDisconnected
from onward.web.error_format import RequestFailed
from onward.web.error_handlers import EXCEPTION_HANDLERS, handle_errors
from tests.web.exchange import Client, exchanged, request_scope

ANSWERS: list[tuple[Exception, int, dict[str, Any]]] = [
    (InvalidRequest("n: too many", param="n"), 400, {"type": "invalid_request_error", "param": "n"}),
    (Overloaded("full", retry_after_s=1.2), 429, {"type": "rate_limit_error", "retryable": True}),
    (RequestFailed(ErrorInfo("lost", "it is lost", 503)), 503, {"type": "server_error", "code": "lost"}),
    (KeyError("secret"), 500, {"type": "server_error", "code": "internal_error", "message": "internal error"}),
]


def plainly(raised: Exception) -> Client:
    async def work() -> None:
        raise raised

    async def app(_: Scope, __: Receive, send: Send) -> None:
        await handle_errors({}, send, work())

    return asyncio.run(exchanged(app, request_scope()))


def by_starlette(raised: Exception) -> Client:
    async def endpoint(_: Request) -> Response:
        raise raised

    app = Starlette(routes=[Route("/", endpoint)], exception_handlers=EXCEPTION_HANDLERS)

    async def scenario() -> Client:
        client = Client()
        try:
            await app(request_scope("/"), client.receive, client.send)
        except KeyError:
            assert client.heard, "the fault goes on to the server's log when it has been answered"
        return client

    return asyncio.run(scenario())


@pytest.mark.parametrize("way", [plainly, by_starlette])
@pytest.mark.parametrize(("raised", "status", "fields"), ANSWERS, ids=[type(one[0]).__name__ for one in ANSWERS])
def test_what_is_raised_becomes_an_answer_in_one_form(
    way: Any, raised: Exception, status: int, fields: dict[str, Any]
) -> None:
    answer = way(raised)
    assert answer.status == status
    assert fields.items() <= msgspec.json.decode(answer.body)["error"].items()
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers.get("retry-after") == ("2" if status == 429 else None)


def test_a_client_that_has_gone_gets_no_answer() -> None:
    assert plainly(ClientDisconnected()).heard == []


@pytest.mark.parametrize(("path", "status", "code"), [("/x", 404, "not_found"), ("/", 405, "method_not_allowed")])
def test_a_missing_route_and_a_wrong_method_are_told_in_the_same_form(path: str, status: int, code: str) -> None:
    app = Starlette(routes=[Route("/", Response(), methods=["POST"])], exception_handlers=EXCEPTION_HANDLERS)
    answer = asyncio.run(exchanged(app, request_scope(path)))
    assert (answer.status, msgspec.json.decode(answer.body)["error"]["code"]) == (status, code)
