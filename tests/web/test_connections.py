"""Connections over real sockets that take too much: of bytes, of time, of places. Bounds are small here."""

import asyncio
import json
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from onward.clock import SystemClock
from onward.obs.metrics import Registry
from onward.proto.router import ATTEMPT_PATH
from onward.web import asgi
from onward.web.access_log import AccessLog
from onward.web.request_id_middleware import RequestIdMiddleware
from onward.web.server.connection_tracker import ConnectionLimits, ConnectionTracker, allowed_connections
from onward.web.server.half_closed import COMMENT, PROBE, note_response_start
from onward.web.server.http_protocol import LimitedHttpProtocol
from onward.web.server.http_server import HttpServer
from onward.web.server.tls_files import TlsFiles
from tests.web import certificate

SOON_S = 0.05
NEVER_S = 1000.0
PATIENT = ConnectionLimits(
    head_timeout_s=NEVER_S, idle_timeout_s=NEVER_S, write_timeout_s=NEVER_S, close_timeout_s=NEVER_S
)
END_OF_TEST_S = 30.0


@dataclass
class App:
    """`/slow` answers when let, `/parts` begins at once and ends when let, `/endless` never stops, `/body` tells the size
    of what it read, others answer at once."""

    asked: list[str] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    is_slow: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.append(scope["path"])
        try:
            if scope["path"] == "/body":
                body = await asgi.read_body(receive, 1 << 20)
                await asgi.respond(send, 200, str(len(body)).encode())
            elif scope["path"].endswith("/slow"):
                await asgi.run_until_disconnect(receive, self._wait(send))
            elif scope["path"] == "/parts":
                await asgi.run_until_disconnect(receive, self._write_parts(scope, send))
            elif scope["path"].startswith("/endless"):
                await asgi.run_until_disconnect(receive, self._write_on(send))
            else:
                await asgi.respond(send, 200, b"much" * 10_000 if scope["path"] == "/much" else b"at once")
        except asgi.ClientDisconnected:
            self.left.set()

    async def _wait(self, send: Send) -> None:
        self.is_slow.set()
        await self.may_answer.wait()
        await asgi.respond(send, 200, b"at last")

    async def _write_parts(self, scope: Scope, send: Send) -> None:
        start = asgi.start_message(200, {"content-type": "text/event-stream"})
        note_response_start(scope, start)
        await send(start)
        await send(asgi.body_message(b"one "))
        self.is_slow.set()
        await self.may_answer.wait()
        await send(asgi.body_message(b""))
        await send(asgi.body_message(b"two", more_body=False))

    async def _write_on(self, send: Send) -> None:
        await send(asgi.start_message(200, {}))
        while True:
            await send(asgi.body_message(b"x" * 4096))
            await asyncio.sleep(0)


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = await self.reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, body

    async def is_ended(self) -> bool:
        """Waits until the server has closed, without a further word."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionResetError:
            return True


@dataclass
class Server:
    app: App
    registry: Registry
    port: int
    clients: list[Client] = field(default_factory=list)

    async def connect(self, tls: ssl.SSLContext | None = None) -> Client:
        self.clients.append(Client(*await asyncio.open_connection("127.0.0.1", self.port, ssl=tls)))
        return self.clients[-1]

    async def ask(self, said: bytes) -> Client:
        client = await self.connect()
        client.send(said)
        return client

    def counted(self, name: str) -> dict[str, float]:
        [family] = [one for one in self.registry.snapshot() if one.name == name]
        return {next(iter(one.labels.values())): one.value for one in family.series}

    @property
    def ends(self) -> dict[str, float]:
        return self.counted("onward_http_connections_ended_total")

    async def holds(self, *, busy: int, idle: int) -> None:
        while self.counted("onward_http_connections") != {"busy": busy, "idle": idle}:
            await asyncio.sleep(0)


@asynccontextmanager
async def serving(bounds: ConnectionLimits, tls: TlsFiles | None = None) -> AsyncIterator[Server]:
    started, registry, app = asyncio.Event(), Registry(), App()
    counter = registry.counter("requests_total", "", ["path", "status"])
    logged = RequestIdMiddleware(app, counter, [], access_log=AccessLog(SystemClock()))
    server = HttpServer(logged, started.set, tls=tls, limits=bounds, registry=registry)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        running = asyncio.create_task(server.serve([listening]))
        await started.wait()
        asked = Server(app, registry, listening.getsockname()[1])
        try:
            yield asked
        finally:
            for client in asked.clients:
                client.writer.transport.abort()
            server.force_exit = True
            server.stop(0.0, lambda: None)
            await running


def over_sockets(
    bounds: ConnectionLimits, scenario: Callable[[Server], Awaitable[None]], tls: TlsFiles | None = None
) -> None:
    async def run() -> None:
        async with asyncio.timeout(END_OF_TEST_S), serving(bounds, tls) as server:
            await scenario(server)

    uvloop.run(run())


def get(path: str, headers: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: x\r\n{headers}\r\n".encode()


def error_in(body: bytes) -> dict[str, str]:
    return json.loads(body)["error"]


SMALL = ConnectionLimits(
    head_timeout_s=NEVER_S,
    idle_timeout_s=NEVER_S,
    close_timeout_s=SOON_S,
    max_head_bytes=1000,
    max_headers=10,
    max_url_bytes=100,
)


@pytest.mark.parametrize(
    ("said", "status", "code", "names"),
    [
        (get("/", f"a: {'v' * 2000}\r\n"), 431, "headers_too_large", "headers: are larger than 1000 bytes"),
        (get("/", f"a: {'v' * 2000}")[:-2], 431, "headers_too_large", "headers: are larger than 1000 bytes"),
        (get("/", "a: b\r\n" * 10), 431, "headers_too_large", "headers: are more than 10"),
        (get("/" + "u" * 100), 414, "url_too_long", "URL: is longer than 100 bytes"),
        (b"GET /" + b"u" * 100, 414, "url_too_long", "URL: is longer than 100 bytes"),
        (b"\r\n" * 600, 431, "headers_too_large", "headers: are larger than 1000 bytes"),
        (b"\x16\x03\x01 hello\r\n\r\n", 400, "invalid_http", "not an HTTP/1.1 request"),
    ],
    ids=["a header", "a header without an end", "headers", "a URL", "a URL without an end", "empty lines", "no HTTP"],
)
def test_a_head_that_is_too_large_is_refused_by_name(said: bytes, status: int, code: str, names: str) -> None:
    async def scenario(server: Server) -> None:
        client = await server.ask(said)
        answered, headers, body = await client.answer()
        assert (answered, error_in(body)["code"]) == (status, code)
        assert names in error_in(body)["message"]
        assert headers["connection"] == "close"
        assert await client.is_ended()
        assert server.app.asked == []

    over_sockets(SMALL, scenario)


def test_a_head_at_its_bounds_is_taken() -> None:
    async def scenario(server: Server) -> None:
        for said in (get("/", "a: b\r\n" * 9), get("/" + "u" * 99), get("/", f"a: {'v' * 900}\r\n")):
            client = await server.ask(said)
            assert (await client.answer())[0] == 200

    over_sockets(SMALL, scenario)


def test_a_head_that_comes_too_slowly_is_refused_and_silence_is_ended() -> None:
    async def scenario(server: Server) -> None:
        slow, silent = await server.ask(get("/")[:-3]), await server.connect()
        status, _, body = await slow.answer()
        assert (status, error_in(body)["code"]) == (408, "head_timeout")
        assert await slow.is_ended()
        assert await silent.is_ended()
        assert server.ends == {"head_timeout": 2}
        await server.holds(busy=0, idle=0)

    over_sockets(ConnectionLimits(head_timeout_s=SOON_S, close_timeout_s=SOON_S), scenario)


def test_the_head_of_a_later_request_has_a_time_too() -> None:
    async def scenario(server: Server) -> None:
        client = await server.ask(get("/"))
        assert (await client.answer())[0] == 200
        client.send(b"GET / HT")
        assert (await client.answer())[0] == 408
        assert await client.is_ended()

    over_sockets(ConnectionLimits(head_timeout_s=SOON_S, close_timeout_s=SOON_S, idle_timeout_s=NEVER_S), scenario)


def test_a_request_that_is_under_way_is_not_ended_for_its_heads_time() -> None:
    async def scenario(server: Server) -> None:
        client, silent = await server.ask(get("/slow")), await server.connect()
        await server.app.is_slow.wait()
        assert await silent.is_ended()  # the time is over
        server.app.may_answer.set()
        assert (await client.answer())[2] == b"at last"

    over_sockets(ConnectionLimits(head_timeout_s=SOON_S), scenario)


def test_a_client_that_stops_reading_is_cut_off_and_its_stream_hears_that_it_has_left() -> None:
    async def scenario(server: Server) -> None:
        client = await server.ask(get("/endless"))
        client.writer.transport.pause_reading()  # pyright: ignore[reportAttributeAccessIssue]
        await server.app.left.wait()
        assert server.ends == {"unread": 1}
        await server.holds(busy=0, idle=0)

    over_sockets(ConnectionLimits(write_timeout_s=SOON_S, send_buffer_bytes=4096), scenario)


def test_what_is_unread_at_the_end_of_an_answer_is_not_waited_for_either() -> None:
    async def scenario(server: Server) -> None:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", server.port))
            await asyncio.get_running_loop().sock_sendall(sock, get("/much"))
            while not server.ends:
                await asyncio.sleep(0)
            assert server.ends == {"unread": 1}
            await server.holds(busy=0, idle=0)

    over_sockets(ConnectionLimits(write_timeout_s=SOON_S, send_buffer_bytes=4096, idle_timeout_s=NEVER_S), scenario)


def test_a_client_that_reads_is_never_cut_off() -> None:
    async def scenario(server: Server) -> None:
        client = await server.ask(get("/endless"))
        for _ in range(200):
            assert len(await client.reader.readexactly(40_000)) == 40_000
        assert server.ends == {}

    over_sockets(ConnectionLimits(write_timeout_s=END_OF_TEST_S, send_buffer_bytes=4096), scenario)


class Pipe(asyncio.Transport):
    """Takes all, and tells how much of it is still there, look by look."""

    def __init__(self, unread: list[int]) -> None:
        super().__init__()
        self.unread, self.aborted = unread, asyncio.Event()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def get_write_buffer_size(self) -> int:
        return self.unread.pop(0)

    def close(self) -> None: ...
    def abort(self) -> None:
        self.aborted.set()


def test_who_reads_enough_within_each_time_is_waited_for() -> None:
    async def run() -> None:
        server, bounds = HttpServer(App(), lambda: None), ConnectionLimits(write_timeout_s=SOON_S, min_read_bytes=100)
        server.config.load()
        connection = LimitedHttpProtocol(server.config, server.server_state, {}, ConnectionTracker(bounds, Registry()))
        assert connection.timeout_keep_alive == bounds.idle_timeout_s
        pipe = Pipe([500, 300, 300, 200, 200, 101])
        connection.connection_made(pipe)
        connection.pause_writing()
        await pipe.aborted.wait()
        assert pipe.unread == []
        connection.connection_lost(None)

    asyncio.run(run())


def test_a_router_is_waited_for_longer_since_it_reads_as_its_clients_do() -> None:
    async def scenario(server: Server) -> None:
        for path in ("/endless/of_router", "/endless"):
            client = await server.ask(get(path))
            client.writer.transport.pause_reading()  # pyright: ignore[reportAttributeAccessIssue]
        await server.app.left.wait()
        await server.holds(busy=1, idle=0)
        assert server.ends == {"unread": 1}

    paths = frozenset({"/endless/of_router"})
    assert ConnectionLimits().slow_reader_paths == {ATTEMPT_PATH}
    over_sockets(
        ConnectionLimits(
            write_timeout_s=SOON_S, send_buffer_bytes=4096, slow_reader_paths=paths, slow_reader_factor=NEVER_S
        ),
        scenario,
    )


def test_what_the_kernel_keeps_for_a_client_is_bounded() -> None:
    bounds = ConnectionLimits(send_buffer_bytes=20_000)

    async def run() -> None:
        started = asyncio.Event()
        server = HttpServer(App(), started.set, limits=bounds)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            running = asyncio.create_task(server.serve([listening]))
            await started.wait()
            assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) in (
                20_000,
                40_000,
            )  # some kernels double it
            assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            server.stop(0.0, lambda: None)
            await running

    uvloop.run(run())


FEW = ConnectionLimits(
    max_connections=2, num_spare_connections=3, head_timeout_s=NEVER_S, idle_timeout_s=NEVER_S, close_timeout_s=SOON_S
)


def test_more_connections_than_there_may_be_are_turned_away_but_for_the_question_whether_we_live() -> None:
    async def scenario(server: Server) -> None:
        slow = [await server.ask(get("/slow")) for _ in range(2)]
        await server.holds(busy=2, idle=0)
        status, headers, body = await (await server.ask(get("/"))).answer()
        assert (status, error_in(body)["code"], headers["retry-after"]) == (503, "too_many_connections", "1")
        assert (await (await server.ask(get("/live?why"))).answer())[0] == 200
        server.app.may_answer.set()
        for client in slow:
            assert (await client.answer())[2] == b"at last"
        assert (await (await server.ask(get("/"))).answer())[0] == 200

    over_sockets(FEW, scenario)


def test_the_connection_that_has_been_idle_for_longest_makes_room() -> None:
    async def scenario(server: Server) -> None:
        busy = await server.ask(get("/slow"))
        await server.holds(busy=1, idle=0)
        idle = []
        for number in range(4):
            idle.append(await server.connect())
            await server.holds(busy=1, idle=number + 1)
        new = await server.ask(get("/"))
        assert (await new.answer())[0] == 200
        assert await idle[0].is_ended()
        assert server.ends == {"no_room": 1}
        idle[1].send(get("/"))
        assert (await idle[1].answer())[0] == 200
        server.app.may_answer.set()
        assert (await busy.answer())[2] == b"at last"

    over_sockets(FEW, scenario)


def test_requests_that_come_ahead_of_an_answer_are_not_read_and_the_connection_ends_with_it() -> None:
    async def scenario(server: Server) -> None:
        client = await server.ask(get("/slow") + get("/") * 1000)
        await server.app.is_slow.wait()
        client.send(get("/") * 1000)
        server.app.may_answer.set()
        status, headers, body = await client.answer()
        assert (status, headers["connection"], body) == (200, "close", b"at last")
        assert await client.is_ended()
        assert server.app.asked == ["/slow"]
        assert server.ends == {"pipelined": 1}

    over_sockets(PATIENT, scenario)


def test_a_client_that_goes_is_noticed_whatever_it_has_sent_ahead() -> None:
    async def scenario(server: Server) -> None:
        client = await server.ask(get("/slow") + get("/") * 10)
        await server.app.is_slow.wait()
        client.writer.close()
        await server.app.left.wait()
        await server.holds(busy=0, idle=0)

    over_sockets(PATIENT, scenario)


def test_requests_one_after_the_other_share_a_connection() -> None:
    async def scenario(server: Server) -> None:
        client = await server.connect()
        for _ in range(3):
            client.send(b"POST /body HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nwhat")
            assert (await client.answer())[2] == b"4"
        await server.holds(busy=0, idle=1)

    over_sockets(PATIENT, scenario)


def test_a_client_that_proposes_another_protocol_is_served_in_this_one() -> None:
    async def scenario(server: Server) -> None:
        client = await server.connect()
        for _ in range(2):
            client.send(get("/", "connection: upgrade\r\nupgrade: websocket\r\n"))
            assert (await client.answer())[2] == b"at once"

    over_sockets(PATIENT, scenario)


H2C_HEAD = (
    b"POST /body HTTP/1.1\r\nhost: x\r\nconnection: %b\r\nupgrade: h2c\r\n"
    b"http2-settings: AAMAAABkAAQAAP__\r\ncontent-length: 4\r\n\r\n"
)


@pytest.mark.parametrize("size", [1, 40, 1000])
def test_a_body_counts_although_its_head_proposes_another_protocol(size: int) -> None:
    async def scenario(server: Server) -> None:
        client = await server.connect()
        asked = H2C_HEAD % b"Upgrade, HTTP2-Settings" + b"what"
        for _ in range(2):
            for start in range(0, len(asked), size):
                client.send(asked[start : start + size])
                await asyncio.sleep(0)
            assert (await client.answer())[2] == b"4"
        await server.holds(busy=0, idle=1)
        client.send(H2C_HEAD % b"Upgrade, HTTP2-Settings, close" + b"what")
        assert (await client.answer())[2] == b"4"
        assert await client.is_ended()

    over_sockets(PATIENT, scenario)


def test_nobody_is_connected_to_somebody_else() -> None:
    async def scenario(server: Server) -> None:
        client = await server.ask(b"CONNECT other:80 HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.answer())[0] == 400
        assert server.app.asked == []

    over_sockets(PATIENT, scenario)


def test_an_idle_connection_is_closed_after_a_while() -> None:
    async def scenario(server: Server) -> None:
        client = await server.ask(get("/"))
        assert (await client.answer())[0] == 200
        assert await client.is_ended()

    over_sockets(ConnectionLimits(head_timeout_s=NEVER_S, idle_timeout_s=SOON_S), scenario)


POST_HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"


def test_a_body_that_nobody_needs_is_waited_for_only_so_long() -> None:
    async def scenario(server: Server) -> None:
        client = await server.ask(POST_HEAD + b"some")
        assert (await client.answer())[0] == 200
        client.send(b"more")
        assert await client.is_ended()

    over_sockets(ConnectionLimits(head_timeout_s=NEVER_S, idle_timeout_s=NEVER_S, close_timeout_s=SOON_S), scenario)


def test_after_a_body_that_nobody_needed_the_connection_goes_on() -> None:
    async def scenario(server: Server) -> None:
        client, silent = await server.ask(POST_HEAD + b"b" * 500), await server.connect()
        assert (await client.answer())[0] == 200
        client.send(b"b" * 500)
        assert await silent.is_ended()  # the time for the body is over too
        client.send(get("/live"))
        assert (await client.answer())[0] == 200
        await server.holds(busy=0, idle=1)

    over_sockets(ConnectionLimits(head_timeout_s=1.0, close_timeout_s=0.5, idle_timeout_s=NEVER_S), scenario)


def test_a_request_in_the_same_read_as_the_end_of_a_body_is_not_ended_for_the_idle_time() -> None:
    async def scenario(server: Server) -> None:
        client, idle = await server.ask(POST_HEAD + b"b" * 500), await server.ask(get("/"))
        assert (await client.answer())[0] == 200
        client.send(b"b" * 500 + get("/slow"))
        await server.app.is_slow.wait()
        assert (await idle.answer())[0] == 200
        assert await idle.is_ended()
        later = await server.ask(get("/"))
        assert (await later.answer())[0] == 200
        assert await later.is_ended()  # the time is over that was set before
        server.app.may_answer.set()
        assert (await client.answer())[2] == b"at last"

    over_sockets(ConnectionLimits(head_timeout_s=NEVER_S, close_timeout_s=NEVER_S, idle_timeout_s=SOON_S), scenario)


def test_a_head_that_begins_in_the_same_read_as_the_end_of_a_body_has_a_time_too() -> None:
    async def scenario(server: Server) -> None:
        client = await server.ask(POST_HEAD + b"b" * 500)
        assert (await client.answer())[0] == 200
        client.send(b"b" * 500 + b"GET / HT")
        assert (await client.answer())[0] == 408

    over_sockets(ConnectionLimits(head_timeout_s=SOON_S, close_timeout_s=NEVER_S, idle_timeout_s=NEVER_S), scenario)


@pytest.mark.parametrize(("path", "body"), [("/parts", b"one two"), ("/", b"at once")])
def test_a_client_of_http_1_0_gets_a_body_that_ends_with_the_connection(path: str, body: bytes) -> None:
    async def scenario(server: Server) -> None:
        server.app.may_answer.set()
        client = await server.ask(f"GET {path} HTTP/1.0\r\nexpect: 100-continue\r\n\r\n".encode())
        head, _, rest = (await client.reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ") and b"transfer-encoding" not in head and rest == body
        assert (b"content-length: 7" in head) == (path == "/"), "a length that is known is told"

    over_sockets(PATIENT, scenario)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize(("path", "body"), [("/slow", b"at last"), ("/parts", b"two"), ("/", b"at once")])
def test_a_client_that_closes_its_sending_side_gets_its_response(path: str, body: bytes, version: str) -> None:
    async def scenario(server: Server) -> None:
        client = await server.ask(f"GET {path} HTTP/{version}\r\nhost: x\r\n\r\n".encode())
        client.writer.write_eof()
        if path != "/":
            await server.app.is_slow.wait()
            await server.holds(busy=1, idle=0)
        server.app.may_answer.set()
        received = await client.reader.read()
        assert received.count(b"HTTP/1.1 200 OK") == 1 and body in received
        assert received.count(PROBE) + received.count(COMMENT) <= 1 and (version == "1.1" or PROBE not in received)
        assert not server.app.left.is_set()
        await server.holds(busy=0, idle=0)

    over_sockets(PATIENT, scenario)


@pytest.mark.parametrize("path", ["/slow", "/endless", "/parts"])
def test_a_client_that_has_gone_is_noticed_although_it_could_still_be_reading(path: str) -> None:
    async def scenario(server: Server) -> None:
        client = await server.ask(get(path))
        while not server.app.asked:
            await asyncio.sleep(0)
        client.writer.close()
        await server.app.left.wait()
        await server.holds(busy=0, idle=0)

    over_sockets(PATIENT, scenario)


@pytest.mark.parametrize("said", [b"", b"GET / HT", POST_HEAD.replace(b"/ ", b"/body ") + b"half"])
def test_a_client_that_closes_its_sending_side_before_its_request_is_whole_has_gone(said: bytes) -> None:
    async def scenario(server: Server) -> None:
        client = await server.ask(said)
        while said.startswith(b"POST") and not server.app.asked:
            await asyncio.sleep(0)
        client.writer.write_eof()
        assert await client.is_ended()
        await server.holds(busy=0, idle=0)

    over_sockets(PATIENT, scenario)


def test_a_router_that_closes_its_connection_has_given_the_attempt_up() -> None:
    async def scenario(server: Server) -> None:
        client = await server.ask(get("/internal/slow"))
        await server.app.is_slow.wait()
        client.writer.write_eof()
        await server.app.left.wait()
        assert await client.is_ended()

    over_sockets(PATIENT, scenario)


@pytest.mark.parametrize("around", [b"4;a=", b"4\r\nwhat\r\n0\r\na: ", b"4\r\nwhat\r\n0\r\n" + b"a: b\r\n" * 20])
def test_what_is_around_a_body_has_a_bound_too(around: bytes) -> None:
    async def scenario(server: Server) -> None:
        client = await server.ask(b"POST /body HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        while not server.app.asked:
            await asyncio.sleep(0)
        client.send(around)
        answer = asyncio.create_task(client.answer())
        while not answer.done():
            client.send(b"x" * 2000)
            await asyncio.sleep(0)
        status, _, body = await answer
        assert (status, error_in(body)["code"]) == (431, "headers_too_large")
        await server.app.left.wait()

    over_sockets(replace(SMALL, close_timeout_s=NEVER_S), scenario)


def test_a_body_in_tiny_pieces_is_taken() -> None:
    async def scenario(server: Server) -> None:
        client = await server.ask(b"POST /body HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(20):
            client.send(b"1\r\nb\r\n" * 100)
            for _ in range(3):  # rounds of the loop, so that it does not come in one piece
                await asyncio.sleep(0)
        client.send(b"0\r\n\r\n")
        assert (await client.answer())[2] == b"2000"

    over_sockets(SMALL, scenario)


def test_a_handshake_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    files = certificate.make(tmp_path)

    async def scenario(server: Server) -> None:
        silent = await server.connect()
        assert await silent.is_ended()
        client = await server.connect(ssl.create_default_context(cafile=files[0]))
        client.send(get("/"))
        assert (await client.answer())[0] == 200

    over_sockets(ConnectionLimits(handshake_timeout_s=SOON_S * 4), scenario, TlsFiles(*files))


def test_who_does_not_read_over_tls_is_cut_off_as_well(tmp_path: Path) -> None:
    files = certificate.make(tmp_path)

    async def scenario(server: Server) -> None:
        client = await server.connect(ssl.create_default_context(cafile=files[0]))
        client.send(get("/endless"))
        client.writer.transport.pause_reading()  # pyright: ignore[reportAttributeAccessIssue]
        await server.app.left.wait()
        assert server.ends == {"unread": 1}
        await server.holds(busy=0, idle=0)

    over_sockets(ConnectionLimits(write_timeout_s=SOON_S, send_buffer_bytes=4096), scenario, TlsFiles(*files))


def test_no_more_connections_are_promised_than_files_can_be_opened() -> None:
    assert allowed_connections(10) == 10
    assert 1 <= allowed_connections(1 << 40) < 1 << 40


@pytest.mark.parametrize("comes_with_head", [True, False])
def test_a_request_that_is_refused_while_its_body_arrives_is_logged_with_the_status_that_was_sent(
    comes_with_head: bool, caplog: pytest.LogCaptureFixture
) -> None:
    head, broken_chunk = b"POST /body HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n", b"zz\r\n"

    async def scenario(server: Server) -> None:
        client = await server.ask(head + broken_chunk if comes_with_head else head)
        if not comes_with_head:
            await server.holds(busy=1, idle=0)
            while not server.app.asked:
                await asyncio.sleep(0)
            client.send(broken_chunk)
        status, _, body = await client.answer()
        assert (status, error_in(body)["code"]) == (400, "invalid_http")
        await server.app.left.wait()

    with caplog.at_level(logging.INFO, "onward.access"):
        over_sockets(SMALL, scenario)
    [line] = [record.msg for record in caplog.records if record.name == "onward.access"]
    assert (line.fields["path"], line.fields["status"], line.fields["error"]) == ("/body", 400, "invalid_http")
