"""Responses to HTTP/1.0 clients, which do not know chunked encoding: a body of unknown length ends with the connection."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class CloseDelimitedCycle(RequestResponseCycle):
    """Sends a body without a `Content-Length` without chunks. uvicorn encodes such a body in chunks, unless it expects
    a length, so the length of each part is set just before the part is sent."""

    @classmethod
    def replacing(cls, cycle: RequestResponseCycle) -> "CloseDelimitedCycle":
        """Returns a replacement for a cycle that has not begun yet."""
        return cls(
            scope=cycle.scope,
            transport=cycle.transport,
            flow=cycle.flow,
            logger=cycle.logger,
            access_logger=cycle.access_logger,
            access_log=cycle.access_log,
            default_headers=cycle.default_headers,
            message_event=cycle.message_event,
            expect_100_continue=False,  # an HTTP/1.0 client knows no interim responses either
            keep_alive=False,
            on_response=cycle.on_response,
        )

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._is_open_ended = not any(name.lower() == b"content-length" for name, _ in message["headers"])
            if self._is_open_ended:
                self.chunked_encoding = False
        elif self._is_open_ended:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)

    _is_open_ended = False
