"""The access log: one line for each HTTP request, when its response has ended, whatever became of it."""

import asyncio
import logging

import pytest
from starlette.types import Receive, Scope, Send

from onward import log
from onward.obs.metrics import Registry
from onward.proto.engine import ErrorInfo
from onward.web import asgi
from onward.web.access_log import AccessLog, AccessRecord, access_record
from onward.web.request_id_middleware import RequestIdMiddleware, bypass_middleware_for_body
from tests.web.exchange import exchanged, request_scope

NOT_YOU = ErrorInfo("not_you", "no", 401)


class SteppingClock:
    """A second passes each time that it is read."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        self._now_s += 1.0
        return self._now_s

    def wall_s(self) -> float:
        return self._now_s


async def answer(scope: Scope, _: Receive, send: Send) -> None:
    match scope["path"]:
        case "/fault":
            raise ZeroDivisionError
        case "/silent":
            return
        case "/health":
            await asgi.respond(send, 503, b"")
        case "/stream":
            send = bypass_middleware_for_body(scope, send)
            access_record(scope).output_tokens = 3
            await send(asgi.start_message(200, {}))
            for _ in range(3):
                await send(asgi.body_message(b"x"))
                logging.getLogger("onward.test").info(log.event("an event of the stream"))
            await send(asgi.body_message(b"", more_body=False))
        case _:
            await asgi.respond(send, 200, b"")


def refusal(scope: Scope) -> ErrorInfo | None:
    return NOT_YOU if asgi.header(scope, b"stranger") else None


def events(
    caplog: pytest.LogCaptureFixture, path: str, level: int = logging.INFO, **headers: str
) -> list[log.LogEvent]:
    counter = Registry().counter("requests_total", "", ["path", "status"])
    app = RequestIdMiddleware(answer, counter, [], refusal, access_log=AccessLog(SteppingClock()))
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    with caplog.at_level(level):
        asyncio.run(exchanged(app, request_scope(path, given)))
    found = [record.msg for record in caplog.records if record.name.startswith("onward")]
    assert all(isinstance(event, log.LogEvent) for event in found)
    return found


def test_a_request_has_one_line_with_what_is_known_of_it(caplog: pytest.LogCaptureFixture) -> None:
    [line] = events(caplog, "/v1/models", x_request_id="mine")
    assert line.name == "request"
    assert line.fields == {
        "method": "GET",
        "path": "/v1/models",
        "status": 200,
        "id": "mine",
        "label": "mine",
        "seconds": 1.0,
    }


def test_a_refused_request_has_one_too(caplog: pytest.LogCaptureFixture) -> None:
    [line] = events(caplog, "/v1/models", stranger="yes")
    assert (line.fields["status"], line.fields["error"]) == (401, "not_you")
    [_, wrong] = events(caplog, "/v1/models", x_request_id="a\tb")
    assert (wrong.fields["status"], wrong.fields["label"]) == (400, "a\tb")
    assert r'label="a\tb"' in wrong


def test_a_stream_s_line_comes_after_its_last_event(caplog: pytest.LogCaptureFixture) -> None:
    lines = events(caplog, "/stream")
    assert [line.name for line in lines] == ["an event of the stream"] * 3 + ["request"]
    assert lines[-1].fields["output"] == 3


def test_a_request_that_was_not_answered_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    [line] = events(caplog, "/silent")
    assert line.fields["status"] == 499
    with pytest.raises(ZeroDivisionError):
        events(caplog, "/fault")
    assert caplog.records[-1].msg.fields["path"] == "/fault"


def test_probes_are_for_those_that_debug(caplog: pytest.LogCaptureFixture) -> None:
    assert events(caplog, "/health") == []
    assert [line.fields["path"] for line in events(caplog, "/health", logging.DEBUG)] == ["/health"]


@pytest.mark.parametrize(
    ("path", "status", "level"),
    [
        ("/health", 200, logging.DEBUG),
        ("/metrics", 401, logging.INFO),
        ("/internal/register", 200, logging.DEBUG),
        ("/internal/register", 401, logging.INFO),
        ("/internal/attempt", 200, logging.INFO),
        ("/v1/models", 200, logging.INFO),
    ],
)
def test_what_comes_every_second_is_logged_only_if_it_is_refused(path: str, status: int, level: int) -> None:
    assert AccessRecord("GET", path, status=status).level == level


def test_what_a_client_makes_up_is_bounded() -> None:
    line = AccessRecord("M" * 1000, "/" + "x" * 10_000, status=200).event(0.0)
    assert len(line) < 400
