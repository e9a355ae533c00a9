import asyncio
import re

import msgspec
import pytest
from starlette.types import Receive, Scope, Send

from onward.obs.metrics import Registry
from onward.proto.engine import ErrorInfo
from onward.web import asgi
from onward.web.request_id_middleware import RequestIdMiddleware, client_request_id, set_response_request_id
from tests.web.exchange import Client, exchanged, request_scope

NOT_YOU = ErrorInfo("not_you", "no", 401)
AN_ID = re.compile("[0-9a-f]{32}")


async def echo_label(scope: Scope, _: Receive, send: Send) -> None:
    if shown := asgi.header(scope, b"show"):
        set_response_request_id(scope, shown)
    await asgi.respond(send, 200, client_request_id(scope).encode())


def refusal(scope: Scope) -> ErrorInfo | None:
    return NOT_YOU if asgi.header(scope, b"stranger") else None


class Wrapped:
    def __init__(self) -> None:
        self.requests = Registry().counter("requests_total", "", ["path", "status"])
        self._app = RequestIdMiddleware(echo_label, self.requests, ["/known"], refusal)

    def ask(self, path: str = "/known", **headers: str) -> Client:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return asyncio.run(exchanged(self._app, request_scope(path, given)))


def test_a_label_is_echoed_and_an_id_is_given_without_one() -> None:
    wrapped = Wrapped()
    labelled = wrapped.ask(x_request_id="my label")
    assert (labelled.body, labelled.headers["x-request-id"]) == (b"my label", "my label")
    ids = {wrapped.ask().headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2 and all(AN_ID.fullmatch(one) for one in ids)


@pytest.mark.parametrize("label", ["", "x" * 257, "caf\xe9", "a\tb"])
@pytest.mark.parametrize("stranger", ["", "yes"])
def test_a_wrong_label_is_refused_and_never_echoed(label: str, stranger: str) -> None:
    answer = Wrapped().ask(x_request_id=label, stranger=stranger)
    assert answer.status == (401 if stranger else 400)
    assert stranger or msgspec.json.decode(answer.body)["error"]["param"] == "X-Request-Id"
    assert AN_ID.fullmatch(answer.headers["x-request-id"])


@pytest.mark.parametrize("label", ["x", "x" * 256])
def test_labels_at_the_bounds_are_taken(label: str) -> None:
    assert Wrapped().ask(x_request_id=label).headers["x-request-id"] == label


def test_what_an_endpoint_wants_shown_is_shown() -> None:
    assert Wrapped().ask(show="this").headers["x-request-id"] == "this"


def test_a_stranger_hears_why_with_the_label_of_the_request() -> None:
    answer = Wrapped().ask(stranger="yes", x_request_id="mine")
    assert (answer.status, answer.headers["x-request-id"]) == (401, "mine")
    assert msgspec.json.decode(answer.body)["error"]["code"] == "not_you"


def test_every_answer_is_counted_under_a_path_that_is_known() -> None:
    wrapped = Wrapped()
    wrapped.ask()
    wrapped.ask("/anything")
    wrapped.ask("/something", stranger="yes")
    counted = [("/known", "200"), ("other", "200"), ("other", "401")]
    assert [wrapped.requests.value(*labels) for labels in counted] == [1, 1, 1]
