"""ASGI middleware inside RequestIdMiddleware that limits each caller's use of this process's time to a rate
(`caller_pacer`).

The connection of a request that has to wait is not read meanwhile, so the client's kernel holds the data that it sends.
Callers are distinguished by API key. Without keys there is one caller, and no other to protect.
"""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onward.clock import Clock
from onward.errors import RateLimited
from onward.obs.metrics import Counter, Registry
from onward.proto.engine import ErrorInfo
from onward.web import asgi
from onward.web.auth.authenticator import get_caller
from onward.web.auth.cross_site import FILES_PATH
from onward.web.caller_pacer import (
    BODY_BYTE_RATE,
    MAX_PACED_REQUESTS,
    REFUSAL_RATE,
    UNPACED_BODY_BYTES,
    BodyMemoryLimit,
    CallerPacer,
    RefusalPacer,
)

TOO_MANY_PACED = ErrorInfo(
    RateLimited.code,
    f"{MAX_PACED_REQUESTS} requests of this caller wait already, since too many were refused; try again later",
    429,
    True,
    retry_after_s=REFUSAL_RATE.max_wait_s,
)


class PacingMiddleware:
    def __init__(self, app: ASGIApp, clock: Clock, registry: Registry) -> None:
        self._app, self._clock = app, clock
        self._refusals = RefusalPacer()
        self._body_pacer = BodyPacer(clock)
        self._waits: Counter = registry.counter(
            "onward_paced_requests_total",
            "Requests of callers that were refused too often: delayed and then processed, or refused",
            ["end"],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = get_caller(scope).name if scope["type"] == "http" else ""
        if not caller:
            await self._app(scope, receive, send)
            return
        if self._refusals.is_full(caller, self._clock.now_s()):
            self._waits.inc("refused")
            await asgi.respond_error(send, TOO_MANY_PACED)
            return
        has_waited, is_refused = await self._wait(caller), False

        def send_and_watch(message: Message) -> "asyncio.Future[None]":
            nonlocal is_refused
            is_refused = is_refused or message.get(asgi.ERROR_CODE) == RateLimited.code
            return send(message)  # pyright: ignore[reportReturnType]

        # The bytes of an upload go to disk as they arrive.
        is_upload = scope["method"] == "POST" and scope["path"] == FILES_PATH
        body = self._body_pacer.wrap(caller, receive, is_held=not is_upload)
        try:
            await self._app(scope, body.receive, send_and_watch)
        finally:
            body.release()
            self._refusals.finish_request(caller, self._clock.now_s(), has_waited=has_waited, is_refused=is_refused)

    async def _wait(self, caller: str) -> bool:
        wait_s = self._refusals.start_wait(caller, self._clock.now_s())
        if not wait_s:
            return False
        self._waits.inc("served")
        try:
            await asyncio.sleep(wait_s)
        finally:
            self._refusals.end_wait(caller)
        return True


class BodyPacer:
    """Paces all bodies that are being received."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.rates = CallerPacer(BODY_BYTE_RATE)
        self.held = BodyMemoryLimit()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}

    def wrap(self, caller: str, receive: Receive, *, is_held: bool) -> "PacedBody":
        return PacedBody(self, caller, receive, is_held=is_held)

    async def wait_released(self, caller: str) -> None:
        """Returns when a body of this caller is no longer held."""
        released: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, []).append(released)
        await released

    def release(self, caller: str, body: object) -> None:
        self.held.release(caller, body)
        for waiter in self._waiting.pop(caller, []):
            if not waiter.done():
                waiter.set_result(None)


class PacedBody:
    """The body of one request as the application receives it. While a part has to wait, the next one is not read."""

    def __init__(self, pacer: BodyPacer, caller: str, receive: Receive, *, is_held: bool) -> None:
        """`is_held`: the application keeps the whole body in memory until it has arrived."""
        self._body_pacer, self._caller, self._receive, self._is_held = pacer, caller, receive, is_held
        self._num_bytes = 0

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] != "http.request":
            return message
        num_bytes, num_before = len(message.get("body", b"")), self._num_bytes
        self._num_bytes += num_bytes
        num_paced = min(num_bytes, self._num_bytes - UNPACED_BODY_BYTES)
        if num_paced > 0:
            await self._pace(num_paced)
        if num_before > UNPACED_BODY_BYTES and not message.get("more_body", False):
            self.release()
        return message

    async def _pace(self, num_bytes: int) -> None:
        pacer, caller = self._body_pacer, self._caller
        while self._is_held and not pacer.held.try_reserve(caller, self, num_bytes):
            await pacer.wait_released(caller)
        pacer.rates.charge(caller, num_bytes, pacer.clock.now_s())
        if wait_s := pacer.rates.wait_s(caller, pacer.clock.now_s()):
            await asyncio.sleep(wait_s)

    def release(self) -> None:
        if self._is_held and self._num_bytes > UNPACED_BODY_BYTES:
            self._body_pacer.release(self._caller, self)
