"""The data of the live view: one snapshot of the server per tick for all viewers together, and none without viewers.

`/ui/live` sends snapshots as server-sent events, `/ui/snapshot` sends one. A slow viewer skips snapshots, and only the
newest one is held for it. The number of viewers is limited, in all and for each caller.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from onward.clock import Clock
from onward.errors import RETRY_SOON_S, OnwardError
from onward.proto.engine import ErrorInfo
from onward.proto.error_info import to_error_info
from onward.web import asgi, sse
from onward.web.auth.authenticator import GuardedRoute, RouteAccess, get_caller
from onward.web.error_format import RequestFailed, error_body
from onward.web.error_handlers import INTERNAL_ERROR, handle_errors
from onward.web.ui.static_files import PAGE_PATH

LIVE_PATH = f"{PAGE_PATH}/live"
SNAPSHOT_PATH = f"{PAGE_PATH}/snapshot"
INTERVAL_S = 1.0
MAX_VIEWERS = 32
MAX_VIEWERS_PER_CALLER = 8
_logger = logging.getLogger(__name__)
_HEADERS = {**sse.HEADERS, "x-content-type-options": "nosniff"}


class LiveFeed:
    def __init__(self, look: Callable[[], Awaitable[bytes]], clock: Clock, interval_s: float = INTERVAL_S) -> None:
        """`look` returns the current snapshot as JSON."""
        self._look, self._clock, self._interval_s = look, clock, interval_s
        self._viewers: Counter[str] = Counter()
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._is_closed = False
        self._latest: tuple[int, bytes] = (0, b"")
        self._looked_at_s = -interval_s
        self._lock = asyncio.Lock()

    @property
    def num_viewers(self) -> int:
        return self._viewers.total()

    def routes(self) -> list[GuardedRoute]:
        """Returns the routes of the stream and of a single snapshot. Both need an admin's key, because they show the
        requests of all callers."""
        return [
            GuardedRoute(LIVE_PATH, LiveEndpoint(self), methods=["GET"], access=RouteAccess.ADMIN),
            GuardedRoute(SNAPSHOT_PATH, self.show_once, methods=["GET"], access=RouteAccess.ADMIN),
        ]

    async def show_once(self, _: Request) -> Response:
        data = (await self._fresh_look())[1]
        return Response(data, media_type="application/json")

    async def stream(self, caller: str, send: Send) -> None:
        """Sends snapshots until the feed is closed. Raises `RequestFailed` while there are too many viewers."""
        self._check_room(caller)
        self._viewers[caller] += 1
        try:
            await send(asgi.start_message(200, _HEADERS))
            if self._task is None:
                self._task = asyncio.create_task(self._run())
            await self._send_events(send)
            await send(asgi.body_message(b"", more_body=False))
        finally:
            self._viewers -= Counter([caller])
            if not self._viewers and self._task is not None:
                self._task.cancel()
                self._task = None

    def close(self) -> None:
        """Ends the streams, so that they do not hold up a shutdown."""
        self._is_closed = True
        self._changed.set()
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _send_events(self, send: Send) -> None:
        seen = 0
        while not self._is_closed:
            number, data = self._latest
            if number > seen and self._clock.now_s() - self._looked_at_s < 2 * self._interval_s:
                seen = number
                await send(asgi.body_message(sse.event(data)))
            else:
                await self._changed.wait()

    async def _run(self) -> None:
        while True:
            await self._fresh_look()
            self._changed.set()
            self._changed = asyncio.Event()
            await asyncio.sleep(self._interval_s)

    async def _fresh_look(self) -> tuple[int, bytes]:
        """Returns the newest snapshot and its number. Takes a new one if the last is about a tick old."""
        async with self._lock:
            if self._clock.now_s() - self._looked_at_s >= 0.8 * self._interval_s:
                try:
                    data = await self._look()
                except OnwardError as error:
                    data = error_body(to_error_info(error))
                except Exception:
                    _logger.exception("a snapshot for the live view failed because of an internal error")
                    data = error_body(INTERNAL_ERROR)
                self._latest, self._looked_at_s = (self._latest[0] + 1, data), self._clock.now_s()
            return self._latest

    def _check_room(self, caller: str) -> None:
        if self.num_viewers >= MAX_VIEWERS:
            raise RequestFailed(_too_many(f"{MAX_VIEWERS} viewers watch this process already"))
        if self._viewers[caller] >= MAX_VIEWERS_PER_CALLER:
            raise RequestFailed(_too_many(f"this caller watches in {MAX_VIEWERS_PER_CALLER} places already"))


class LiveEndpoint:
    """The ASGI application of `GET /ui/live`."""

    def __init__(self, feed: LiveFeed) -> None:
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await handle_errors(scope, send, self._serve(scope, receive, send))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            await asgi.respond(send, 200, b"", _HEADERS)
            return
        await asgi.run_until_disconnect(receive, self._feed.stream(get_caller(scope).name, send))


def _too_many(problem: str) -> ErrorInfo:
    return ErrorInfo(
        "too_many_viewers", f"{problem}; close one, or try again later", 429, True, retry_after_s=RETRY_SOON_S
    )
