"""Watches clients that have closed their sending side: some still read the response, others have gone.

Both look the same until data is sent: only then does the kernel of a client that has gone answer with a reset. So bytes
are sent that clients skip: an interim response if the response has not begun, or a comment in a stream of events. The
state of the socket is checked until the response is over. Does not apply to TLS, which has no half-closed connections.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable

from starlette.types import Message, Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

FIRST_LOOK_S = 0.02
MAX_PAUSE_S = 1.0
"""Longest pause between two checks of the socket. Each pause is twice as long as the one before."""
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Clients skip it, whether or not they have asked for it. Not all of them know interim responses other than 100."""
COMMENT = b":\n\n"
"""In server-sent events a line that begins with a colon is a comment."""
_EVENT_STREAM = "onward.is_event_stream"
_TCP_CLOSE_WAIT = 8
"""Linux, `tcp_states.h`: the client has closed its side, and has not reset the connection."""


def note_response_start(scope: Scope, start: Message) -> None:
    """Records whether the response is an event stream, for `skippable_bytes`."""
    content_types = (value for name, value in start.get("headers", []) if name.lower() == b"content-type")
    scope[_EVENT_STREAM] = next(content_types, b"").startswith(b"text/event-stream")


def skippable_bytes(scope: Scope, cycle: RequestResponseCycle) -> bytes:
    """Returns bytes that can be sent now and that the client skips. Empty if there are none."""
    if not cycle.response_started:
        return PROBE if scope["http_version"] == "1.1" else b""
    if not scope.get(_EVENT_STREAM):
        return b""
    return b"%x\r\n%b\r\n" % (len(COMMENT), COMMENT) if cycle.chunked_encoding else COMMENT


class HalfClosedWatcher:
    """Watches one connection, from the moment its client has closed its sending side until `stop`."""

    def __init__(self, transport: asyncio.Transport, on_gone: Callable[[], None]) -> None:
        self._transport, self._on_gone = transport, on_gone
        self._pause_s = FIRST_LOOK_S
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._check)

    def stop(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        if _is_reset(self._transport):
            self._on_gone()
            return
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._check)


def _is_reset(transport: asyncio.Transport) -> bool:
    """Returns whether the client has reset the connection. It is False on systems that do not report this; a later
    write fails there."""
    client_socket = transport.get_extra_info("socket")
    if client_socket is None or not hasattr(socket, "TCP_INFO"):
        return False
    with contextlib.suppress(OSError):
        return client_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _TCP_CLOSE_WAIT
    return True
