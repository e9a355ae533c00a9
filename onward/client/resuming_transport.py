"""Transports for httpx and httpx2 that resume streams: the reader of a response does not notice that a connection was
lost.

Any client with a configurable transport gets resumed streams, with its own types for events and errors.
"""

import json
import random
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from functools import cache
from types import ModuleType
from typing import Any, cast

import anyio
import httpx

from onward.client.failures import ConnectionFailure, StreamFailed, refusal
from onward.client.http_package import http_package
from onward.client.options import OnResume, ResumeOptions
from onward.client.stream_resumer import StreamResumer

_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/generate")
_MAX_REFUSAL_BYTES = 1 << 20
_FRAMING_HEADERS = ("content-length", "transfer-encoding")
"""Headers about the form of one body. A resumed request or response has a body of another form."""


class ResumingTransport(httpx.BaseTransport):
    """Resumes streams and passes all other requests to `inner` unchanged. `inner` is by default a new
    `httpx.HTTPTransport`."""

    def __init__(
        self,
        inner: httpx.BaseTransport | None = None,
        *,
        options: ResumeOptions | None = None,
        on_resume: OnResume | None = None,
    ) -> None:
        self._inner = inner if inner is not None else httpx.HTTPTransport()
        self._options, self._on_resume = options or ResumeOptions(), on_resume

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if not (_is_path_resumable(request) and _is_stream(request.read())):
            return self._inner.handle_request(request)
        stream_request = _StreamRequest(request, self._options, self._on_resume)
        return _stream_class(stream_request.package)(self._inner, stream_request).open()

    def close(self) -> None:
        self._inner.close()


class AsyncResumingTransport(httpx.AsyncBaseTransport):
    """`ResumingTransport` for `httpx.AsyncClient`."""

    def __init__(
        self,
        inner: httpx.AsyncBaseTransport | None = None,
        *,
        options: ResumeOptions | None = None,
        on_resume: OnResume | None = None,
    ) -> None:
        self._inner = inner if inner is not None else httpx.AsyncHTTPTransport()
        self._options, self._on_resume = options or ResumeOptions(), on_resume

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not (_is_path_resumable(request) and _is_stream(await request.aread())):
            return await self._inner.handle_async_request(request)
        stream_request = _StreamRequest(request, self._options, self._on_resume)
        return await _async_stream_class(stream_request.package)(self._inner, stream_request).open()

    async def aclose(self) -> None:
        await self._inner.aclose()


def _is_path_resumable(request: httpx.Request) -> bool:
    return request.method == "POST" and request.url.path.endswith(_PATHS)


def _is_stream(content: bytes) -> bool:
    """Returns whether the request is for a stream. A background response does not count: it continues without its
    client, which follows it by its id."""
    try:
        body = json.loads(content)
    except ValueError:
        return False
    return isinstance(body, dict) and body.get("stream") is True and body.get("background") is not True


class _StreamRequest:
    """Builds the request of one stream, for as many connections as it needs."""

    def __init__(self, request: httpx.Request, options: ResumeOptions, on_resume: OnResume | None) -> None:
        self.package = http_package(request)
        self._request, self._options = request, options
        self._headers = request.headers.copy()
        for name in _FRAMING_HEADERS:
            self._headers.pop(name, None)
        last_event_id = self._headers.pop("last-event-id", "")
        # The server refuses a second request with a label while the first one runs, so that a request whose answer was lost
        # does not run twice at the same time.
        self._headers.setdefault("x-request-id", uuid.uuid4().hex)
        self._headers["accept-encoding"] = "identity"  # events are read before a client could decompress them
        self.core = StreamResumer(
            options, time.monotonic(), random.random, last_event_id=last_event_id, on_resume=on_resume
        )

    def next_attempt(self) -> httpx.Request:
        read_timeout_s = self.core.read_timeout_s(time.monotonic())
        connect_timeout_s = min(self._options.connect_timeout_s, read_timeout_s)
        timeout = self.package.Timeout(read_timeout_s, connect=connect_timeout_s).as_dict()
        headers = self._headers.copy()
        headers.update(self.core.begin_attempt())
        return self.package.Request(
            self._request.method,
            self._request.url,
            headers=headers,
            content=self._request.content,
            extensions={**self._request.extensions, "timeout": timeout},
        )

    def retry_delay(self, failure: ConnectionFailure) -> float:
        return self.core.retry_delay(failure, time.monotonic())


def _has_events(response: httpx.Response) -> bool:
    return response.status_code == 200 and response.headers.get("content-type", "").startswith("text/event-stream")


def _lost(fault: Exception, package: Any) -> ConnectionFailure:
    message = f"no connection to the server: {str(fault) or type(fault).__name__}"
    return ConnectionFailure(message, not isinstance(fault, (package.UnsupportedProtocol, package.LocalProtocolError)))


def _answer(response: httpx.Response, body: "bytes | _ResumedStream | _AsyncResumedStream") -> httpx.Response:
    """Returns the response that the user of the transport gets."""
    headers = [(name, value) for name, value in response.headers.multi_items() if name not in _FRAMING_HEADERS]
    extensions = {"http_version": response.extensions.get("http_version", b"HTTP/1.1")}
    content: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"stream": body}
    return http_package(response).Response(response.status_code, headers=headers, extensions=extensions, **content)


