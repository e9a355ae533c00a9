"""HTTP to the instances: attempts, and the few questions a router asks. Knows neither streams nor decisions."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from onward.clock import Clock
from onward.obs.trace_context import trace_headers
from onward.proto.model import TokenizerFiles
from onward.proto.router import (
    ABORT_PATH,
    ATTEMPT_PATH,
    CALLER_HEADER,
    CLOSE_PATH,
    FIND_PATH,
    IGNORED_FIELDS_HEADER,
    PROBE_PATH,
    SIGNATURE_HEADER,
    TOKENIZER_FILES_PATH,
    Attempt,
    CloseAttempt,
    ClosedAttempt,
    FindStream,
    InstanceAbortReply,
    QueryTokenizerFiles,
    Registration,
    RegistrationReply,
    StreamRecord,
)
from onward.router.upstream_connections import CONNECT_TIMEOUT_S, KEEP_ALIVE_S, UpstreamResponse
from onward.transport.cluster_signature import sign_request
from onward.transport.message_decoding import decode_message

ASK_TIMEOUT_S = 3.0
PASS_ON_TIMEOUT_S = 30.0
"""A client may ask for more work than we do."""
MAX_ERROR_BYTES = 1 << 20
MAX_ANSWER_BYTES = 64 << 20

_MSGPACK = {"content-type": "application/msgpack"}

PostStream = Callable[[str, str, bytes, Mapping[str, str]], Awaitable[UpstreamResponse]]
"""URL of the server, path, body, headers."""


def new_session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ttl_dns_cache=10)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    return aiohttp.ClientSession(
        connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
    )


class ForwardedResponse(NamedTuple):
    """An instance's answer to a question that was passed on."""

    status: int
    body: bytes
    ignored_fields: str | None = None


class UpstreamClient:
    """HTTP client for instances. `post` sends attempts, whose answers are streams; `session` sends all other
    requests."""

    def __init__(self, cluster_key: str, clock: Clock, session: aiohttp.ClientSession, post: PostStream) -> None:
        self._cluster_key = cluster_key
        self._clock = clock
        self._session = session
        self._post = post

    async def close(self) -> None:
        await self._session.close()

    @asynccontextmanager
    async def send_attempt(self, url: str, attempt: Attempt) -> AsyncIterator[UpstreamResponse]:
        """Sends an attempt and yields the instance's answer. Leaving before its end closes the connection and so stops
        the work."""
        body = msgspec.msgpack.encode(attempt)
        headers = _MSGPACK | self._auth_headers("POST", ATTEMPT_PATH, body)
        if attempt.trace is not None:
            headers |= trace_headers(attempt.trace)
        reply = await self._post(url, ATTEMPT_PATH, body, headers)
        try:
            yield reply
        finally:
            # Gives a connection back that has been read to its end, and closes any other.
            if reply.at_eof():
                reply.release()
            else:
                reply.close()

    async def find_record(self, url: str, request_id: str) -> tuple[StreamRecord | None, bool]:
        """Returns the instance's record of a stream, or None, and whether the instance has answered. Only an answer
        makes sure that the instance has no record."""
        message = msgspec.msgpack.encode(FindStream(request_id))
        reply = await self.forward(url, FIND_PATH, message, ASK_TIMEOUT_S)
        if reply is None or reply.status >= 500:
            return None, False
        return (_decoded(reply.body, StreamRecord) if reply.status == 200 else None), True

    async def render_stream_end(self, url: str, message: CloseAttempt) -> ClosedAttempt | None:
        reply = await self._ask(url, CLOSE_PATH, msgspec.msgpack.encode(message))
        return None if reply is None else _decoded(reply, ClosedAttempt)

    async def probe(self, url: str, message: RegistrationReply) -> Registration | None:
        reply = await self._ask(url, PROBE_PATH, msgspec.msgpack.encode(message))
        return None if reply is None else _decoded(reply, Registration)

    async def fetch_tokenizer(self, url: str) -> TokenizerFiles | None:
        reply = await self._ask(url, TOKENIZER_FILES_PATH, msgspec.msgpack.encode(QueryTokenizerFiles()))
        return None if reply is None else _decoded(reply, TokenizerFiles)

    async def abort(self, url: str, query: dict[str, object]) -> InstanceAbortReply | None:
        reply = await self._ask(url, ABORT_PATH, msgspec.json.encode(query), {"content-type": "application/json"})
        try:
            return None if reply is None else msgspec.json.decode(reply, type=InstanceAbortReply)
        except msgspec.MsgspecError:
            return None

    async def forward(
        self, url: str, path: str, body: bytes, timeout_s: float = PASS_ON_TIMEOUT_S, caller: str | None = None
    ) -> "ForwardedResponse | None":
        """Sends a client's request to an instance and returns its answer, with any status; None if there is no answer."""
        headers = {"content-type": "application/json"} | self._auth_headers("POST", path, body)
        if caller is not None:
            headers[CALLER_HEADER] = caller
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.post(url + path, data=body, headers=headers, allow_redirects=False) as response,
            ):
                reply_body = await _read_within(response.content.iter_any(), MAX_ANSWER_BYTES)
                return ForwardedResponse(response.status, reply_body, response.headers.get(IGNORED_FIELDS_HEADER))
        except (TimeoutError, OSError, aiohttp.ClientError, ValueError):
            return None

    async def get(self, url: str, path: str) -> tuple[int, bytes] | None:
        """Gets a path from an instance; None if there is no answer. The path is quoted, because a client may have
        chosen it and this request carries the router's authentication."""
        try:
            target = URL(url + quote(path), encoded=True)
            headers = self._auth_headers("GET", path, b"")
            async with (
                asyncio.timeout(ASK_TIMEOUT_S),
                self._session.get(target, headers=headers, allow_redirects=False) as response,
            ):
                return response.status, await _read_within(response.content.iter_any(), MAX_ANSWER_BYTES)
        except (TimeoutError, OSError, aiohttp.ClientError, ValueError):
            return None

    async def _ask(self, url: str, path: str, body: bytes, headers: dict[str, str] = _MSGPACK) -> bytes | None:
        headers = headers | self._auth_headers("POST", path, body)
        try:
            async with (
                asyncio.timeout(ASK_TIMEOUT_S),
                self._session.post(url + path, data=body, headers=headers, allow_redirects=False) as response,
            ):
                return (
                    await _read_within(response.content.iter_any(), MAX_ANSWER_BYTES)
                    if response.status == 200
                    else None
                )
        except (TimeoutError, OSError, aiohttp.ClientError, ValueError):
            return None

    def _auth_headers(self, method: str, path: str, body: bytes) -> dict[str, str]:
        if not self._cluster_key:
            return {}
        return {SIGNATURE_HEADER: sign_request(self._cluster_key, method, path, body, self._clock.wall_s())}


async def read_error_body(reply: UpstreamResponse) -> bytes:
    """Returns the body of an error response; empty if it is too large or cannot be read in time."""
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            return await _read_within(reply.iter_any(), MAX_ERROR_BYTES)
    except (TimeoutError, OSError, ValueError):
        return b""


async def _read_within(chunks: AsyncIterable[bytes], max_bytes: int) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    async for chunk in chunks:
        parts.append(chunk)
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise ValueError(f"the answer is larger than {max_bytes} bytes")
    return b"".join(parts)


def _decoded(reply: bytes, kind: Any) -> Any | None:
    try:
        return decode_message(msgspec.msgpack.Decoder(kind), reply)
    except msgspec.DecodeError:
        return None
