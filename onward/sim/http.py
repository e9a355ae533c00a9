"""HTTP between simulated processes: the parts of aiohttp and of an ASGI server that the code under test uses.

A connection delivers everything in order, or it breaks. Chunks are cut anywhere. A dead server refuses connections, and
a stopped one does not answer. If a supervisor holds the socket for a successor, the connection waits.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from typing import Any

import aiohttp
from aiohttp.client_reqrep import ConnectionKey

from onward.proto.router import PROBE_PATH, REGISTER_PATH
from onward.router.upstream_connections import UpstreamConnectError
from onward.sim.process import SimProcess
from onward.sim.wire import SLOW_S, SimContext

App = Callable[..., Any]
PERIODIC_PATHS = (REGISTER_PATH, PROBE_PATH)
HIGH_WATER_BYTES = 4096
"""Unread bytes of a client beyond which its server waits."""


class SimConnectionLost(aiohttp.ClientPayloadError, OSError):
    """The connection was lost. It derives from the errors that clients of either kind expect."""


class SimListener:
    """An address. The processes that serve it come and go."""

    def __init__(self, name: str, *, waits: bool) -> None:
        self.name = name
        self._waits = waits
        """The socket stays open while no process serves it."""
        self._servers: list[tuple[SimProcess, App]] = []
        self._waiting: list[SimHttpExchange] = []

    def serve(self, process: SimProcess, app: App) -> None:
        self._servers = [(server, app_of_server) for server, app_of_server in self._servers if not server.is_dead] + [
            (process, app)
        ]
        waiting, self._waiting = self._waiting, []
        for exchange in waiting:
            exchange.begin(process, app)

    def close(self, process: SimProcess) -> None:
        """Sends no more connections to this process. Its open connections continue."""
        self._servers = [(server, app) for server, app in self._servers if server is not process]

    def close_socket(self) -> None:
        """Closes the socket, which breaks the waiting connections."""
        self._waits = False
        for exchange in self._waiting:
            exchange.break_connection()
        self._waiting.clear()

    def connect(self, exchange: "SimHttpExchange", choose: Callable[[int], int]) -> bool:
        living = [(process, app) for process, app in self._servers if not process.is_dead]
        if living:
            exchange.begin(*living[choose(len(living))])
        elif self._waits:
            self._waiting.append(exchange)
        else:
            return False
        return True


def url_of(name: str) -> str:
    """Returns the URL of a simulated instance or router. It has a loopback address, because a router without a cluster
    key accepts only instances at such addresses."""
    return f"http://127.{'.'.join(str(byte) for byte in name.encode().ljust(3, b'0')[:3])}"


class SimHttpNetwork:
    """All listeners, by URL."""

    def __init__(self, context: SimContext) -> None:
        self.context = context
        self.random = context.random.substream("http")
        self.listeners: dict[str, SimListener] = {}
        self.num_serving = 0
        """Exchanges that a server works on, except for periodic registrations and probes."""

    def listen(self, url: str, name: str, *, waits: bool) -> SimListener:
        self.listeners[url] = listener = SimListener(name, waits=waits)
        return listener


class SimHttpExchange:
    """One request and its response."""

    def __init__(
        self, network: SimHttpNetwork, client: SimProcess, scope: dict[str, Any], body: bytes, name: str
    ) -> None:
        self.network, self.client, self.name = network, client, name
        self.response = SimHttpResponse(self)
        self._scope, self._body = scope, body
        self._server: SimProcess | None = None
        self._client_gone = asyncio.Event()
        """Set when the server notices that the client has left."""
        self._drained = asyncio.Event()
        self._has_begun = self._is_broken = self._is_complete = False
        self._last_s = 0.0
        self._num_under_way = 0

    def begin(self, server: SimProcess, app: App) -> None:
        if self._is_broken:
            return
        self._server = server
        server.on_death.append(self.break_connection)
        self._transmit(server, lambda: server.start(self._serve(app)))

    async def _serve(self, app: App) -> None:
        is_counted = self._scope["path"] not in PERIODIC_PATHS
        self.network.num_serving += is_counted
        try:
            await app(self._scope, self._receive, self._send)
        finally:
            self.network.num_serving -= is_counted
            if not self._is_complete:
                self.break_connection()

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._client_gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        server = self._server
        if server is None or server.is_dead or self._is_broken or self._client_gone.is_set():
            return
        if message["type"] == "http.response.start":
            if self._has_begun:
                raise RuntimeError("an answer begins twice")
            self._has_begun = True
            status, headers = message["status"], {k.decode().lower(): v.decode() for k, v in message["headers"]}
            self._transmit(self.client, lambda: self.response.start(status, headers))
            return
        body, is_last = message.get("body", b""), not message.get("more_body", False)
        for chunk in self._cut(body):
            self._num_under_way += len(chunk)
            self._transmit(self.client, lambda chunk=chunk: self.response.feed(chunk))
        if is_last:
            self._is_complete = True
            self._transmit(self.client, self.response.finish)
        elif self.network.context.active_faults.hits("cut", self.name):
            self.break_connection()
        while self._num_under_way > HIGH_WATER_BYTES and not self._client_gone.is_set():
            self._drained.clear()
            await self._drained.wait()

    def _cut(self, body: bytes) -> list[bytes]:
        if len(body) < 2 or not self.network.random.happens(0.25):
            return [body] if body else []
        split = 1 + self.network.random.below(len(body) - 1)
        return [body[:split], body[split:]]

    def read(self, num_bytes: int) -> None:
        """Records that the client has read `num_bytes` bytes. A server that waits for the client to read continues."""
        self._num_under_way -= num_bytes
        self._drained.set()

    def leave(self) -> None:
        """Closes the connection for the client."""
        if self._is_broken or self._server is None:
            self._is_broken = True
            return
        self._is_broken = True
        self._transmit(self._server, self._on_client_gone)

    def break_connection(self) -> None:
        """Breaks the connection, because the server has died or failed, or the network has dropped the connection."""
        if self._is_broken or self._is_complete:
            return
        self._is_broken = True
        self._transmit(self.client, self.response.lose)
        if self._server is not None and not self._server.is_dead:
            self._transmit(self._server, self._on_client_gone)

    def _on_client_gone(self) -> None:
        self._client_gone.set()
        self._drained.set()

    def _transmit(self, receiver: SimProcess, deliver: Callable[[], object]) -> None:
        context = self.network.context
        active_faults, delay_s = context.active_faults, context.delay_s
        if not active_faults.is_empty and (
            active_faults.hits("delay", self.name) or active_faults.hits("partition", self.name)
        ):
            delay_s = SLOW_S
        self._last_s = max(self._last_s, context.loop.now_s + self.network.random.jittered(delay_s))
        context.loop.call_at_global(self._last_s, receiver.context(), self._deliver, receiver, deliver)

    @staticmethod
    def _deliver(receiver: SimProcess, deliver: Callable[[], object]) -> None:
        if not receiver.is_dead:
            deliver()


class SimHttpResponse:
    """The part of `aiohttp.ClientResponse` that is used; `content` is the response itself."""

    def __init__(self, exchange: SimHttpExchange) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.started = asyncio.Event()
        self._exchange = exchange
        self._chunks: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self._is_finished = self._is_lost = False

    @property
    def content(self) -> "SimHttpResponse":
        return self

    def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, headers
        self.started.set()

    def feed(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._arrived.set()

    def finish(self) -> None:
        self._is_finished = True
        self._arrived.set()

    def lose(self) -> None:
        if not self._is_finished:
            self._is_lost = True
            self.started.set()
            self._arrived.set()

    def at_eof(self) -> bool:
        return self._is_finished and not self._chunks

    async def iter_any(self) -> AsyncIterator[bytes]:
        while True:
            if self._chunks:
                chunk = b"".join(self._chunks)
                self._chunks.clear()
                self._exchange.read(len(chunk))
                yield chunk
            elif self._is_finished:
                return
            elif self._is_lost:
                raise SimConnectionLost("the connection was lost")
            else:
                self._arrived.clear()
                await self._arrived.wait()

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.iter_any()])

    def raise_for_status(self) -> None:
        if self.status >= 400:
            raise aiohttp.ClientPayloadError(f"status {self.status}")

    def release(self) -> None:
        """Does nothing, because there is no connection pool."""

    def close(self) -> None:
        self._exchange.leave()

    async def begun(self) -> "SimHttpResponse":
        await self.started.wait()
        if self._is_lost and not self.status:
            raise aiohttp.ServerDisconnectedError
        return self


class SimHttpSession:
    """The part of `aiohttp.ClientSession` that is used. It belongs to the process that makes requests with it."""

    def __init__(self, network: SimHttpNetwork, process: SimProcess) -> None:
        self._network, self._process = network, process

    def post(self, url: str, *, data: Any, headers: Mapping[str, str], **options: Any) -> "SimRequestContext":
        body = data if isinstance(data, bytes) else data.read()
        return SimRequestContext(self._network, self._process, "POST", url, body, headers, options.get("timeout"))

    def get(self, url: str, *, headers: Mapping[str, str] | None = None, **options: Any) -> "SimRequestContext":
        return self.request("GET", url, headers=headers, **options)

    def request(
        self, method: str, url: str, *, headers: Mapping[str, str] | None = None, **options: Any
    ) -> "SimRequestContext":
        """Makes a request without a body."""
        return SimRequestContext(self._network, self._process, method, url, b"", headers or {}, options.get("timeout"))

    async def post_attempt(self, url: str, path: str, body: bytes, headers: Mapping[str, str]) -> SimHttpResponse:
        """Posts an attempt, with the errors of `router.upstream_connections`."""
        try:
            return await self.post(url + path, data=body, headers=headers)
        except aiohttp.ClientConnectorError as fault:
            raise UpstreamConnectError(str(fault)) from None
        except aiohttp.ClientError as fault:
            raise ConnectionResetError(str(fault)) from None

    async def close(self) -> None:
        pass

    async def __aenter__(self) -> "SimHttpSession":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class SimRequestContext:
    """A request that can be awaited or entered with `async with`, as in aiohttp."""

    def __init__(
        self,
        network: SimHttpNetwork,
        process: SimProcess,
        method: str,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        timeout: aiohttp.ClientTimeout | None,
    ) -> None:
        self._network, self._process = network, process
        self._method, self._url, self._body, self._headers = method, url, body, headers
        self._timeout_s = timeout.total if timeout is not None else None
        self._response: SimHttpResponse | None = None

    def __await__(self) -> Generator[Any, None, SimHttpResponse]:
        return self._request().__await__()

    async def __aenter__(self) -> SimHttpResponse:
        self._response = await asyncio.wait_for(self._request(), self._timeout_s)
        return self._response

    async def __aexit__(self, *_: object) -> None:
        if self._response is not None and not self._response.at_eof():
            self._response.close()

    async def _request(self) -> SimHttpResponse:
        exchange = self._connect()
        try:
            return await exchange.response.begun()
        except BaseException:
            exchange.leave()
            raise

    def _connect(self) -> SimHttpExchange:
        root = self._url.split("/", 3)
        base, path = "/".join(root[:3]), "/" + (root[3] if len(root) > 3 else "")
        listener, (route, _, query) = self._network.listeners[base], path.partition("?")
        scope = {
            "type": "http",
            "http_version": "1.1",
            "asgi": {"version": "3.0"},
            "method": self._method,
            "path": route,
            "raw_path": route.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in self._headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        exchange = SimHttpExchange(
            self._network, self._process, scope, self._body, f"http {self._process.name}>{listener.name}"
        )
        context = self._network.context
        context.trace.message(exchange.name, f"{self._method} {path}")
        for watcher in context.watchers:
            watcher(exchange.name, f"{self._method} {path}")
        refused = not context.active_faults.is_empty and context.active_faults.hits("refuse", exchange.name)
        if refused or not listener.connect(exchange, self._network.random.below):
            key = ConnectionKey(listener.name, 80, False, True, None, None, None)
            raise aiohttp.ClientConnectorError(key, ConnectionRefusedError(111, "refused"))
        self._process.on_death.append(exchange.leave)
        return exchange
