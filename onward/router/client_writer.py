"""The client's end of a stream: one answer, streamed or whole, or one error, and never two of them.

A streaming client has no status until there is something to say: an error before that is an error of HTTP. Silence is
broken by a comment each `KEEP_ALIVE_S`, which commits to the 200.
"""

import asyncio

from starlette.types import Send

from onward.proto.engine import ErrorInfo
from onward.proto.router import IGNORED_FIELDS_HEADER
from onward.router.client_stream import ClientStream
from onward.web import asgi, sse

KEEP_ALIVE_S = 15.0


class ClientWriter:
    end_marker = sse.DONE
    """The bytes that end every stream."""

    def __init__(self, send: Send, stream: ClientStream, *, reports_resumes: bool) -> None:
        self._send = send
        self._stream = stream
        self._reports_resumes = reports_resumes
        self._has_started = False
        self._writing = asyncio.Lock()

    async def write(self, events: bytes) -> None:
        """Writes complete events to a streaming client. The first call also sends the status 200 and the headers."""
        assert self._stream.request.is_streaming, "events are written to streaming clients only"
        async with self._writing:
            if not self._has_started:
                self._has_started = True
                await self._send(asgi.start_message(200, {**sse.HEADERS, **self._ignored_header()}))
            await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def keep_alive(self) -> None:
        if self._stream.request.is_streaming and not self._writing.locked():
            await self.write(b": waiting\n\n")

    async def finish(self) -> None:
        if not self._stream.request.is_streaming:
            assert self._stream.response_body is not None, "a complete answer has a body"
            headers = {**asgi.JSON_HEADERS, **self._resume_header(), **self._ignored_header()}
            await asgi.respond(self._send, 200, self._stream.response_body, headers)
            return
        comment = b": resumes %d\n\n" % self._stream.num_resumes if self._reports_resumes else b""
        if comment or self.end_marker or not self._has_started:  # a client that lacks only the end gets an empty stream
            await self.write(comment + self.end_marker)
        await self._send(asgi.body_message(b"", more_body=False))

    async def fail(self, error: ErrorInfo, body: bytes | None) -> None:
        if not self._has_started:
            await asgi.respond_error(self._send, error, body)
            return
        await self.write(await self.error_event(error, body) + self.end_marker)
        await self._send(asgi.body_message(b"", more_body=False))

    async def error_event(self, error: ErrorInfo, body: bytes | None) -> bytes:
        """Returns the event that reports an error. `body` is the error as an instance wrote it; without it, the event
        is made from `error`."""
        return sse.error_event(error) if body is None else sse.named_event("error", body)

    def _ignored_header(self) -> dict[str, str]:
        ignored = self._stream.ignored_fields
        return {} if ignored is None else {IGNORED_FIELDS_HEADER: ignored}

    def _resume_header(self) -> dict[str, str]:
        return {"x-onward-resumes": str(self._stream.num_resumes)} if self._reports_resumes else {}
