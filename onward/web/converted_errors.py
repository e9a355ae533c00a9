"""Converts the bodies of error responses to the form of another API than OpenAI's, at the edge of the application.

A server of several APIs writes an error once. So every error of an API has that API's form, also one of authentication, of
the HTTP layer or of an instance behind a router.
"""

from collections.abc import Callable

from starlette.types import Message, Send

Header = tuple[bytes, bytes]
BodyConverter = Callable[[bytes, int, str | None], bytes]
"""Returns an error's body, given the body in OpenAI's form, the status and the request's id."""
_REQUEST_ID = b"x-request-id"


class ConvertedErrorSend:
    """A `send` that converts the bodies of error responses. Other bodies pass unchanged."""

    def __init__(self, send: Send, convert: BodyConverter, id_header: bytes | None = None) -> None:
        """`id_header`: another header in which every response repeats the request's id."""
        self._send, self._convert, self._id_header = send, convert, id_header
        self._held_start: Message | None = None
        """Start of an error response. It is held until the body, and so its content-length, is known."""
        self._held_body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", []))
            if self._id_header is not None:
                headers += [(self._id_header, value) for name, value in headers if name == _REQUEST_ID]
            message = {**message, "headers": headers}
            if message["status"] >= 400:
                self._held_start = message
                return
        elif self._held_start is not None:
            self._held_body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_error(self._held_start)
            return
        await self._send(message)

    async def _send_error(self, start: Message) -> None:
        self._held_start = None
        request_id = next((value.decode("latin-1") for name, value in start["headers"] if name == _REQUEST_ID), None)
        body = self._convert(self._held_body, start["status"], request_id)
        headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
        await self._send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