@cache
def _stream_class(package: ModuleType) -> "type[_ResumedStream]":
    """Returns `_ResumedStream` as a byte stream of httpx or httpx2. The client of each accepts only its own class."""
    return type("_ResumedByteStream", (_ResumedStream, package.SyncByteStream), {})


@cache
def _async_stream_class(package: ModuleType) -> "type[_AsyncResumedStream]":
    return type("_AsyncResumedByteStream", (_AsyncResumedStream, package.AsyncByteStream), {})


class _ResumedStream:
    def __init__(self, inner: httpx.BaseTransport, request: _StreamRequest) -> None:
        self._inner, self._request, self._core = inner, request, request.core
        self._response: httpx.Response | None = None

    def open(self) -> httpx.Response:
        """Returns the first response that has events, or the last refusal."""
        response, body = self._connect(may_refuse=True)
        if body is not None:
            return _answer(response, body)
        self._response = response
        return _answer(response, self)

    def __iter__(self) -> Iterator[bytes]:
        while True:
            failure = yield from self._read()
            if failure is None:
                return
            time.sleep(self._request.retry_delay(failure))
            self._response, _ = self._connect()

    def close(self) -> None:
        if self._response is not None:
            self._response.close()

    def _read(self) -> Iterator[bytes]:
        """Yields the events of one connection. Returns the failure that ended it, or None if the stream is complete."""
        core, response = self._core, self._response
        assert response is not None, "open() or _connect() has set it"
        try:
            for received in cast(Iterable[bytes], response.stream):
                if events := core.feed(received, time.monotonic()):
                    yield events
                if core.is_complete or core.failure is not None:
                    break
            core.end_connection()
        except self._request.package.TransportError as fault:
            return _lost(fault, self._request.package)
        finally:
            response.close()
        return core.failure

    def _connect(self, *, may_refuse: bool = False) -> tuple[httpx.Response, bytes | None]:
        """Connects until it gets a response with events, and returns it. With `may_refuse`, returns the last refusal
        and its body when there are no attempts left."""
        while True:
            refused: tuple[httpx.Response, bytes] | None = None
            fault: Exception | None = None
            try:
                response = self._inner.handle_request(self._request.next_attempt())
                if _has_events(response):
                    return response, None
                refused = response, _read_refusal(response)
                failure = refusal(response.status_code, response.headers, refused[1])
            except self._request.package.TransportError as transport_fault:
                fault, failure = transport_fault, _lost(transport_fault, self._request.package)
            try:
                delay_s = self._request.retry_delay(failure)
            except StreamFailed as failed:
                if may_refuse and refused is not None:
                    return refused
                raise failed from fault
            time.sleep(delay_s)


def _read_refusal(response: httpx.Response) -> bytes:
    body = b""
    try:
        for received in cast(Iterable[bytes], response.stream):
            body += received
            if len(body) > _MAX_REFUSAL_BYTES:
                break
    finally:
        response.close()
    return body


class _AsyncResumedStream:
    """`_ResumedStream`, with awaits."""

    def __init__(self, inner: httpx.AsyncBaseTransport, request: _StreamRequest) -> None:
        self._inner, self._request, self._core = inner, request, request.core
        self._response: httpx.Response | None = None

    async def open(self) -> httpx.Response:
        response, body = await self._connect(may_refuse=True)
        if body is not None:
            return _answer(response, body)
        self._response = response
        return _answer(response, self)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        core = self._core
        while True:
            response, failure = self._response, None
            assert response is not None, "open() or _connect() has set it"
            try:
                async for received in cast(AsyncIterable[bytes], response.stream):
                    if events := core.feed(received, time.monotonic()):
                        yield events
                    if core.is_complete or core.failure is not None:
                        break
                core.end_connection()
                failure = core.failure
            except self._request.package.TransportError as fault:
                failure = _lost(fault, self._request.package)
            finally:
                await response.aclose()
            if failure is None:
                return
            await anyio.sleep(self._request.retry_delay(failure))
            self._response, _ = await self._connect()

    async def aclose(self) -> None:
        if self._response is not None:
            await self._response.aclose()

    async def _connect(self, *, may_refuse: bool = False) -> tuple[httpx.Response, bytes | None]:
        while True:
            refused: tuple[httpx.Response, bytes] | None = None
            fault: Exception | None = None
            try:
                response = await self._inner.handle_async_request(self._request.next_attempt())
                if _has_events(response):
                    return response, None
                refused = response, await _aread_refusal(response)
                failure = refusal(response.status_code, response.headers, refused[1])
            except self._request.package.TransportError as transport_fault:
                fault, failure = transport_fault, _lost(transport_fault, self._request.package)
            try:
                delay_s = self._request.retry_delay(failure)
            except StreamFailed as failed:
                if may_refuse and refused is not None:
                    return refused
                raise failed from fault
            await anyio.sleep(delay_s)


async def _aread_refusal(response: httpx.Response) -> bytes:
    body = b""
    try:
        async for received in cast(AsyncIterable[bytes], response.stream):
            body += received
            if len(body) > _MAX_REFUSAL_BYTES:
                break
    finally:
        await response.aclose()
    return body
