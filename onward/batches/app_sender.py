"""Sends the requests of a batch to this process's own application, without HTTP and without a key."""

import asyncio
import logging

import msgspec
from starlette.types import ASGIApp, Message, Scope

from onward import log
from onward.batches import batch_runner
from onward.batches.batch_files import BatchError, BatchRequest, BatchResponse
from onward.batches.batch_policy import with_seed
from onward.batches.batch_runner import TOO_LARGE, Outcome, Send, body_of_answer, wait_of_header
from onward.web.auth.api_key_table import Caller
from onward.web.auth.authenticator import set_caller

REQUEST_TIMEOUT_S = 3600.0

_logger = logging.getLogger(__name__)


def app_sender(app: ASGIApp, caller: Caller, batch_seed: int, places: asyncio.Semaphore) -> Send:
    """Returns a sender of requests of this caller. `places` limits the requests of all batches."""

    async def send(request: BatchRequest, _: int) -> Outcome:
        async with places:
            exchange = _Exchange(msgspec.json.encode(with_seed(request, batch_seed).body))
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    await app(_scope(request.url, caller), exchange.receive, exchange.send)
            except TimeoutError:
                return Outcome(BatchError("timeout", f"there was no answer within {REQUEST_TIMEOUT_S:g} s"))
            except Exception:  # Starlette raises a fault again after it has answered with a 500
                _logger.exception(log.event("a request of a batch failed because of an internal error"))
            return exchange.outcome()

    return send


def _scope(path: str, caller: Caller) -> Scope:
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
    set_caller(scope, caller)
    return scope


class _Exchange:
    """`receive` and `send` of one request. Its client stays connected; a cancelled batch cancels the application."""

    def __init__(self, body: bytes) -> None:
        self._pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._parts: list[bytes] = []
        self._num_bytes = 0

    async def receive(self) -> Message:
        if self._pending:
            return self._pending.pop()
        await asyncio.get_running_loop().create_future()  # ends when the task that waits is cancelled
        raise AssertionError("nothing completes this future")

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], dict(message["headers"])
        elif message["type"] == "http.response.body":
            body = message.get("body", b"")
            self._num_bytes += len(body)
            if self._num_bytes <= batch_runner.MAX_ANSWER_BYTES:
                self._parts.append(body)

    def outcome(self) -> Outcome:
        if self._num_bytes > batch_runner.MAX_ANSWER_BYTES:
            return Outcome(BatchError(TOO_LARGE, f"the answer is larger than {batch_runner.MAX_ANSWER_BYTES} bytes"))
        if not self._status:
            return Outcome(BatchError("no_answer", "the request ended without an answer"))
        request_id = self._headers.get(b"x-request-id", b"").decode("latin-1")
        answer = BatchResponse(self._status, request_id, body_of_answer(b"".join(self._parts)))
        return Outcome(answer, wait_of_header(self._headers.get(b"retry-after", b"0").decode("latin-1")))
